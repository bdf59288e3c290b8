"""`bessemer data verify`: compares every byte of prepared data with the digests that were written with it.

A run verifies only what it reads; this verifies everything, before a long run or after a disk fault. Stores of earlier
versions have no digests: their tokens, boundaries and masks are compared with the store's fingerprint, and
`add_digests` writes digests for the next time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bessemer.data.curate.ledger import read_json, write_json
from bessemer.data.prepare import PREPARED, REMOTE, TOKENIZER, digests_of, open_prepared
from bessemer.data.read.secrets import redact
from bessemer.data.store.digests import SUFFIX as CHUNKS
from bessemer.data.store.digests import content_digest, encode_digests, hash_file
from bessemer.data.store.format import StoreContent, commit_store, file_digest, repair_hint
from bessemer.data.store.shard import Shard
from bessemer.data.stream.curriculum import digest_path, find_ranking_damage
from bessemer.data.stream.packing import PackIndex, read_pack_info
from bessemer.errors import UserError
from bessemer.storage import write_atomic

_DOCUMENTS = 1 << 12  # documents hashed at a time

Advance = Callable[[int], None]


@dataclass(frozen=True)
class VerifyReport:
    """One store, index or file. `damage` is empty if it is sound; `note` says what could not be compared."""

    path: str
    bytes: int
    damage: tuple[str, ...] = ()
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def data_bytes(place: Path) -> int:
    """Approximately the bytes that `verify` will read."""
    local_bytes = sum(path.stat().st_size for path in _files(place))
    if not (place / REMOTE).exists():
        return local_bytes
    prepared = open_prepared(place)
    stores = [*prepared.train.values(), *prepared.validation.values()]
    return local_bytes + sum(info.size_bytes for store in stores for info in store.infos)


def verify(place: Path, advance: Advance, add_digests: bool = False) -> Iterator[VerifyReport]:
    """Verifies a folder of prepared data, a folder of such folders or of stores, or one store given by its prefix."""
    folders = [path.parent for path in sorted([*place.glob(PREPARED), *place.glob(f"*/{PREPARED}")])]
    for folder in folders:
        yield from _verify_prepared(folder, advance, add_digests)
    if folders:
        return
    if (place / TOKENIZER).exists():
        yield VerifyReport(str(place / PREPARED), 0, (f"{place / PREPARED}: missing; {repair_hint(place)}",))
    prefixes = _prefixes(place)
    if not prefixes:
        raise UserError(
            f"{place}: no prepared data and no token store; name a spec, a run, a folder or a store's prefix"
        )
    for prefix in prefixes:
        yield _verify_store(prefix, advance, add_digests)


def _files(place: Path) -> list[Path]:
    if place.is_dir():
        return [path for path in place.rglob("*") if path.is_file()]
    return list(place.parent.glob(f"{place.name}.*"))


def _prefixes(place: Path) -> list[str]:
    if place.is_dir():
        return [str(path.with_suffix("")) for path in sorted(place.rglob("*.idx"))]
    for prefix in (place, place.with_suffix("")):
        if os.path.exists(f"{prefix}.idx") or os.path.exists(f"{prefix}.bin"):
            return [str(prefix)]
    return []


def _verify_prepared(folder: Path, advance: Advance, add_digests: bool) -> Iterator[VerifyReport]:
    path, hint = folder / PREPARED, repair_hint(folder)
    try:
        manifest = read_json(path, hint)
        shards = {f"{name}.{side}": count for side in ("train", "validation") for name, count in manifest[side].items()}
    except (UserError, KeyError, AttributeError) as error:
        yield VerifyReport(str(path), path.stat().st_size, (str(error),))
        return
    clean = True
    for name, expected in manifest.get("digests", {}).items():
        digest = file_digest(str(folder / name)) if (folder / name).exists() else "missing"
        damage = () if digest == expected else (f"{folder / name}: is not what was written; {hint}",)
        clean = clean and not damage
        yield VerifyReport(str(folder / name), _size(folder / name), damage)
    if (folder / REMOTE).exists():
        stores = _verify_remote(folder, advance)
    else:
        prefixes = [f"{folder}/{name}.{number:05d}" for name, count in shards.items() for number in range(count)]
        stores = (_verify_store(prefix, advance, add_digests) for prefix in prefixes)
    for store in stores:
        clean = clean and not store.damage
        yield store
    if clean and add_digests and "stores" not in manifest:
        write_json(path, manifest | digests_of(folder, manifest))
    damage = ()
    if clean:
        try:
            open_prepared(folder)
        except UserError as error:
            damage = (str(error),)
    note = "" if "stores" in manifest or add_digests else "no digests of its files"
    yield VerifyReport(str(path), path.stat().st_size, damage, note)
    for index in sorted(folder.glob("*.best-fit-*.json")):
        yield _verify_packing(index.with_suffix(""), advance)
    for ranking in sorted(folder.glob("ranking-*.bin")):
        wrong = find_ranking_damage(ranking)
        advance(_size(ranking))
        note = "" if digest_path(ranking).exists() else "no digest"
        yield VerifyReport(
            str(ranking), _size(ranking), (f"{wrong}; it is computed hint when needed",) if wrong else (), note
        )


def _verify_remote(folder: Path, advance: Advance) -> Iterator[VerifyReport]:
    """Fetches every shard of published data, which compares it with its hashes, and verifies it like a local one."""
    prepared = open_prepared(folder)
    for store in [*prepared.train.values(), *prepared.validation.values()]:
        for number, url in enumerate(store.prefixes):
            try:
                prefix = store.shard(number).prefix
            except UserError as error:
                yield VerifyReport(redact(url), 0, (str(error),))
                continue
            yield replace(_verify_store(prefix, advance, False), path=redact(url))


def _verify_store(prefix: str, advance: Advance, add_digests: bool) -> VerifyReport:
    damage, note = [], ""
    try:
        store = Shard(prefix)
    except UserError as error:
        return VerifyReport(prefix, sum(_size(path) for path in _files(Path(prefix))), (str(error),))
    if store.verifiable:
        for suffix in sorted(store.info.sizes.keys() - {CHUNKS}):
            try:
                for size_bytes in store.verify_files([suffix]):
                    advance(size_bytes)
            except UserError as error:
                damage.append(str(error))
    elif _fingerprint(store, advance) != store.info.fingerprint:
        damage.append(
            f"{prefix}.bin: the tokens, boundaries or mask are not those that were written; "
            + repair_hint(os.path.dirname(prefix) or ".")
        )
    elif add_digests:
        _add_digests(store)
        note = "digests added"
    else:
        note = "no digests: tokens, boundaries and mask match the store's fingerprint, other files are not compared"
    return VerifyReport(prefix, store.info.size_bytes, tuple(damage), note)


def _fingerprint(store: Shard, advance: Advance) -> str:
    """Computed from the tokens, boundaries and mask on disk."""
    content = StoreContent()
    for first in range(0, store.documents, _DOCUMENTS):
        edges = store.edges(first, min(first + _DOCUMENTS, store.documents)).tolist()
        for start, stop in pairwise(edges):
            if not 0 <= start < stop <= store.tokens:
                return ""
            weights = store.run_weights(start, stop - start)
            mask = None if isinstance(weights, int) or weights.all() else weights.data
            content.add(store.slice(start, stop).data, mask)
        advance((edges[-1] - edges[0]) * store.dtype.itemsize)
    return content.hexdigest()


def _add_digests(store: Shard) -> None:
    data = encode_digests({suffix: hash_file(f"{store.prefix}.{suffix}") for suffix in store.info.sizes})
    path = f"{store.prefix}.{CHUNKS}"
    write_atomic(path, data)
    sizes = store.info.sizes | {CHUNKS: len(data)}
    commit_store(store.prefix, replace(store.info, sizes=sizes, sums={CHUNKS: content_digest(data)}))


def _verify_packing(prefix: Path, advance: Advance) -> VerifyReport:
    size_bytes = sum(_size(path) for path in _files(prefix))
    info = read_pack_info(str(prefix))
    if info is None:
        return VerifyReport(
            str(prefix), size_bytes, (f"{prefix}.json: the index is damaged; it is computed again when needed",)
        )
    try:
        for compared in PackIndex(str(prefix), info).verify():
            advance(compared)
    except UserError as error:
        return VerifyReport(str(prefix), size_bytes, (str(error),))
    return VerifyReport(str(prefix), size_bytes, (), "" if info.chunks else "no digests")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
