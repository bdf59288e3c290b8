"""Shards published to a real S3 server and read through the cache: under limits, failures and kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.data.store import remote as shard_cache
from bessemer.data.store.remote import ShardCache, Transfer, _name, open_remote, upload
from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import sequence_count
from bessemer.errors import UserError
from bessemer.spec.mixture import quantise

pytestmark = pytest.mark.timeout(60)


def write_shard(prefix: Path, number: int) -> str:
    """Eight documents with all that a store can hold."""
    random = np.random.default_rng(number)
    with StoreWriter(prefix, 300, "tokenizer") as writer:
        for row in range(8):
            tokens = random.integers(0, 300, random.integers(20, 90))
            mask = random.integers(0, 2, tokens.size)
            writer.add(tokens, f"/corpus/{number}.jsonl", row, row, 9, mask=mask, id=f"{number}-{row}", score=row)
    return str(prefix)


def assert_same(one: Any, other: Any) -> None:
    everything = np.array([0])
    assert (one.fingerprint, one.tokens, one.files) == (other.fingerprint, other.tokens, other.files)
    assert np.array_equal(one.slice(0, one.tokens), other.slice(0, other.tokens))
    assert np.array_equal(one.weights(everything, one.tokens), other.weights(everything, other.tokens))
    documents = np.arange(one.documents)
    assert np.array_equal(one.scores(documents), other.scores(documents))
    origins = [[store.origin_of_document(k) for k in range(store.documents)] for store in (one, other)]
    assert origins[0] == origins[1]


@pytest.fixture
def transfer(s3_server: str) -> Transfer:
    return Transfer({"endpoint_url": s3_server}, attempts=3, pause_s=0.01)


@pytest.fixture
def local(tmp_path: Path) -> TokenStore:
    return TokenStore([write_shard(tmp_path / f"local{k}", k) for k in range(5)])


class Network:
    """Stands before the server: records what is read, and fails at chosen requests for a .bin, counted from 1."""

    def __init__(self, real: Any) -> None:
        self.real, self.requests = real, list[str]()
        self.failing, self.short = set[int](), False

    def file_system(self, url: str, storage: Any) -> tuple[Any, str]:
        fs, path = self.real(url, storage)
        return Line(self, fs), path


class Line:
    def __init__(self, network: Network, fs: Any) -> None:
        self._network, self._fs = network, fs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        network = self._network
        network.requests.append(path)
        data: bytes = self._fs.cat_file(path, start=start, end=end)
        if path.endswith(".bin") and sum(p.endswith(".bin") for p in network.requests) in network.failing:
            if network.short:
                return data[:-1]
            raise ConnectionResetError("the line went dead")
        return data


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    import bessemer.data.store.remote as module

    made = Network(module.file_system)
    monkeypatch.setattr(module, "file_system", made.file_system)
    return made


def cached(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".locks")


def test_a_published_store_reads_as_the_local_one(tmp_path: Path, local: TokenStore, transfer: Transfer) -> None:
    upload(local, "s3://bucket/same/web", transfer)
    cache = ShardCache(tmp_path / "cache", transfer=transfer)
    remote = open_remote("s3://bucket/same/web", cache)
    assert cached(tmp_path / "cache") == []  # nothing is fetched before it is read
    assert_same(remote, local)
    assert len(cached(tmp_path / "cache")) == 5
    cache.close()


def test_a_mounted_folder_is_made(tmp_path: Path, local: TokenStore) -> None:
    url = (tmp_path / "not" / "there").as_uri()
    upload(local, url)
    assert_same(open_remote(url, ShardCache(tmp_path / "cache")), local)


def test_an_upload_goes_on_where_it_stopped(
    tmp_path: Path, local: TokenStore, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    real = Transfer.upload

    def count(self: Transfer, path: str, url: str) -> None:
        if len(sent) == 20:
            sent.append("")
            raise KeyboardInterrupt
        sent.append(url)
        real(self, path, url)

    monkeypatch.setattr(Transfer, "upload", count)
    with pytest.raises(KeyboardInterrupt):
        upload(local, "s3://bucket/stopped/web", transfer)
    with pytest.raises(UserError, match=r"web\.shards\.json: no such file"):
        open_remote("s3://bucket/stopped/web", ShardCache(tmp_path / "cache", transfer=transfer))
    done = len(sent)
    upload(local, "s3://bucket/stopped/web", transfer)
    assert not any(".00000." in url for url in sent[done:])
    assert_same(open_remote("s3://bucket/stopped/web", ShardCache(tmp_path / "cache", transfer=transfer)), local)
    single = TokenStore(local.prefixes[0])
    upload(single, "s3://bucket/single", transfer)
    assert_same(open_remote("s3://bucket/single", ShardCache(tmp_path / "cache", transfer=transfer)), single)


def test_the_cache_keeps_to_its_limit(tmp_path: Path, local: TokenStore, transfer: Transfer) -> None:
    upload(local, "s3://bucket/limit/web", transfer)
    limit = int(2.2 * max(about.size_bytes for about in local.infos))
    cache = ShardCache(tmp_path / "cache", limit, transfer)
    remote = open_remote("s3://bucket/limit/web", cache)
    for k in (0, 1, 2, 3, 4, 0, 2, 0, 1):
        start = int(local._token_starts[k])
        assert np.array_equal(remote.slice(start, start + 5), local.slice(start, start + 5))
        kept = cached(tmp_path / "cache")
        assert sum(int(name.rpartition("-")[2]) for name in kept) <= limit
        assert len(kept) <= 2
    everywhere = np.random.default_rng(0).integers(0, local.tokens - 50, 12)
    assert np.array_equal(remote.gather(everywhere, 50), local.gather(everywhere, 50))
    cache.close()


def test_the_shard_used_longest_ago_makes_room(tmp_path: Path, local: TokenStore, transfer: Transfer) -> None:
    upload(local, "s3://bucket/lru/web", transfer)
    cache = ShardCache(tmp_path / "cache", 10**9, transfer)
    remote = open_remote("s3://bucket/lru/web", cache)
    folders = [cache.folder / _name(url, about) for url, about in zip(remote.prefixes, remote.infos, strict=True)]
    for k in (0, 1, 2):
        remote.shard(k)
    cache.close()
    for age_s, k in ((30, 1), (20, 0), (10, 2)):
        os.utime(folders[k], (time.time() - age_s,) * 2)
    remote.shard(1)  # used again, so now 0 is the oldest
    cache.limit_bytes = sum(remote.infos[k].size_bytes for k in (1, 2, 3))
    remote.shard(3)
    assert [folder.exists() for folder in folders] == [False, True, True, True, False]
    cache.close()


def test_a_limit_below_one_shard_is_an_error_at_once(tmp_path: Path, local: TokenStore, transfer: Transfer) -> None:
    upload(local, "s3://bucket/small/web", transfer)
    with pytest.raises(UserError, match=r"the cache may hold 100 bytes, but the shard s3://bucket/small/web\.0000"):
        open_remote("s3://bucket/small/web", ShardCache(tmp_path / "cache", 100, transfer))


def test_shards_in_use_elsewhere_are_waited_for_and_then_named(
    tmp_path: Path, local: TokenStore, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(local, "s3://bucket/wait/web", transfer)
    limit = max(about.size_bytes for about in local.infos)
    other = ShardCache(tmp_path / "cache", limit, transfer)  # stands for another process: its locks are its own
    mine = ShardCache(tmp_path / "cache", limit, transfer)
    open_remote("s3://bucket/wait/web", other).shard(0)
    monkeypatch.setattr("bessemer.data.store.remote._WAIT_S", 0.3)
    with pytest.raises(UserError, match=r"are in use, and the shard .*raise the limit to at least"):
        open_remote("s3://bucket/wait/web", mine).shard(1)
    monkeypatch.setattr("bessemer.data.store.remote._WAIT_S", 30.0)
    timer = threading.Timer(0.3, other.close)
    timer.start()
    open_remote("s3://bucket/wait/web", mine).shard(1)  # goes on as soon as the other is done
    timer.join()
    assert len(cached(tmp_path / "cache")) == 1


def test_idle_shards_are_given_up(
    tmp_path: Path, local: TokenStore, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bessemer.data.store.remote._IDLE_S", 0.0)
    upload(local, "s3://bucket/idle/web", transfer)
    cache = ShardCache(tmp_path / "cache", transfer=transfer)
    remote = open_remote("s3://bucket/idle/web", cache)
    remote.shard(0)
    deadline_s = time.monotonic() + 20
    while cache._leases and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not cache._leases and not remote._opened
    assert np.array_equal(remote.slice(0, 5), local.slice(0, 5))


def test_many_threads_fetch_each_shard_once(
    tmp_path: Path, local: TokenStore, transfer: Transfer, network: Network
) -> None:
    upload(local, "s3://bucket/threads/web", transfer)
    network.requests.clear()
    remotes = [  # two caches over one folder are as two processes
        open_remote("s3://bucket/threads/web", ShardCache(tmp_path / "cache", transfer=transfer)) for _ in range(2)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda k: remotes[k % 2].shard(k % 5), range(40)))
    assert sorted(path for path in network.requests if path.endswith(".bin")) == [
        f"bucket/threads/web.{k:05d}.bin" for k in range(5)
    ]


def test_two_that_find_a_shard_missing_at_once_fetch_it_once(
    tmp_path: Path, local: TokenStore, transfer: Transfer, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(local, "s3://bucket/twice/web", transfer)
    network.requests.clear()
    remotes = [
        open_remote("s3://bucket/twice/web", ShardCache(tmp_path / "cache", transfer=transfer)) for _ in range(2)
    ]
    real, both = shard_cache._lock, threading.Barrier(2, timeout=20)
    seen: list[str] = []

    def lock(file: Any, shared: bool = False, wait: bool = True) -> bool:
        got = real(file, shared, wait)
        if shared and len(seen) < 2:
            seen.append(file.name)
            both.wait()  # both have looked before either fetches
        return got

    monkeypatch.setattr(shard_cache, "_lock", lock)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda remote: remote.shard(0).tokens, remotes))
    assert found == [local.shard(0).tokens] * 2
    assert sum(path.endswith(".bin") for path in network.requests) == 1


def test_reading_keeps_a_shard_in_use(tmp_path: Path, local: TokenStore, transfer: Transfer) -> None:
    upload(local, "s3://bucket/touch/web", transfer)
    cache = ShardCache(tmp_path / "cache", transfer=transfer)
    remotes = [open_remote("s3://bucket/touch/web", cache) for _ in range(2)]
    remotes[0].shard(0)
    (lease,) = cache._leases.values()
    for remote in (remotes[0], remotes[1]):  # one that has it open, and one that has not
        lease.used_s = 0.0
        remote.slice(0, 1)
        assert lease.used_s > 0
    cache.close()
    assert lease.released and not remotes[0]._opened and not remotes[1]._opened


def test_a_block_that_comes_short_is_asked_for_again(
    tmp_path: Path, local: TokenStore, transfer: Transfer, network: Network
) -> None:
    """Also where no hash was published that would tell."""
    upload(local, "s3://bucket/short/web", transfer)
    network.requests.clear()
    network.failing, network.short = {1, 2}, True
    size = local.infos[0].sizes["bin"]
    transfer.download({str(tmp_path / "got"): ("s3://bucket/short/web.00000.bin", size)})
    assert (tmp_path / "got").read_bytes() == Path(f"{local.prefixes[0]}.bin").read_bytes()
    assert len(network.requests) == 3


def test_a_network_that_fails_for_a_while_is_endured(
    tmp_path: Path, local: TokenStore, transfer: Transfer, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(local, "s3://bucket/flaky/web", transfer)
    monkeypatch.setattr("bessemer.data.store.remote._BLOCK_BYTES", 100)  # it fails in the middle of a file
    for network.short in (False, True):
        network.requests.clear()
        network.failing = {2, 3, 7}
        cache = ShardCache(tmp_path / f"cache{network.short}", transfer=transfer)
        remote = open_remote("s3://bucket/flaky/web", cache)
        assert np.array_equal(remote.slice(0, remote.tokens), local.slice(0, local.tokens))
        assert sum(path.endswith("00000.bin") for path in network.requests) > 5


def test_a_network_that_stays_away_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, local: TokenStore, transfer: Transfer, network: Network
) -> None:
    upload(local, "s3://bucket/dead/web", transfer)
    network.failing = set(range(1, 1 + 3))  # one connection: the first block and no other is tried
    transfer = Transfer(transfer.storage, transfer.attempts, transfer.pause_s, connections=1)
    cache = ShardCache(tmp_path / "cache", transfer=transfer)
    remote = open_remote("s3://bucket/dead/web", cache)
    with pytest.raises(UserError, match=r"web\.00000\.bin: failed 3 times, .*the line went dead.*check the network"):
        remote.slice(0, 5)
    assert cached(tmp_path / "cache") == []
    assert np.array_equal(remote.slice(0, 5), local.slice(0, 5))  # it is back: the same object goes on


def test_damaged_and_missing_files_are_named(tmp_path: Path, local: TokenStore, transfer: Transfer) -> None:
    upload(local, "s3://bucket/damaged/web", transfer)
    data = bytearray(transfer.read("s3://bucket/damaged/web.00001.bin"))
    data[7] ^= 1
    transfer.write(bytes(data), "s3://bucket/damaged/web.00001.bin")
    cache = ShardCache(tmp_path / "cache", transfer=transfer)
    remote = open_remote("s3://bucket/damaged/web", cache)
    remote.shard(0)
    with pytest.raises(UserError, match=r"web\.00001\.bin: is not what was published"):
        remote.shard(1)
    from bessemer.data.read.remote import file_system

    fs, path = file_system("s3://bucket/damaged/web.00002.starts", transfer.storage)
    fs.rm_file(path)
    with pytest.raises(UserError, match=r"web\.00002\.starts: no such file"):
        remote.shard(2)
    assert len(cached(tmp_path / "cache")) == 1
    transfer.write(b"{}", "s3://bucket/damaged/web.shards.json")
    with pytest.raises(UserError, match="does not list the shards of a store"):
        open_remote("s3://bucket/damaged/web", cache)


def test_another_content_under_the_same_name_is_another_shard(
    tmp_path: Path, local: TokenStore, transfer: Transfer
) -> None:
    cache = ShardCache(tmp_path / "cache", transfer=transfer)
    for k in (0, 1):
        one = TokenStore(local.prefixes[k : k + 1])
        upload(one, "s3://bucket/replaced/web", transfer)
        assert_same(open_remote("s3://bucket/replaced/web", cache), one)


KILLED = """
import sys, threading, os
from bessemer.data.store.remote import open_remote
from bessemer.data.store.remote import ShardCache, _name
from bessemer.data.store import remote as shard_cache
from bessemer.data.store.remote import Transfer
folder, server, limit = sys.argv[1:]
remote = open_remote(
    "s3://bucket/killed/web", ShardCache(folder, int(limit), Transfer({"endpoint_url": server}))
)
remote.shard(0)
shard_cache.commit_store = lambda *_: (print("fetched", flush=True), threading.Event().wait())
remote.shard(1)
"""


def test_a_killed_process_leaves_nothing_in_the_way(
    tmp_path: Path, local: TokenStore, transfer: Transfer, s3_server: str
) -> None:
    """It dies while it uses one shard and has half-fetched another."""
    upload(local, "s3://bucket/killed/web", transfer)
    limit = 2 * max(about.size_bytes for about in local.infos)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "cache"), s3_server, str(limit)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "fetched\n"
    before = cached(tmp_path / "cache")
    assert len(before) == 2 and ".partial-" in "".join(before)
    process.send_signal(signal.SIGKILL)
    process.wait()
    cache = ShardCache(tmp_path / "cache", limit, transfer)
    remote = open_remote("s3://bucket/killed/web", cache)
    began_s = time.monotonic()
    remote.shard(2)
    assert not any(".partial-" in name for name in cached(tmp_path / "cache"))
    for k in (3, 1):
        remote.shard(k)
    assert time.monotonic() - began_s < 30  # it never waited for the dead
    assert not any(".partial-" in name for name in cached(tmp_path / "cache"))


def test_coming_steps_are_fetched_ahead(tmp_path: Path, local: TokenStore, transfer: Transfer) -> None:
    upload(local, "s3://bucket/ahead/web", transfer)
    cache = ShardCache(tmp_path / "cache", transfer=transfer)
    remote = open_remote("s3://bucket/ahead/web", cache)
    order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": sequence_count(remote.tokens, 16)}, 1)
    stream = BatchStream({"a": remote}, order, 16, StepPositions([BatchPhase(0, 4)]))
    wanted = {int(k) for k in remote._shard_of(stream.batch(0).sequences * 16).tolist()}
    cache.close()
    shutil.rmtree(tmp_path / "cache")
    fresh = open_remote("s3://bucket/ahead/web", ShardCache(tmp_path / "cache", transfer=transfer))
    stream = BatchStream({"a": fresh}, order, 16, StepPositions([BatchPhase(0, 4)]))
    stream.prefetch(0)
    deadline_s = time.monotonic() + 20
    while len(cached(tmp_path / "cache")) < len(wanted) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    names = cached(tmp_path / "cache")
    assert len(names) >= len(wanted) and not fresh._opened


def test_fetching_ahead_takes_no_room_from_what_is_in_use(
    tmp_path: Path, local: TokenStore, transfer: Transfer
) -> None:
    upload(local, "s3://bucket/room/web", transfer)
    limit = max(about.size_bytes for about in local.infos)
    cache = ShardCache(tmp_path / "cache", limit, transfer)
    remote = open_remote("s3://bucket/room/web", cache)
    remote.shard(0)
    used = cached(tmp_path / "cache")
    remote.prefetch(remote._token_starts[1:5], np.ones(4, np.int64))
    deadline_s = time.monotonic() + 20
    while cache._queued and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert cached(tmp_path / "cache") == used and not cache._queued
    manifest = json.loads(transfer.read("s3://bucket/room/web.shards.json"))
    assert [about["documents"] for about in manifest["shards"]] == [8] * 5
