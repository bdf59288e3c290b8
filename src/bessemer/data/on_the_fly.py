"""Data that is not prepared: only an index of where the documents lie, and a tokenizer. The rows are `lazy`'s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from bessemer.data.cache import locked
from bessemer.data.curate.engine import Engine, LocalEngine, Meter, Say, each
from bessemer.data.curate.ledger import byte_length, space_for
from bessemer.data.curate.report import decoding_note
from bessemer.data.lazy_index import Index, Side, build_index
from bessemer.data.prepare import list_sources, load_tokenizer
from bessemer.data.tokenizer.tokenizer import DEFAULT_EOS, Tokenizer
from bessemer.storage import atomic_path

if TYPE_CHECKING:
    from bessemer.spec.data import DataSpec, TokenizerSpec


@dataclass(frozen=True)
class Indexed:
    """The tokenizer, and the index of each source's training and held-out documents."""

    tokenizer: Tokenizer
    train: dict[str, Index]
    validation: dict[str, Index]
    folder: Path
    notes: tuple[str, ...] = ()  # warnings: files that are skipped or not UTF-8


def index_sources(
    data: DataSpec,
    tokenizer: TokenizerSpec,
    cache: Path,
    vocab: int,
    seed: int,
    progress: Say | None = None,
    engine: Engine | None = None,
) -> Indexed:
    """Reads every source once, unless the cache has its index; trains a tokenizer if none is given."""
    cache = Path(cache).absolute()
    cache.mkdir(parents=True, exist_ok=True)
    meter, run = Meter(progress), partial(each, engine or LocalEngine())
    limit = int(data.validation * 2**64)
    notes: list[str] = []
    with space_for(cache), locked(cache, "index", meter.say):
        found: dict[bool, dict[str, Index]] = {False: {}, True: {}}
        for name, entries in list_sources(data, notes.append).items():
            for held_out in (False, True) if limit else (False,):
                meter.say(f"indexing {name}" + (", held-out documents" if held_out else ""))
                index = build_index(
                    name, entries, data.sources[name], cache, Side(seed, limit, held_out), data.bad_rows,
                    cache / "copies", run,
                )  # fmt: skip
                if index.documents:
                    found[held_out][name] = index
        train, validation = found[False], found[True]
        folder = cache / f"tokenizer-{_fingerprint(train, tokenizer, vocab)}"
        for name in data.sources:
            both = [side[name] for side in (train, validation) if name in side]
            if count := sum(index.undecodable_documents for index in both):
                notes.append(decoding_note(name, count, [line for index in both for line in index.undecodable]))
        made = _tokenizer(folder, data, train, tokenizer, vocab, meter)
        return Indexed(made, train, validation, folder, tuple(notes))


def _fingerprint(train: dict[str, Index], tokenizer: TokenizerSpec, vocab: int) -> str:
    what = [tokenizer.model_dump_json(), str(vocab), *(index.fingerprint for index in train.values())]
    return str(xxhash.xxh3_128_hexdigest("\0".join(what).encode()))


def _tokenizer(
    folder: Path, data: DataSpec, train: dict[str, Index], spec: TokenizerSpec, vocab: int, meter: Meter
) -> Tokenizer:
    loaded = load_tokenizer(data, spec)
    if loaded is not None:
        return loaded
    path, eos = folder / "tokenizer.json", spec.eos or DEFAULT_EOS
    if not path.exists():
        meter.say(f"training a tokenizer of {vocab:,} tokens on at most {spec.sample / 1e6:.0f} MB of text")
        made = Tokenizer.train(_sample(train, spec.sample), vocab, eos, kind=spec.kind, special=spec.special)
        folder.mkdir(exist_ok=True)
        with atomic_path(path) as temporary:
            made.save(temporary)
    return Tokenizer.load(path, eos, spec.special)


def _sample(train: dict[str, Index], most_bytes: int) -> Iterator[str]:
    """Whole stretches, spread evenly over each source in proportion to its size; nothing that is held out."""
    total = sum(index.bytes for index in train.values())
    for index in train.values():
        wanted = min(index.bytes, most_bytes * index.bytes / total)
        count = index.stretches["text"].size
        mean = max(1.0, index.bytes / max(1, count))
        chosen = np.unique(np.linspace(0, count - 1, max(1, min(count, int(wanted / mean)))).astype(int))
        taken, starts = 0, [*index.stretches["document"].tolist(), index.documents]
        for stretch in chosen.tolist():
            own = set(index.ordinal[starts[stretch] : starts[stretch + 1]].tolist())
            for ordinal, document in enumerate(index.read(stretch)):
                if taken >= wanted:
                    break
                if ordinal in own:
                    yield document.text
                    taken += byte_length(document.text)
