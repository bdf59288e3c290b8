"""Stores in an object store: published from here, opened from anywhere and read through a cache of whole shards."""

from __future__ import annotations

import json
from dataclasses import replace

from bessemer.data.read.secrets import shown
from bessemer.data.shard_cache import ShardCache
from bessemer.data.shards import ShardedStore
from bessemer.data.store import TokenStore
from bessemer.data.store_format import About, file_sum
from bessemer.data.transfer import Transfer
from bessemer.errors import UserError


def upload(store: TokenStore | ShardedStore, url: str, transfer: Transfer | None = None) -> None:
    """Publishes a store under `url`: its shards as `url.00000` and so on, and then `url.shards.json`, which tells of
    them all with their hashes. An upload that was interrupted goes on where it stopped."""
    transfer = transfer or Transfer()
    count = len(store.prefixes) if isinstance(store, ShardedStore) else 1
    abouts = []
    for number in range(count):
        shard = store.shard(number) if isinstance(store, ShardedStore) else store
        shard.verify()
        sums = {suffix: file_sum(f"{shard.prefix}.{suffix}") for suffix in shard.about.sizes}
        abouts.append(replace(shard.about, sums=sums))
        _publish(shard.prefix, abouts[-1], _shard_url(url, number), transfer)
    manifest = {"shards": [about.to_json() for about in abouts]}
    transfer.write(json.dumps(manifest).encode(), f"{url}.shards.json")


def open_remote(url: str, cache: ShardCache) -> ShardedStore:
    """A published store. Costs one small request, however many shards it has; these are fetched when they are read."""
    try:
        listed = json.loads(cache.transfer.read(f"{url}.shards.json"))["shards"]
        abouts = [About.from_json(about) for about in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{shown(url)}.shards.json: is not the list of a published store ({error}); publish it again"
        ) from error
    return ShardedStore([_shard_url(url, number) for number in range(len(abouts))], cache, abouts)


def _shard_url(url: str, number: int) -> str:
    return f"{url}.{number:05d}"


def _publish(prefix: str, about: About, url: str, transfer: Transfer) -> None:
    data = json.dumps(about.to_json()).encode()
    try:
        if transfer.read(f"{url}.json") == data:
            return
    except UserError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
    for suffix in about.sizes:
        transfer.upload(f"{prefix}.{suffix}", f"{url}.{suffix}")
    transfer.write(data, f"{url}.json")
