"""More GPUs never give a later finish or a refusal, more tokens never an earlier one; none is above the roofline."""

import random
from dataclasses import dataclass, replace

import pytest

from bessemer.errors import UserError
from bessemer.plan.hardware import gpu_catalogue, parse_cluster, usable_subclusters
from bessemer.plan.search.proposal import Proposal, even_rows, propose

from .plans import plan_on, request

MODELS = ("125m", "350m", "1b", "3b", "7b", "8b", "13b", "34b", "70b", "120b", "405b")
CONTEXTS = (None, None, 1024, 2048, 4096, 8192, 32_768, 131_072)


@dataclass(frozen=True)
class Question:
    model: str
    gpu: str
    count: int
    tokens: int
    context: int | None = None
    batch: int | None = None

    def plan(self) -> Proposal:
        return plan_on(self.model, f"{self.count} x {self.gpu}", self.tokens, self.context, self.batch)


def drawn(seed: int, most_gpus: int = 4096) -> Question:
    draw = random.Random(seed)
    power = draw.uniform(0, most_gpus.bit_length() - 1)
    count = int(2**power) if draw.random() < 0.5 else 2 ** int(power)
    context = draw.choice(CONTEXTS)
    batch = (context or 4096) * draw.randint(1, 3000) if draw.random() < 0.3 else None
    tokens = int(10 ** draw.uniform(9, 13.18))  # 1B to 15T
    return Question(draw.choice(MODELS), draw.choice(sorted(gpu_catalogue())), count, tokens, context, batch)


def check(question: Question) -> bool:
    """False where the question itself has no plan, such as a model that does not fit."""
    try:
        plan = question.plan()
    except UserError:
        return False
    twice = replace(question, count=2 * question.count).plan()
    longer = replace(question, tokens=2 * question.tokens).plan()
    assert twice.wall_s <= plan.wall_s * (1 + 1e-9), f"{question}: later with twice the GPUs"
    assert longer.wall_s >= plan.wall_s * (1 - 1e-9), f"{question}: earlier with twice the tokens"
    assert all(0 < one.best.mfu <= 1 for one in (plan, twice, longer)), f"{question}: beyond the roofline"
    idle = any("are idle" in note for note in twice.notes)
    assert idle == (twice.goal.cluster.count < twice.available.count), f"{question}: idle GPUs and no word of them"
    return True


@pytest.mark.parametrize(
    "question",
    [
        Question("125m", "B200", 128, 100_000_000_000),  # 896 rows among 256 processes
        Question("125m", "H100", 96, 1_000_000_000),  # 192 rows, fewer than twice the GPUs
        Question("1b", "A100-80GB", 11, 20_000_000_000, batch=4096 * 13),  # primes
        Question("7b", "H200", 1, 10_000_000_000),  # one GPU keeps its weights in fewer bytes than two
    ],
    ids=str,
)
def test_cases_that_went_wrong(question: Question) -> None:
    assert check(question)


def test_a_few_random_plans() -> None:
    assert sum(check(drawn(seed, most_gpus=32)) for seed in range(6)) >= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_random_plans() -> None:
    planned, seed = 0, 1000
    while planned < 200:  # those that do not fit are not counted
        planned, seed = planned + check(drawn(seed)), seed + 1


def test_idle_gpus_are_named_with_the_reason() -> None:
    plan = Question("125m", "B200", 256, 100_000_000_000).plan()
    (note,) = [note for note in plan.notes if "are idle" in note]
    assert note.startswith(f"{plan.goal.cluster.count} of 256 GPUs are used, ") and "on all of them" in note
    assert plan.best.layout.size == plan.goal.cluster.count < plan.available.count == 256


def test_rows_that_do_not_divide_are_padded_and_said() -> None:
    plan = Question("1b", "A100-80GB", 8, 20_000_000_000, context=4096, batch=4096 * 9).plan()
    lost = 1 - 9 / plan.best.padded_rows
    assert plan.goal.rows == 9 and plan.best.padded_rows % plan.best.layout.dp == 0
    assert any("padded" in note for note in plan.notes) == (lost >= 0.05)


def test_degrees_that_are_written_leave_gpus_idle_rather_than_be_refused() -> None:

    asked = request("7b", 10_000_000_000, degrees={"pp": 3})
    plan = propose(asked, parse_cluster("8xH100"))
    assert plan.goal.cluster.count == 6 and plan.best.layout.pp == 3
    with pytest.raises(UserError, match="pp 3 needs 3 GPUs, and there are 2"):
        propose(asked, parse_cluster("2xH100"))


@pytest.mark.parametrize(
    "text", ["1xH100", "9xH100", "11xH100", "12xH100", "100xH100", "4096xB200", "3 nodes of 4 H100"]
)
def test_parts_of_a_cluster_are_among_those_of_twice_as_many(text: str) -> None:
    cluster = parse_cluster(text)
    nodes = cluster.nodes if "nodes" in text else None
    twice = parse_cluster(f"{2 * nodes} nodes of 4 H100" if nodes else f"{2 * cluster.count}x{cluster.gpu.name}")
    parts = usable_subclusters(cluster)
    assert parts[0] == cluster and set(parts) <= set(usable_subclusters(twice))
    assert all(part.count % part.per_node == 0 and part.count <= cluster.count for part in parts)


def test_twice_the_batch_gives_at_most_twice_the_rows() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        rows = 2 ** draw.uniform(-2, 14)
        assert 1 <= even_rows(rows) <= even_rows(2 * rows) <= 2 * even_rows(rows)
        assert even_rows(rows) >= 0.87 * rows
