"""Rollouts, rewards and losses of reinforcement learning are the same on 1, 2 and 4 ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.align.rollouts import RoundStore
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicas": (2, {"dp_replicate": 2}),
    "shards": (4, {"dp_shard": 4}),
    "tensors": (2, {"tp": 2}),
}
SHAPE = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 64}


def spec_of(folder: Path, name: str, layout: dict[str, Any], **parts: Any) -> RunSpec:
    rows = folder / "rows.jsonl"
    if not rows.exists():
        questions = [{"q": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
        rows.write_text("".join(json.dumps(row) + "\n" for row in questions))
    return RunSpec.model_validate({
        "name": name, "runs": str(folder / "runs"), "precision": "fp32", "model": SHAPE,
        "data": {"sources": {"rows": {"path": [str(rows)], "columns": {"prompt": "q"}}}, "context": 24,
                 "validation": 0.1},
        "budget": {"steps": 4, "micro_batch": 2}, "optimizer": {"lr": 0.001},
        "schedule": {"kind": "constant", "warmup": 1}, "evaluate": {"every": 4}, "checkpoint": {"every": 4},
        "parallel": {"device": "cpu", "threads": 1, **layout}, **parts,
    })  # fmt: skip


@pytest.fixture(scope="module")
def base(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of a few steps, and the settings of RL with every number that a round can hold."""
    folder = tmp_path_factory.mktemp("rl")
    spec = spec_of(folder, "base", {}, tokenizer={"kind": "char", "chat": "none"}, objective="sft")
    columns = {"prompt": "q", "completion": "answer"}
    source = spec.data.sources["rows"].model_copy(update={"columns": columns})
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"sources": {"rows": source}})})
    assert ranks(1, lambda: train(spec).kind) == ["finished"]
    checkpoint = next((run_folder(spec) / "checkpoints").glob("step-*"))
    (folder / "r.py").write_text(
        "def even(completion_ids, **c):\n    return [sum(i % 2 for i in x) / 4 for x in completion_ids]\n"
    )
    rl = {"prompts": 5, "samples": 4, "max_tokens": 4, "rewards": {"even": f"{folder / 'r.py'}:even"}, "epochs": 1}
    return folder, {"objective": "ppo", "start_from": str(checkpoint), "rl": {**rl, "kl": {"beta": 0.1}}}


def curves(spec: RunSpec) -> np.ndarray:
    names = ("loss", "reward", "answer_tokens", "kl", "value_loss", "entropy", "grad_norm", "advantage_mean")
    return np.array([[record[name] for name in names] for record in Run.existing(run_folder(spec)).metrics()])


@pytest.fixture(scope="module")
def alone(ranks: Any, base: tuple[Path, dict[str, Any]]) -> RunSpec:
    spec = spec_of(base[0], "one", {}, **base[1])
    assert ranks(1, lambda: train(spec).kind) == ["finished"]
    return spec


@pytest.mark.parametrize(
    "name",
    ["replicas", pytest.param("shards", marks=pytest.mark.slow), pytest.param("tensors", marks=pytest.mark.slow)],
)
def test_rounds_and_losses_are_the_same(ranks: Any, base: tuple[Path, Any], alone: RunSpec, name: str) -> None:
    """Five prompts do not divide evenly."""
    size, layout = LAYOUTS[name]
    spec = spec_of(base[0], name, layout, **base[1])
    assert ranks(size, lambda: train(spec).kind) == ["finished"] * size
    rounds = [RoundStore(run_folder(each) / "rollouts").load(0) for each in (alone, spec)]
    assert rounds[0] is not None and rounds[1] is not None
    for first, second in zip(rounds[0].samples, rounds[1].samples, strict=True):
        assert (first.position, first.text, first.reward) == (second.position, second.text, second.reward)
        np.testing.assert_allclose(first.logps, second.logps, atol=1e-4)
    for key in ("values", "returns", "advantages", "old_logps", "ref_logps"):
        np.testing.assert_allclose(rounds[0].arrays[key], rounds[1].arrays[key], rtol=1e-3, atol=2e-4)
    np.testing.assert_allclose(curves(spec)[0], curves(alone)[0], rtol=2e-3, atol=2e-5)
    answers = [[json.loads(line)["answer"] for line in (run_folder(each) / "samples" / "step-00000000.jsonl").open()]
               for each in (alone, spec)]  # fmt: skip
    assert answers[0] == answers[1] and len(answers[0]) > 2


def test_a_reward_that_fails_on_one_rank_ends_all(ranks: Any, base: tuple[Path, Any]) -> None:
    function = base[0] / "fails.py"
    function.write_text(
        "def fails(prompts, **c):\n    return [1.0 if len(p) < 9 and p != prompts[0] else 1 / 0 for p in prompts]\n"
    )
    rl = {**base[1]["rl"], "rewards": {"bad": f"{function}:fails"}}
    spec = spec_of(base[0], "fails", {"dp_replicate": 2}, **{**base[1], "rl": rl})

    def attempt() -> str:
        try:
            train(spec)
        except Exception as error:
            return str(error)
        except SystemExit as error:
            return f"exit {error.code}"
        return "finished"

    ends = ranks(2, attempt)
    assert any("rl.rewards.bad" in end and "ZeroDivisionError" in end for end in ends), ends
    assert "finished" not in ends


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicas", "shards"])
def test_on_policy_distillation_is_the_same(ranks: Any, base: tuple[Path, Any], name: str) -> None:
    """Rounds of sampled answers and of the data's, divergences and held-out answers."""
    size, layout = LAYOUTS[name]
    settings = {
        "objective": "gkd", "models": {"teacher": base[1]["start_from"]},
        "distill": {"loss": "js", "on_policy": 0.5, "temperature": 2.0}, "rl": {"prompts": 6, "max_tokens": 4},
        "tokenizer": {"path": str(base[0] / "runs" / "base" / "tokenizer.json"), "chat": "none"}, "seed": 1,
    }  # fmt: skip
    specs = []
    for number, (count, degrees) in enumerate(((1, {}), (size, layout))):
        spec = spec_of(base[0], f"gkd-{name}-{number}", degrees, **settings)
        source = spec.data.sources["rows"].model_copy(update={"columns": {"prompt": "q", "completion": "answer"}})
        spec = spec.model_copy(update={"data": spec.data.model_copy(update={"sources": {"rows": source}})})
        assert ranks(count, lambda spec=spec: train(spec).kind) == ["finished"] * count
        specs.append(spec)
    names = ("loss", "nll", "divergence", "on_policy", "answer_tokens", "grad_norm")
    one, other = (np.array([[r[n] for n in names] for r in Run(run_folder(s)).metrics()]) for s in specs)
    np.testing.assert_allclose(one[0], other[0], rtol=2e-3, atol=2e-6)
    losses = [[record["loss"] for record in Run(run_folder(spec)).validations()] for spec in specs]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=1e-6) and set(one[:, 3]) <= {0.0, 1.0}
