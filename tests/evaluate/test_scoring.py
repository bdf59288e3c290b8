"""Batched likelihoods equal those of one forward pass per request."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from bessemer.errors import UserError
from bessemer.evaluate.scoring import Likelihood, ScoredText, Scorer, pack_rows, pack_trees
from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.shape import ModelShape

SHAPE = ModelShape(vocab=61, width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=48, max_positions=256)
MODELS = {
    "rope": SHAPE,
    "window": replace(SHAPE, windows=(7, 0)),
    "learned": replace(SHAPE, positions="learned"),
    "alibi": replace(SHAPE, positions="alibi"),
}


def requests_with_shared_beginnings(seed: int, vocab: int = 61) -> list[tuple[list[int], list[int]]]:
    """Questions behind few-shot texts, each with choices; some choices are one token, some equal or nested."""
    draw = random.Random(seed)

    def words(count: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(count)]

    made = []
    for _ in range(3):
        shots = words(draw.randint(0, 40))
        for _ in range(draw.randint(1, 5)):
            question = shots + words(draw.randint(1, 12))
            choices = [words(draw.randint(1, 6)) for _ in range(4)]
            made += [(question, choice) for choice in (*choices, choices[0], choices[0] + words(2), words(1))]
    draw.shuffle(made)
    return made


@torch.no_grad()
def one_by_one(model: Decoder, requests: list[tuple[list[int], list[int]]]) -> list[Likelihood]:
    results = []
    for context, continuation in requests:
        logits_TV = model.logits(model(torch.tensor([[*context, *continuation]])))[0].log_softmax(-1)
        at_C = torch.arange(len(context) - 1, len(context) + len(continuation) - 1)
        target_C = torch.tensor(continuation)
        hits = logits_TV[at_C].argmax(-1) == target_C
        results.append(Likelihood(logits_TV[at_C, target_C].sum().item(), bool(hits.all())))
    return results


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("pack", [128, 512])
def test_packed_trees_score_like_one_pass_per_request(kind: str, pack: int) -> None:
    model = build_model(MODELS[kind], "cpu", seed=1).double().eval()
    requests = requests_with_shared_beginnings(seed=pack)
    scorer = Scorer(model, pack=pack)
    assert scorer.trees == (kind != "alibi")
    found, expected = scorer.score(requests), one_by_one(model, requests)
    # Logits are compared in float32, whatever the model computes in.
    np.testing.assert_allclose([each.logp for each in found], [each.logp for each in expected], rtol=1e-6)
    assert [each.greedy for each in found] == [each.greedy for each in expected]


def test_greedy_continuations_are_recognised() -> None:
    model = build_model(SHAPE, "cpu", seed=2).eval()
    context = [1, 2, 3]
    best: list[int] = []
    for _ in range(3):
        best.append(int(model.logits(model(torch.tensor([context + best])))[0, -1].argmax()))
    wrong = [*best[:2], (best[2] + 1) % 61]
    assert [each.greedy for each in Scorer(model).score([(context, best), (context, wrong)])] == [True, False]


def test_a_shared_beginning_is_computed_once() -> None:
    shots = list(range(50)) * 2
    model, requests = build_model(SHAPE, "cpu", seed=3).eval(), []
    for question in range(10):
        requests += [([*shots, question, 7], [choice]) for choice in range(4)]
    scorer = Scorer(model, pack=256)
    scorer.score(requests)
    assert (scorer.passes, scorer.computed) == (1, 256)  # 100 + 10 * 2 tokens, where rows of their own take 40 * 102


def test_truncation_is_from_the_left_and_counted() -> None:
    model = build_model(SHAPE, "cpu", seed=4).eval()
    context, continuation = [i % 61 for i in range(40)], [5, 6, 7]
    scorer = Scorer(model, context=16)
    (cut,) = scorer.score([(context, continuation)])
    (short,) = one_by_one(model, [(context[-14:], continuation)])
    assert scorer.truncated == 1 and cut.logp == pytest.approx(short.logp, rel=1e-5)


def test_ranks_divide_the_passes_and_agree() -> None:
    model = build_model(SHAPE, "cpu", seed=5).eval()
    requests = requests_with_shared_beginnings(seed=9)
    whole = Scorer(model, pack=128).score(requests)
    sent: dict[int, list[object]] = {0: [], 1: []}

    def run(rank: int, answers: list[list[object]] | None) -> list[Likelihood]:
        replies = iter(answers or [])

        def gather(value: object) -> list[object]:
            sent[rank].append(value)
            return next(replies) if answers else [value, value]

        return Scorer(model, pack=128, share=(rank, 2, gather)).score(requests)

    for rank in (0, 1):
        run(rank, None)
    exchanged = [list(values) for values in zip(sent[0][:2], sent[1][:2], strict=True)]
    for rank in (0, 1):
        found = run(rank, exchanged)
        assert [each.greedy for each in found] == [each.greedy for each in whole]
        assert [each.logp for each in found] == pytest.approx([each.logp for each in whole])


def test_rows_of_one_length_stay_together() -> None:
    texts = [ScoredText(np.arange(length), [(length - 1, 1, 0)]) for length in (3, 5, 5, 4)]
    assert [pack.tokens_BT.shape for pack in pack_rows(texts, 100, same_length=True)] == [(2, 5), (1, 4), (1, 3)]
    assert [pack.tokens_BT.shape for pack in pack_rows(texts, 10, same_length=False)] == [(2, 5), (2, 4)]


def test_columns_end_where_their_continuations_do() -> None:
    texts = [ScoredText(np.array(ids), [(0, 0, 0)]) for ids in ([1, 2], [1, 2, 3], [1, 4], [5])]
    (pack,) = pack_trees(texts, 128)
    assert pack.until_BT is not None and pack.depth_BT is not None
    assert pack.tokens_BT[0, :5].tolist() == [1, 2, 3, 4, 5]
    assert pack.until_BT[0, :6].tolist() == [4, 3, 3, 4, 5, 6]
    assert pack.depth_BT[0, :5].tolist() == [0, 1, 2, 1, 0]


def test_models_that_predict_no_next_token_are_refused() -> None:
    both_ways = build_model(replace(SHAPE, causal=False), "cpu", seed=0)
    with pytest.raises(UserError, match="next token"):
        Scorer(both_ways)
