"""Batches come in order, whatever the threads do; errors arrive where they belong; nothing hangs at the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.stream.batches import Batch, BatchStream, Prefetch
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import sequence_count
from bessemer.errors import UserError
from bessemer.spec.mixture import quantise

pytestmark = pytest.mark.timeout(30)
T = 16


@pytest.fixture
def stream(tmp_path: Path) -> BatchStream:
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "s", 500, "") as writer:
        for row in range(60):
            writer.add(rng.integers(0, 500, rng.integers(1, 40)), "/f", row, row, 1)
    store = TokenStore(tmp_path / "s")
    order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": sequence_count(store.tokens, T)}, 1)
    return BatchStream({"a": store}, order, T, StepPositions([BatchPhase(0, 5)]))


class Fake:
    """A stream that records what it is asked for; its batches are lists of the step."""

    def __init__(self, delay_s: dict[int, float] | None = None) -> None:
        self.asked: list[int] = []
        self.expected: list[int] = []
        self.delay_s = delay_s or {}

    def micro_batches(self, step: int, *cut: int) -> list[int]:
        self.asked.append(step)
        time.sleep(self.delay_s.get(step, 0))
        return [step]

    def prefetch(self, step: int, *rank: int) -> None:
        self.expected.append(step)


def prefetch_of(stream: object, **settings: int) -> Prefetch:
    return Prefetch(stream, 2, **settings)  # type: ignore[arg-type]


def same(one: Batch, other: Batch) -> bool:
    return all(np.array_equal(array, getattr(other, name)) for name, array in vars(one).items())


def batch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_same_batches_in_any_sequence_of_steps(stream: BatchStream, threads: int) -> None:
    with Prefetch(stream, 2, 1, 2, threads=threads) as prefetch:
        for step in [0, 1, 2, 3, 1, 2, 50, 51, 53, 53, 0]:
            batches = prefetch.get(step)
            expected = stream.micro_batches(step, 2, 1, 2)
            assert len(batches) == len(expected)
            assert all(same(one, other) for one, other in zip(batches, expected, strict=True))
            assert prefetch.wait_s >= 0
        assert 1 <= len(batch_threads()) <= threads
    assert batch_threads() == []
    with pytest.raises(RuntimeError):
        prefetch.get(0)


def test_it_works_ahead_but_no_further_than_its_depth() -> None:
    fake = Fake()
    with prefetch_of(fake, depth=2) as prefetch:
        prefetch.get(5)
        while len(fake.asked) < 3:
            time.sleep(0.001)
        time.sleep(0.02)
    assert fake.asked == [5, 6, 7]


def test_steps_that_finish_out_of_turn_are_given_in_turn() -> None:
    fake = Fake(delay_s={0: 0.1, 1: 0.05})
    with prefetch_of(fake, depth=4, threads=4) as prefetch:
        assert [prefetch.get(step) for step in range(8)] == [[step] for step in range(8)]
    assert sorted(fake.asked)[:8] == list(range(8))


def test_several_threads_assemble_at_once() -> None:
    barrier = threading.Barrier(3, timeout=20)

    class Meeting(Fake):
        def micro_batches(self, step: int, *cut: int) -> list[int]:
            if step < 3:
                barrier.wait()  # passes only when three steps are being assembled
            return [step]

    with prefetch_of(Meeting(), depth=2, threads=3) as prefetch:
        assert prefetch.get(0) == [0]


def test_an_error_is_raised_for_its_step_and_can_be_asked_again() -> None:
    class Flaky(Fake):
        failures = 1

        def micro_batches(self, step: int, *cut: int) -> list[int]:
            if step == 2 and self.failures:
                self.failures -= 1
                raise OSError("disk gone at step 2")
            return [step]

    with prefetch_of(Flaky(), threads=2) as prefetch:
        assert prefetch.get(1) == [1]
        with pytest.raises(OSError, match="disk gone"):
            prefetch.get(2)
        assert prefetch.get(2) == [2]
    assert batch_threads() == []


@pytest.mark.parametrize("threads", [1, 2])
def test_leaving_early_does_not_hang(threads: int) -> None:
    """Also with steps waiting in the queue, one being assembled, and an error in the body."""
    fake = Fake(delay_s=dict.fromkeys(range(1, 50), 0.05))

    def stop() -> None:
        with prefetch_of(fake, depth=20, threads=threads) as prefetch:
            prefetch.get(0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert batch_threads() == []
    assert len(fake.asked) < 10  # what had not begun never did


def test_the_stream_is_told_of_the_coming_steps_once_each() -> None:
    fake = Fake()
    with prefetch_of(fake, depth=1) as prefetch:
        for step in range(4):
            prefetch.get(step)
    assert fake.expected[:8] == list(range(1, 9))
    assert len(fake.expected) == len(set(fake.expected)) >= 11


def test_pinning_without_cuda_is_refused() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine can pin")
    with pytest.raises(UserError, match="pin=False"):
        Prefetch(Fake(), 2, pin=True)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_pinned_batches_are_the_same_and_lie_in_pinned_memory(stream: BatchStream) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    with Prefetch(stream, 2, pin=True, threads=2) as prefetch:
        for step in range(6):
            for batch, expected in zip(prefetch.get(step), stream.micro_batches(step, 2), strict=True):
                assert same(batch, expected)
                for name in ("tokens", "targets", "weights", "documents"):
                    tensor = torch.from_numpy(getattr(batch, name))
                    assert tensor.is_pinned() and tensor.pin_memory().data_ptr() == tensor.data_ptr()
                    copied = tensor.to("cuda", non_blocking=True)
                    torch.cuda.synchronize()
                    assert np.array_equal(copied.cpu().numpy(), getattr(expected, name))
