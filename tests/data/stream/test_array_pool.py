"""Memory is used again only when nobody can see it any more."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.data.store.token_store import length_chunks
from bessemer.data.stream.rows import ArrayPool, repeat_into

SHAPE = (64, 2048)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_comes_back_when_the_last_array_goes() -> None:
    arrays = ArrayPool()
    tokens, weights = arrays.take(SHAPE, np.int64, np.float32)
    assert (tokens.shape, tokens.dtype, weights.dtype) == (SHAPE, np.int64, np.float32)
    first = address(tokens)
    part = weights[3:5].view(np.int32).T
    del tokens, weights
    gc.collect()
    other, _ = arrays.take(SHAPE, np.int64, np.float32)
    assert address(other) != first  # the part is still there
    del part
    again, _ = arrays.take(SHAPE, np.int64, np.float32)
    assert address(again) == first


def test_arrays_of_one_slab_do_not_overlap() -> None:
    arrays = ArrayPool().take((333, 777), np.int64, np.int8, np.float32, np.int32)
    for value, array in enumerate(arrays):
        array[:] = value
    assert all((array == value).all() for value, array in enumerate(arrays))
    assert all(address(array) % 64 == 0 for array in arrays)


def test_a_tensor_keeps_its_memory() -> None:
    torch = pytest.importorskip("torch")
    arrays = ArrayPool()
    (array,) = arrays.take(SHAPE, np.int64)
    array[:] = 7
    tensor = torch.from_numpy(array)
    del array
    for _ in range(3):
        arrays.take(SHAPE, np.int64)[0][:] = 0
    assert bool((tensor == 7).all())


def test_small_arrays_and_other_sizes() -> None:
    arrays = ArrayPool()
    assert arrays.take((2, 3), np.int64)[0].base is None
    (large,) = arrays.take((512, 2048), np.int64)
    place = address(large)
    del large
    (small,) = arrays.take(SHAPE, np.int64)  # an eighth: not worth such a slab
    assert address(small) != place
    assert arrays.take((0, 5), np.int64)[0].shape == (0, 5)


def test_few_spare_slabs_are_kept() -> None:
    arrays = ArrayPool()
    held = [arrays.take(SHAPE, np.int64) for _ in range(10)]
    del held
    assert len(arrays._spare) == 4


def test_threads_never_share_memory() -> None:
    arrays = ArrayPool()

    def work(value: int) -> bool:
        good = True
        for _ in range(30):
            one, two = arrays.take((32, 1024), np.int64, np.int64)
            one[:], two[:] = value, -value
            good &= bool((one == value).all() and (two == -value).all())
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 50))
def test_spread_is_repeat_and_chunks_cover_everything(lengths: list[int], cells: int) -> None:
    sizes = np.array(lengths, np.int64)
    covered = list(length_chunks(sizes, cells))
    assert [k for first, stop, _, _ in covered for k in range(first, stop)] == list(range(len(lengths)))
    ends = np.cumsum([0, *lengths])
    assert all((begin, end) == (ends[first], ends[stop]) for first, stop, begin, end in covered)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bessemer.data.stream.rows._SPREAD_CELLS", cells)
        out = np.empty(sizes.sum(), np.int32)
        repeat_into(np.arange(sizes.size), sizes, out)
    assert out.tolist() == np.repeat(np.arange(sizes.size), sizes).tolist()
