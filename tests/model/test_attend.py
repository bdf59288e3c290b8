"""Attention against a triple loop in float64, under every mask; FlexAttention and tiles against dense masks."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bessemer.model.attention import BACKENDS, AttentionCall, attend, attend_flex, select_backend, unsupported_reason
from bessemer.model.attention_mask import TILE, AttentionMask, compute_cu_seqlens

CPU = torch.device("cpu")


def is_global(attention_mask: AttentionMask, b: int, position: int) -> bool:
    if attention_mask.global_BT is not None and attention_mask.global_tokens == 0:
        return bool(attention_mask.global_BT[b, position])
    documents = attention_mask.documents_BT
    start = 0 if documents is None else documents[b].tolist().index(int(documents[b, position]))
    return position - start < attention_mask.global_tokens


def may_look(attention_mask: AttentionMask, window: int, b: int, q: int, k: int) -> bool:
    """The rule in words, of numbers."""
    if (
        attention_mask.documents_BT is not None
        and attention_mask.documents_BT[b, q] != attention_mask.documents_BT[b, k]
    ):
        return False
    free = is_global(attention_mask, b, q) or is_global(attention_mask, b, k)
    if window and abs(q - k) >= window and not free:
        return False
    size, before = attention_mask.blocks
    if size and abs(q // size - k // size) > before and k >= size and not free:
        return False
    return (
        not attention_mask.causal
        or k <= q
        or (attention_mask.prefix_BT is not None and bool(attention_mask.prefix_BT[b, k]))
    )


def loop(
    q_BTND: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, attention_mask: AttentionMask, window: int, scale: float,
    cap: float | None,
    bias_1NTS: Tensor | None,
) -> Tensor:  # fmt: skip
    (B, T, N, _), (_, S, K, _) = q_BTND.shape, k_BSKD.shape
    out = torch.empty(B, T, N, v_BSKE.shape[-1], dtype=torch.float64)
    for b, t, n in itertools.product(range(B), range(T), range(N)):
        seen = [s for s in range(S) if may_look(attention_mask, window, b, S - T + t, s)]
        shared = n // (N // K)
        logits = []
        for s in seen:
            logit = (q_BTND[b, t, n] * k_BSKD[b, s, shared]).sum() * scale
            if cap is not None:
                logit = cap * torch.tanh(logit / cap)
            logits.append(logit if bias_1NTS is None else logit + bias_1NTS[0, n, t, s])
        shares = torch.stack(logits).exp()
        out[b, t, n] = (shares / shares.sum()) @ v_BSKE[b, seen, shared]
    return out


def make_case(
    B: int = 2, T: int = 5, past: int = 0, K: int = 2, groups: int = 2, E: int = 6, packed: bool = False,
    prefixed: bool = False, causal: bool = True, blocks: tuple[int, int] = (0, 0), window: int = 0, scale: float = 0.5,
    cap: float | None = None, biased: bool = False, seed: int = 0, global_tokens: int = 0, named: bool = False,
) -> dict[str, Any]:  # fmt: skip
    S = T if packed else T + past
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64).requires_grad_()

    def coins(likely: float) -> Tensor:
        return torch.rand(B, S, generator=random) < likely

    return {
        "q_BTND": normal(B, T, K * groups, 4),
        "k_BSKD": normal(B, S, K, 4),
        "v_BSKE": normal(B, S, K, E),
        "attention_mask": AttentionMask(
            coins(0.4).cumsum(1) if packed else None,
            coins(0.3) if prefixed else None,
            causal,
            blocks,
            0 if named else global_tokens,
            coins(0.3) if named else None,
        ),
        "window": window,
        "scale": scale,
        "cap": cap,
        "bias_1NTS": normal(1, K * groups, T, S) if biased else None,
    }


def check(case: dict[str, Any]) -> None:
    leaves = [x for x in case.values() if isinstance(x, Tensor)]
    expected = loop(**case)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    true = torch.autograd.grad(expected, leaves, upstream)
    for backend in ("auto", "math", "varlen"):  # the last is served by the rule on a CPU
        out = attend(**case, backend=backend)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
        found = torch.autograd.grad(out, leaves, upstream)
        torch.testing.assert_close(found, true, rtol=1e-9, atol=1e-11)


@given(
    st.builds(
        make_case, B=st.integers(1, 2), T=st.integers(1, 6), past=st.sampled_from([0, 1, 3]), K=st.integers(1, 2),
        groups=st.integers(1, 3), E=st.sampled_from([4, 6]), packed=st.booleans(), prefixed=st.booleans(),
        causal=st.booleans(), blocks=st.sampled_from([(0, 0), (2, 0), (2, 1)]),
        window=st.sampled_from([0, 1, 2, 4, 50]), scale=st.sampled_from([0.5, 0.3]),
        cap=st.sampled_from([None, 0.7]), biased=st.booleans(), seed=st.integers(0, 999),
        global_tokens=st.sampled_from([0, 0, 1, 2]), named=st.sampled_from([False, False, True]),
    )
)  # fmt: skip
def test_every_mask_bias_and_cap_equals_a_triple_loop_with_gradients(case: dict[str, Any]) -> None:
    check(case)


def test_named_global_positions_differ_by_row() -> None:
    check(make_case(B=3, T=6, window=1, named=True, causal=False))


@pytest.mark.parametrize(
    ("causal", "past", "window", "cap", "biased"),
    itertools.product((True, False), (0, 2), (0, 3), (None, 0.7), (False, True)),
)
def test_plain_rows_equal_a_triple_loop_too(
    causal: bool, past: int, window: int, cap: float | None, biased: bool
) -> None:
    check(make_case(B=1, T=4, K=1, past=past, window=window, causal=causal, cap=cap, biased=biased))


def random_documents(rows: int, length: int, likely: float = 0.01, seed: int = 0) -> Tensor:
    return (torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < likely).cumsum(1).int()


def random_trees(length: int, seed: int) -> AttentionMask:
    """Two rows of texts in preorder: each text keeps some of the path of the one before it."""
    draw, rows = random.Random(seed), []
    for _ in range(2):
        until, depth, path, column = [length] * length, [0] * length, list[int](), 0
        while column < length:
            kept = draw.randint(0, len(path))
            for left in path[kept:]:
                until[left] = column
            path = path[:kept]
            for _ in range(min(draw.randint(1, 90), length - column)):
                depth[column] = len(path)
                path.append(column)
                column += 1
        rows.append((until, depth))
    untils, depths = zip(*rows, strict=True)
    return AttentionMask(until_BT=torch.tensor(untils), depth_BT=torch.tensor(depths))


PREFIX = torch.arange(256).expand(2, -1) % 150 < 20
BRANCHES = (torch.arange(256) >= 100).int().expand(2, -1) + (torch.arange(256) >= 170).int()
SIGHTS = {
    "causal": (AttentionMask(), 0),
    "both ways": (AttentionMask(causal=False), 0),
    "documents": (AttentionMask(random_documents(2, 256)), 0),
    "documents both ways": (AttentionMask(random_documents(2, 256), causal=False), 0),
    "window": (AttentionMask(), 100),
    "window both ways": (AttentionMask(causal=False), 100),
    "documents and window": (AttentionMask(random_documents(2, 256)), 30),
    "prefix": (AttentionMask(prefix_BT=PREFIX), 0),
    "documents and prefix": (AttentionMask(random_documents(2, 256), PREFIX), 0),
    "blocks": (AttentionMask(blocks=(32, 2)), 0),
    "branches": (AttentionMask(branches_BT=BRANCHES), 0),
    "documents and branches": (AttentionMask(random_documents(2, 256), branches_BT=BRANCHES), 0),
    "tree": (random_trees(256, 1), 0),
    "tree and window": (random_trees(256, 2), 30),
    "global tokens": (AttentionMask(random_documents(2, 256), global_tokens=2), 30),
    "global tokens both ways": (AttentionMask(causal=False, global_tokens=1), 20),
    "documents and wide blocks": (AttentionMask(random_documents(2, 256), blocks=(200, 0)), 0),
}


FAST_CAPPED = ("documents and window", "prefix", "global tokens")


@pytest.mark.parametrize(
    ("kind", "cap", "biased"),
    [
        *((kind, None, False) for kind in SIGHTS),
        *(pytest.param(kind, 0.9, True, marks=() if kind in FAST_CAPPED else pytest.mark.slow) for kind in SIGHTS),
    ],
)
def test_flex_gives_what_the_reference_gives_under_every_mask(kind: str, cap: float | None, biased: bool) -> None:
    # Forward only: torch has no backward of FlexAttention on a CPU. The gpu tests of test_backends.py have gradients.
    attention_mask, window = SIGHTS[kind]
    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 256, heads, 16, generator=random, dtype=torch.float64) for heads in (4, 2, 2))
    bias = torch.randn(1, 4, 256, 256, generator=random, dtype=torch.float64) if biased else None
    expected = attend(q, k, v, attention_mask, window, 0.25, cap, bias, backend="math")
    with torch.no_grad():
        found = attend_flex(*(x.transpose(1, 2) for x in (q, k, v)), attention_mask, window, 0.25, cap, bias).transpose(
            1, 2
        )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@given(
    st.integers(1, 4), st.sampled_from([0.0, 0.0, 0.005, 0.05]), st.sampled_from([0, 0, 1, 128, 129, 300]),
    st.sampled_from([(0, 0), (64, 1), (100, 0), (200, 1)]), st.booleans(), st.booleans(), st.integers(0, 99),
    st.sampled_from([0, 0, 3, 128, 140]), st.booleans(),
)  # fmt: skip
def test_tiles_hide_nothing_and_whole_ones_are_whole(
    tiles: int, likely: float, window: int, blocks: tuple[int, int], causal: bool, prefixed: bool, seed: int,
    global_tokens: int, branched: bool,
) -> None:  # fmt: skip
    T = tiles * TILE
    prefix = random_documents(2, T, 0.3, seed) % 2 == 0 if prefixed else None
    documents = random_documents(2, T, likely, seed) if likely else None
    attention_mask = AttentionMask(documents, prefix, causal, blocks, global_tokens)
    attention_mask.branches_BT = random_documents(2, T, 0.006, seed + 1) % 3 if branched else None
    dense = attention_mask.mask(window, T, T, CPU)
    seen = torch.ones(1, 1, T, T, dtype=torch.bool) if dense is None else dense
    pairs = seen[:, 0].unflatten(2, (tiles, TILE)).unflatten(1, (tiles, TILE)).transpose(2, 3).flatten(3)
    some, every = attention_mask._tile_visibility(window, T, CPU)
    assert not (pairs.any(-1) & ~some).any()
    assert torch.equal(every.expand_as(pairs[..., 0]), every & pairs.all(-1))
    # And none is lost or doubled on the way to FlexAttention's lists.
    listed = attention_mask.block_mask(window, T, CPU)
    assert torch.equal(listed.to_dense().bool()[:, 0], some)


@pytest.mark.parametrize("window", [0, 50, 300])
def test_tiles_of_trees_hide_nothing(window: int) -> None:
    for seed in range(8):
        attention_mask = random_trees(4 * TILE, seed)
        dense = attention_mask.mask(window, 4 * TILE, 4 * TILE, CPU)
        assert dense is not None and not attention_mask.plain(0, 512) and attention_mask.scattered(0, 512)
        pairs = dense[:, 0].unflatten(2, (4, TILE)).unflatten(1, (4, TILE)).transpose(2, 3).flatten(3)
        some, every = attention_mask._tile_visibility(window, 4 * TILE, CPU)
        assert not (pairs.any(-1) & ~some).any()
        assert torch.equal(every, every & pairs.all(-1))


def test_branches_see_their_beginning_and_themselves() -> None:
    documents, branches = torch.tensor([[0] * 7 + [1] * 5]), torch.tensor([[0, 0, 0, 1, 1, 2, 2, 0, 1, 1, 2, 2]])
    attention_mask = AttentionMask(documents, branches_BT=branches)
    seen = attention_mask.mask(0, 12, 12, CPU)
    assert seen is not None and not attention_mask.plain(0, 12) and attention_mask.scattered(0, 12)
    for q, k in itertools.product(range(12), range(12)):
        same = documents[0, q] == documents[0, k] and branches[0, k] in (0, branches[0, q])
        assert seen[0, 0, q, k] == (k <= q and bool(same)), (q, k)
    positions = [0, 1, 2, 3, 4, 3, 4, 0, 1, 2, 1, 2]
    assert attention_mask.positions(0, 12, CPU).tolist() == [positions]
    assert attention_mask.rotary_columns(0, 12, CPU).tolist() == [positions]
    alone = AttentionMask(branches_BT=branches[:, :7])
    assert alone.positions(0, 7, CPU).tolist() == [positions[:7]]


def test_a_long_row_of_short_documents_lists_few_tiles() -> None:
    documents = torch.arange(8192)[None] // 256
    assert AttentionMask(documents).block_mask(0, 8192, CPU).kv_num_blocks.sum() == 64  # diagonal ones, and
    assert (
        AttentionMask(documents).block_mask(0, 8192, CPU).full_kv_num_blocks.sum() == 32
    )  # one below it in each document


def test_borders_of_documents_end_with_their_row() -> None:
    borders, longest = compute_cu_seqlens(torch.tensor([[3, 3, 4, 4], [4, 4, 4, 7]]))
    assert borders.tolist() == [0, 2, 4, 7, 8] and borders.dtype == torch.int32 and longest == 3
    assert AttentionMask().cu_seqlens_on(2, 4, CPU)[0].tolist() == [0, 4, 8]
    documents = random_documents(3, 50, 0.2)
    borders, longest = AttentionMask(documents).cu_seqlens_on(3, 50, CPU)
    pieces = [documents.flatten()[a:b] for a, b in itertools.pairwise(borders.tolist())]
    assert all(len(set(piece.tolist())) == 1 for piece in pieces) and longest == max(map(len, pieces))


PACKED = AttentionCall(1024, 1024, 64, 64, torch.bfloat16, "cuda", masked=True)


@pytest.mark.parametrize(
    ("change", "able"),
    [
        ({}, {"sdpa", "cudnn", "efficient", "flex", "varlen", "math"}),
        ({"masked": False}, set(BACKENDS)),
        ({"scattered": True}, {"sdpa", "cudnn", "efficient", "flex", "math"}),
        ({"capped": True}, {"flex", "math"}),
        ({"bias": True}, {"sdpa", "cudnn", "efficient", "flex", "math"}),
        ({"bias": True, "learned": True}, {"sdpa", "efficient", "math"}),
        ({"dropout": True}, {"sdpa", "cudnn", "efficient", "math"}),
        ({"T": 1}, {"sdpa", "math"}),
        ({"T": 1000, "S": 1000}, {"sdpa", "cudnn", "efficient", "varlen", "math"}),
        ({"T": 1001, "S": 1001}, {"sdpa", "varlen", "math"}),
        ({"dtype": torch.float32}, {"sdpa", "efficient", "flex", "math"}),
        ({"D": 192, "E": 128}, {"sdpa", "cudnn", "efficient", "flex", "math"}),
        ({"device": "cpu"}, {"sdpa", "math"}),
    ],
)
def test_what_each_backend_can_do(change: dict[str, Any], able: set[str]) -> None:
    call = AttentionCall(**(PACKED.__dict__ | change))
    assert {name for name in BACKENDS if unsupported_reason(name, call) is None} == able
    for name in (*BACKENDS, "auto"):
        expected = name if name in able else "sdpa" if "sdpa" in able else "math"
        assert select_backend(name, call) == expected


def test_a_query_alone_sees_its_whole_cache() -> None:
    q, k, v = torch.randn(1, 1, 2, 4), torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4)
    shares = torch.softmax(torch.einsum("nd,snd->ns", q[0, 0], k[0]) / math.sqrt(4), dim=-1)
    torch.testing.assert_close(attend(q, k, v, AttentionMask(), 0, 0.5)[0, 0], torch.einsum("ns,snd->nd", shares, v[0]))
