"""Any flipped bit changes the digest, and the replica that differs is named."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bessemer.guard.replica_check as replicas
from bessemer.guard.replica_check import digest, minority_ranks

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
]


def tensors(seed=0):
    """Of every type, odd sizes, scalars, empty ones, and one that is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (7,), (2, 3, 3), (4, 4), (), (5,), (6,), (9,)]
    made = [
        (torch.randn(shape, generator=generator) * 3).to(dtype) for shape, dtype in zip(shapes, DTYPES, strict=True)
    ]
    return [*made, torch.randn(4, 6, generator=generator).t(), torch.zeros(0)]


def flipped(tensor, bit):
    raw = tensor.detach().contiguous().clone()
    flat = raw.view(-1).view(torch.uint8)
    flat[bit // 8] ^= 1 << (bit % 8)
    return raw


@given(data=st.data())
def test_one_flipped_bit_changes_the_digest(data):
    held = tensors(data.draw(st.integers(0, 1000)))
    before = int(digest(held))
    which = data.draw(st.integers(0, len(held) - 2))
    bits = 8 * held[which].numel() * held[which].element_size()
    held[which] = flipped(held[which], data.draw(st.integers(0, bits - 1)))
    assert int(digest(held)) != before


def test_equal_tensors_have_equal_digests_and_order_matters():
    assert int(digest(tensors())) == int(digest([tensor.clone() for tensor in tensors()]))
    a, b = torch.randn(8), torch.randn(8)
    assert int(digest([a, b])) != int(digest([b, a]))
    assert int(digest([a])) != int(digest([a.flip(0)]))


def test_bits_count_and_not_values():
    assert int(digest([torch.tensor([0.0])])) != int(digest([torch.tensor([-0.0])]))
    assert int(digest([torch.tensor([float("nan")])])) == int(digest([torch.tensor([float("nan")])]))


def test_large_tensors_are_read_in_chunks(monkeypatch):
    values = torch.randn(1000)
    monkeypatch.setattr(replicas, "CHUNK", 64)
    before = int(digest([values]))
    for bit in range(0, 32_000, 777):
        assert int(digest([flipped(values, bit)])) != before
    moved = values.clone()
    moved[:64], moved[64:128] = values[64:128], values[:64]
    assert int(digest([moved])) != before


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ([], []), ([4], []), ([4, 4, 4], []), ([4, 5, 4], [1]), ([5, 4, 4, 4, 6], [0, 4]),
        ([4, 5], [0, 1]), ([4, 4, 5, 5], [0, 1, 2, 3]), ([4, 4, 5, 6], [0, 1, 2, 3]), ([-1, -1, 2**63 - 1], [2]),
    ],
)  # fmt: skip
def test_the_majority_decides_where_there_is_one(digests, odd):
    assert minority_ranks(digests) == odd
