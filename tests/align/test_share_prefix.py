"""A pair whose prompt is in the row once, and several pairs in a row: losses and gradients of separate documents."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from bessemer.align.answers import REFERENCE
from bessemer.align.dpo import Dpo
from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.groups import GroupRows, measure_groups
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.model.transformer import build_model
from bessemer.spec.mixture import quantise
from bessemer.spec.preference import DpoSpec
from bessemer.spec.shape import ModelShape

VOCAB, EOS, PAIRS = 40, 0, 12
SHAPES = {
    "rope": {},
    "learned": {"positions": "learned", "max_positions": 64},
    "none": {"positions": "none", "kv_heads": 4},
    "sinusoidal": {"positions": "sinusoidal"},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Pairs of unequal lengths. Some answers begin with the same tokens, some prompts end differently in a pair."""
    prefix, draw = tmp_path_factory.mktemp("store") / "pairs", np.random.default_rng(0)
    with StoreWriter(prefix, VOCAB, "t") as writer:
        for pair in range(PAIRS):
            prompt = draw.integers(1, VOCAB, draw.integers(1, 12))
            for side in (0, 1):
                own = prompt.copy()
                own[-1] = (own[-1] + side) % (VOCAB - 1) + 1 if pair % 4 == 3 else own[-1]
                answer = np.append(np.append([7, 8], draw.integers(1, VOCAB, draw.integers(1, 7))), EOS)
                tokens, mask = np.append(own, answer), np.append(np.zeros(own.size), np.ones(answer.size))
                fields = {"group": np.array([pair], np.int64), "chosen": np.array([1 - side], np.int32)}
                writer.add(tokens, "a.jsonl", pair + 1, pair, 5, mask=mask.astype(np.uint8), fields=fields)
    return TokenStore(str(prefix))


def batch_of(rows: GroupRows) -> Batch:
    order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": rows.count}, seed=1)
    return BatchStream({"a": rows}, order, rows.length, StepPositions([BatchPhase(0, rows.count)])).batch(0)


def shape_of(**changes: object) -> ModelShape:
    size = {"vocab": VOCAB, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
    return ModelShape(**{**size, **changes})  # type: ignore[arg-type]


def results(batch: Batch, shape: ModelShape, spec: DpoSpec, begins: tuple[int, ...] | None) -> dict[str, Tensor]:
    """The loss, each metric, and the gradients, for a model and another one as the reference."""
    objective = Dpo(spec, EOS, begins)
    model, objective.models[REFERENCE] = (build_model(shape, "cpu", seed) for seed in (0, 1))
    feed = objective.feed(batch, torch.device("cpu"))
    feed.totals = feed.counts
    terms = objective.loss(model, feed, feed.count)
    terms.loss.backward()
    made = {"loss": terms.loss.detach(), "count": torch.tensor(feed.count)}
    made |= {name: total / count for name, (total, count) in terms.metrics.items()}
    made |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return made


@pytest.mark.parametrize("begins", [None, (5,), ()], ids=["eos", "bos", "nothing"])
@pytest.mark.parametrize("positions", SHAPES)
def test_shared_and_packed_pairs_have_the_losses_of_separate_ones(
    store: TokenStore, positions: str, begins: tuple[int, ...] | None
) -> None:
    shape, spec = shape_of(**SHAPES[positions]), DpoSpec(sft=0.3)
    plain = GroupRows(store, 64)
    expected = results(batch_of(plain), shape, spec, begins)
    assert expected["count"] == PAIRS and len(expected) > 15
    for share, pack in ((True, False), (False, True), (True, True)):
        rows = GroupRows(store, 64, share=share, pack=pack)
        assert rows.used > plain.used or not pack
        made = results(batch_of(rows), shape, spec, begins)
        for name, value in expected.items():
            torch.testing.assert_close(made[name], value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_orpo_imitates_the_shared_prompt_once(store: TokenStore) -> None:
    spec, shape = DpoSpec(loss="orpo"), shape_of()
    expected, made = (results(batch_of(GroupRows(store, 64, share)), shape, spec, None) for share in (False, True))
    for name, value in expected.items():
        torch.testing.assert_close(made[name], value, rtol=1e-5, atol=1e-5)


def test_the_common_beginning_ends_where_the_prompts_differ_or_the_answers_begin(store: TokenStore) -> None:
    groups = measure_groups(store, share=True)
    for pair, common in enumerate(groups.common.tolist()):
        documents = [store.slice(*(int(edge[0]) for edge in store.extents(np.array([2 * pair + i])))) for i in (0, 1)]
        assert documents[0][:common].tolist() == documents[1][:common].tolist()
        answers = [documents[i].size - np.flatnonzero(documents[i] == 7)[-1] for i in (0, 1)]
        prompt = documents[0].size - answers[0]
        assert common <= prompt and (common == prompt) == (pair % 4 != 3 and documents[1].size - answers[1] == prompt)
    saved = measure_groups(store).columns - groups.columns
    assert (saved == groups.common).all() and saved.sum() > 0


def test_a_changed_branch_changes_nothing_in_the_other(store: TokenStore) -> None:
    batch = batch_of(GroupRows(store, 64, share=True))
    objective = Dpo(DpoSpec(loss="simpo"), EOS)
    model = build_model(shape_of(), "cpu", 0)
    feed: Callable[[], Tensor] = lambda: model(made.tokens_BT, made.attention_mask)  # noqa: E731
    made = objective.feed(batch, torch.device("cpu"))
    rejected = made.attention_mask.branches_BT == 2
    before = feed()
    chosen = torch.from_numpy(np.asarray(objective.inputs(batch).branches == 1))
    made.tokens_BT = torch.where(chosen, (made.tokens_BT + 1) % VOCAB, made.tokens_BT)
    after = feed()
    assert torch.equal(before[rejected], after[rejected]) and not torch.equal(before[chosen], after[chosen])
