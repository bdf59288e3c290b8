"""Token stores on disk, streams over them and tiny models."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import sequence_count
from bessemer.spec.mixture import quantise
from bessemer.spec.shape import ModelShape

VOCAB = 29


@pytest.fixture
def shape() -> ModelShape:
    return ModelShape(vocab=VOCAB, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffn=24)


@pytest.fixture
def store_of(tmp_path: Path) -> Callable[..., TokenStore]:
    """A store of documents of the given lengths, random tokens ending in 0."""

    def make(name: str, lengths: Sequence[int], text_bytes: int = 3, seed: int = 0) -> TokenStore:
        rng = np.random.default_rng(seed)
        with StoreWriter(tmp_path / name, VOCAB, "tokenizer") as writer:
            for row, length in enumerate(lengths):
                tokens = np.append(rng.integers(1, VOCAB, length - 1), 0)
                writer.add(tokens, f"{name}.jsonl", row, row, text_bytes * length)
        return TokenStore(tmp_path / name)

    return make


@pytest.fixture
def stream_of() -> Callable[..., BatchStream]:
    def make(store: TokenStore, context: int, rows: int) -> BatchStream:
        lengths = {"a": sequence_count(store.tokens, context)}
        order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], lengths, seed=1)
        return BatchStream({"a": store}, order, context, StepPositions([BatchPhase(0, rows)]))

    return make
