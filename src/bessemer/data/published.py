"""Published data: a folder of prepared data in an object store, from which runs train without the raw files.

`publish` uploads the shards, tokenizer, report and packings, and last `prepared.json`, which commits them. `mirror`
copies all but the shards to a local folder; `open_prepared` then fetches each shard when it is first read.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from bessemer.data.curate.ledger import read_json, write_json
from bessemer.data.prepare import PREPARED, REMOTE, Prepared, digests_of, load_tokenizer, score_label, special_tokens_of
from bessemer.data.read.secrets import redact
from bessemer.data.store.format import file_digest
from bessemer.data.store.remote import Transfer, upload
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.spec.data import DataSpec, StoreSpec, TokenizerSpec


def publish(
    prepared: Prepared,
    data: DataSpec,
    tokenizer: TokenizerSpec,
    store: StoreSpec,
    formats: Mapping[str, Sequence[str]],
    progress: Callable[[str], None] = lambda line: None,
) -> int:
    """Uploads prepared data to `store.url`; returns its size in bytes. Continues an interrupted upload."""
    transfer, url, folder = Transfer(store.storage), store.url.rstrip("/"), prepared.folder
    manifest = read_json(folder / PREPARED, "prepare the data again")
    manifest |= digests_of(folder, manifest)
    size_bytes = 0
    for side, stores in (("train", prepared.train), ("validation", prepared.validation)):
        for name, source in stores.items():
            progress(f"uploading {name}, {side}: {source.tokens:,} tokens")
            infos = upload(source, f"{url}/{name}.{side}", transfer)
            manifest["stores"][side][name] = [info.digest for info in infos]
            size_bytes += sum(info.size_bytes for info in infos)
    packings = [path.name for pattern in ("*.best-fit-*", "ranking-*") for path in sorted(folder.glob(pattern))]
    names = [*manifest["digests"], *packings]
    for name in names:
        transfer.upload(str(folder / name), f"{url}/{name}")
    manifest["digests"] = {name: file_digest(str(folder / name)) for name in names}
    manifest["sizes"] = {name: os.path.getsize(folder / name) for name in names}
    manifest["settings"] = _settings(data, tokenizer) | {"formats": formats}
    transfer.write(json.dumps(manifest).encode(), f"{url}/{PREPARED}")
    return size_bytes + sum(manifest["sizes"].values())


def _settings(data: DataSpec, tokenizer: TokenizerSpec) -> dict[str, Any]:
    """The settings that decided the content of the store."""
    loaded = load_tokenizer(data, tokenizer)
    return {
        "tokenizer": tokenizer.model_dump(mode="json") | {"fingerprint": loaded.fingerprint if loaded else None},
        "validation": data.validation,
        "clean": [step.model_dump(mode="json") for step in data.clean],
        "source_clean": {name: [step.model_dump(mode="json") for step in s.clean] for name, s in data.sources.items()},
        "label": score_label(data),
    }


def read_manifest(store: StoreSpec) -> bytes:
    """The `prepared.json` at the store's URL; its digest tells one version of the published data from another."""
    try:
        return Transfer(store.storage).read(f"{store.url.rstrip('/')}/{PREPARED}")
    except UserError as error:
        raise UserError(f"data.store: {error}") from error


def mirror(store: StoreSpec, cache: Path) -> Path:
    """The local folder of published data: everything but the shards, downloaded once and verified."""
    url, content = store.url.rstrip("/"), read_manifest(store)
    place = f"data.store: {redact(url)}/{PREPARED}"
    try:
        manifest = json.loads(content)
        files = {name: (manifest["sizes"][name], digest) for name, digest in manifest["digests"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{place}: is not that of published data ({error}); publish it again") from error
    if wrong := [name for name in files if os.path.basename(name) != name]:
        raise UserError(f"{place}: names the file {wrong[0]!r} outside its folder; publish it again")
    cache = cache.absolute()
    folder = cache / f"published-{xxhash.xxh3_128_hexdigest(url.encode() + b' ' + content)}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex[:8]}")
        partial.mkdir(parents=True)
        try:
            transfer = Transfer(store.storage)
            transfer.download({str(partial / name): (f"{url}/{name}", size) for name, (size, _) in files.items()})
            for name, (_, digest) in files.items():
                if file_digest(str(partial / name)) != digest:
                    raise UserError(
                        f"{redact(url)}/{name}: does not have the content that was published; publish it again"
                    )
            (partial / PREPARED).write_bytes(content)
            _give_name(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    write_json(folder / REMOTE, {"url": url, "storage": store.storage, "cache_bytes": store.cache})
    return folder


def _give_name(partial: Path, folder: Path) -> None:
    try:
        os.replace(partial, folder)
    except OSError:
        if not folder.exists():  # else another process was faster, with the same content
            raise


def check_fit(data: DataSpec, tokenizer: TokenizerSpec, prepared: Prepared) -> None:
    """Refuses a spec that the published data does not fit. A setting that has its default takes the store's value."""
    url, settings = redact(prepared.url), prepared.settings

    def refuse(key: str, value: object, published: object) -> UserError:
        return UserError(
            f"{key}: {value} does not fit the published store {url}, which has {published}: "
            "write that, remove the key, or publish a store with this spec"
        )

    for name, source in data.sources.items():
        if name not in prepared.train:
            raise UserError(f"data.sources.{name}: the published store {url} has {', '.join(prepared.train)} only")
        steps = [step.model_dump(mode="json") for step in source.clean]
        if steps and steps != settings["source_clean"].get(name):
            raise refuse(f"data.sources.{name}.clean", steps, settings["source_clean"].get(name))
    steps = [step.model_dump(mode="json") for step in data.clean]
    if steps and steps != settings["clean"]:
        raise refuse("data.clean", steps, settings["clean"])
    default = type(data).model_fields["validation"].default
    if data.validation not in (default, settings["validation"]):
        raise refuse("data.validation", data.validation, settings["validation"])
    if (label := score_label(data)) not in (None, settings["label"]):
        raise refuse("data.curriculum.label", label, settings["label"])
    loaded = load_tokenizer(data, tokenizer)
    if loaded and loaded.fingerprint not in (settings["tokenizer"]["fingerprint"], prepared.tokenizer.fingerprint):
        size = prepared.tokenizer.vocab_size
        raise refuse("tokenizer.path", tokenizer.path, f"another tokenizer of {size:,} tokens")
    for key in ("kind", "vocab", "eos", "chat", "learn"):
        accepted = [type(tokenizer).model_fields[key].default, settings["tokenizer"][key]]
        if key == "vocab":
            accepted.append(prepared.tokenizer.vocab_size)
        if (value := getattr(tokenizer, key)) not in accepted:
            raise refuse(f"tokenizer.{key}", value, accepted[-1])
    if missing := [token for token in special_tokens_of(data, tokenizer) if token not in prepared.tokenizer.special]:
        raise refuse("tokenizer.special", missing[0], prepared.tokenizer.special)
