"""Token stores in an object store: uploaded from here, read from anywhere through a cache of whole shards on disk.

A cached shard is a folder that gets its name when it is complete and verified. A process holds a lock on each shard
that it uses; the system frees the lock when the process dies. A killed run leaves only files that the next one deletes.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, TypeVar

import xxhash

from bessemer.data.read.remote import file_system, translate_errors
from bessemer.data.read.secrets import redact
from bessemer.data.store.format import LOCKS, StoreInfo, commit_store, file_digest
from bessemer.data.store.token_store import TokenStore
from bessemer.errors import UserError
from bessemer.storage import lock_file, retry

_BLOCK_BYTES = 16 << 20

Result = TypeVar("Result")


@dataclass(frozen=True)
class Transfer:
    """Requests to an object store. `storage` are options of the fsspec file system; secrets go in the environment.

    A failing request is made `attempts` times, after pauses of `pause_s`, twice that and so on. Up to `connections`
    blocks of 16 MB are in memory.
    """

    storage: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 5
    pause_s: float = 0.5
    connections: int = 8

    def read(self, url: str) -> bytes:
        """A small file."""
        fs, path = file_system(url, self.storage)
        data: bytes = self._retry(url, lambda: fs.cat_file(path))
        return data

    def download(self, files: Mapping[str, tuple[str, int]]) -> None:
        """Downloads {local path: (URL, size in bytes)} in blocks that share the connections. Only sizes are checked."""
        blocks = []
        for path, (url, size_bytes) in files.items():
            with open(path, "wb") as file:
                file.truncate(size_bytes)
            blocks += [(path, url, at, min(at + _BLOCK_BYTES, size_bytes)) for at in range(0, size_bytes, _BLOCK_BYTES)]
        with ThreadPoolExecutor(self.connections) as pool:
            futures = [pool.submit(self._fetch, *block) for block in blocks]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def upload(self, path: str, url: str) -> None:
        fs, remote = file_system(url, self.storage)
        self._retry(url, lambda: fs.put_file(path, remote))

    def write(self, data: bytes, url: str) -> None:
        fs, path = file_system(url, self.storage)
        self._retry(url, lambda: fs.pipe_file(path, data))

    def _fetch(self, path: str, url: str, start: int, stop: int) -> None:
        fs, remote = file_system(url, self.storage)

        def get() -> bytes:
            data: bytes = fs.cat_file(remote, start=start, end=stop)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data):,} bytes came instead of {stop - start:,}")
            return data

        data = self._retry(url, get)
        descriptor = os.open(path, os.O_WRONLY)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, memoryview(data)[done:], start + done)
        finally:
            os.close(descriptor)

    def _retry(self, url: str, request: Callable[[], Result]) -> Result:
        def attempt() -> Result:
            with translate_errors(url):
                return request()

        permanent = (FileNotFoundError, PermissionError)
        try:
            return retry(
                attempt, attempts=self.attempts, pause_s=self.pause_s,
                should_retry=lambda error: isinstance(error, OSError) and not isinstance(error, permanent),
            )  # fmt: skip
        except permanent as error:
            raise UserError(f"{redact(url)}: {error}; publish it again, or correct the address") from error
        except OSError as error:
            raise UserError(
                f"{redact(url)}: failed {self.attempts} times, at last with: {error}; "
                "check the network and the storage service, then run again"
            ) from error


_IDLE_S = 10.0  # a shard not read for this long is not in use
_WAIT_S = 60.0  # how long to wait for space that other processes use
_POLL_S = 0.2

Close = Callable[[int], None]


@dataclass
class Lease:
    """A cached shard that this process uses: it holds a shared lock on it."""

    prefix: str  # of the local files
    lock: IO[bytes]
    used_s: float
    closers: set[tuple[Close, int]]
    released: bool = False  # the files may be gone

    def touch(self) -> None:
        """Marks the shard as being read."""
        self.used_s = time.monotonic()


class ShardCache:
    """Fetches whole shards when they are first read. Processes and threads that share the folder fetch each only once.

    With `limit_bytes`, the least recently used shards are evicted, but none that was read in the last ten seconds. If
    shards in use fill the cache for a minute, that is an error.
    """

    def __init__(self, folder: str | Path, limit_bytes: int | None = None, transfer: Transfer | None = None) -> None:
        self.folder, self.limit_bytes, self.transfer = Path(folder), limit_bytes, transfer or Transfer()
        (self.folder / LOCKS).mkdir(parents=True, exist_ok=True)
        self._leases: dict[str, Lease] = {}
        self._mutex = threading.Lock()
        self._queue: SimpleQueue[tuple[str, StoreInfo] | None] = SimpleQueue()
        self._queued: set[str] = set()
        self._thread: threading.Thread | None = None

    def check_limit(self, url: str, info: StoreInfo) -> None:
        """Refuses a shard larger than the cache."""
        if self.limit_bytes is not None and info.size_bytes > self.limit_bytes:
            raise UserError(
                f"{self.folder}: the cache may hold {self.limit_bytes:,} bytes, but the shard {redact(url)} alone has "
                f"{info.size_bytes:,}: raise the limit (data.store.cache) to several times that"
            )

    def fetch(self, url: str, info: StoreInfo, close: Close, number: int) -> Lease:
        """A shard's local files, fetched if necessary. They stay while the lease is touched. Before they are evicted,
        `close(number)` is called: it must drop the maps of the files, so that the space becomes free."""
        self.check_limit(url, info)
        name = _name(url, info)
        folder = self.folder / name
        while True:
            with self._mutex:
                lease = self._leases.get(name)
                if lease:
                    lease.touch()
                    lease.closers.add((close, number))
                    return lease
            file = self._open_lock(name)
            try:
                _lock(file, shared=True)
                if folder.exists():
                    self._take_lease(name, file)
                    continue
                _lock(file)  # waits for the process that is fetching it
                if not folder.exists():
                    self._fetch(url, info, folder, wait=True)
            except BaseException:
                file.close()
                raise
            file.close()

    def prefetch(self, shards: Sequence[tuple[str, StoreInfo]]) -> None:
        """Fetches shards in the background, unless there is no space without evicting shards in use."""
        for url, info in shards:
            name = _name(url, info)
            if name not in self._queued and not (self.folder / name).exists():
                self._queued.add(name)
                self._queue.put((url, info))
        self._start_thread()

    def close(self) -> None:
        """Releases the shards that this process uses; the files stay."""
        if self._thread:
            self._queue.put(None)
        for name in list(self._leases):
            self._release(name)

    def _take_lease(self, name: str, file: IO[bytes]) -> None:
        with self._mutex:
            if name in self._leases:  # another thread was faster
                file.close()
                return
            prefix = str(self.folder / name / "shard")
            self._leases[name] = Lease(prefix, file, time.monotonic(), set())
        os.utime(self.folder / name)
        self._start_thread()

    def _release(self, name: str) -> None:
        with self._mutex:
            lease = self._leases.pop(name, None)
        if lease:
            lease.released = True
            for close, number in lease.closers:
                close(number)
            lease.lock.close()

    def _start_thread(self) -> None:
        """Starts the thread that prefetches and releases idle shards. A daemon: the process need not wait for it."""
        with self._mutex:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="shards", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                queued = self._queue.get(timeout=1.0)
            except Empty:
                now_s = time.monotonic()
                for name, lease in list(self._leases.items()):
                    if now_s - lease.used_s > _IDLE_S:
                        self._release(name)
                continue
            if queued is None:
                with self._mutex:
                    self._thread = None
                return
            self._fetch_ahead(*queued)

    def _fetch_ahead(self, url: str, info: StoreInfo) -> None:
        name = _name(url, info)
        # A reader of the shard will meet the same errors, and report them.
        with suppress(UserError, _CacheFull, OSError), self._open_lock(name) as file:
            if _lock(file, wait=False) and not (self.folder / name).exists():
                self._fetch(url, info, self.folder / name, wait=False)
        self._queued.discard(name)

    def _fetch(self, url: str, info: StoreInfo, folder: Path, wait: bool) -> None:
        """Downloads and verifies a shard whose lock is held."""
        for leftover in self.folder.glob(f"{folder.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = self._reserve_space(url, info, folder.name, wait)
        try:
            prefix = str(partial / "shard")
            missing = list(info.sizes)
            for _ in range(2):  # a second time for files that arrived damaged
                self.transfer.download({f"{prefix}.{s}": (f"{url}.{s}", info.sizes[s]) for s in missing})
                missing = [s for s in missing if s in info.sums and file_digest(f"{prefix}.{s}") != info.sums[s]]
                if not missing:
                    break
            if missing:
                raise UserError(f"{redact(url)}.{missing[0]}: is not what was published; publish the store again")
            commit_store(prefix, info)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _reserve_space(self, url: str, info: StoreInfo, name: str, wait: bool) -> Path:
        """An empty folder whose name reserves the shard's space."""
        partial = self.folder / f"{name}.partial-{uuid.uuid4().hex[:8]}"
        needed, deadline_s = info.size_bytes, time.monotonic() + _WAIT_S
        while True:
            with self._open_lock("room") as room:
                _lock(room)
                used = self._evict(needed, own=wait)
                if self.limit_bytes is None or used + needed <= self.limit_bytes:
                    partial.mkdir()
                    return partial
            if not wait:
                raise _CacheFull
            if time.monotonic() > deadline_s:
                raise UserError(
                    f"{self.folder}: {used:,} of the {self.limit_bytes:,} bytes that the cache may hold are in use, "
                    f"and the shard {redact(url)} needs {needed:,}: raise the limit to at least {used + needed:,}"
                )
            time.sleep(_POLL_S)

    def _evict(self, needed: int, own: bool) -> int:
        """Deletes what killed processes left and, beyond the limit, the least recently used shards: first those that no
        process uses, then with `own` those that this one does. Returns the bytes in use."""
        sizes: dict[str, int] = {}
        ages: list[tuple[float, str]] = []
        for entry in os.scandir(self.folder):
            name, dot, _ = entry.name.partition(".partial-")
            if entry.name == LOCKS or "-" not in name:
                continue
            if dot and self._delete_unlocked(name, entry.name):
                continue
            sizes[entry.name] = int(name.rpartition("-")[2])
            if not dot:
                ages.append((entry.stat().st_mtime, name))
        used = sum(sizes.values())
        for release in (False, True) if own else (False,):
            for _, name in sorted(ages):
                if self.limit_bytes is None or used + needed <= self.limit_bytes:
                    return used
                if release:
                    self._release(name)
                if name in sizes and self._delete_unlocked(name, name):
                    used -= sizes.pop(name)
        return used

    def _delete_unlocked(self, name: str, folder: str) -> bool:
        """Deletes a folder of the shard unless a process holds the shard's lock."""
        with self._open_lock(name) as file:
            if not _lock(file, wait=False):
                return False
            doomed = (
                self.folder / f"{name}.partial-{uuid.uuid4().hex[:8]}"
            )  # a half-deleted shard must not look complete
            os.replace(self.folder / folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            return True

    def _open_lock(self, name: str) -> IO[bytes]:
        return open(self.folder / LOCKS / name, "wb")


class _CacheFull(Exception):
    pass


def _name(url: str, info: StoreInfo) -> str:
    """The folder of a shard. Different content under the same URL is a different shard."""
    return f"{xxhash.xxh3_128_hexdigest(f'{url} {info.digest}'.encode())}-{info.size_bytes}"


def _lock(file: IO[bytes], shared: bool = False, wait: bool = True) -> bool:
    """Locks a file, or changes the kind of lock; False where it would have to wait and may not."""
    try:
        return lock_file(file, shared=shared, wait=wait)
    except OSError as error:
        raise UserError(
            f"{file.name}: its file system has no locks ({error}); put the cache on a local disk"
        ) from error


def upload(store: TokenStore, url: str, transfer: Transfer | None = None) -> list[StoreInfo]:
    """Uploads a store to `url`: its shards as `url.00000` and so on, then `url.shards.json` with their hashes, whose
    content is returned. Continues an interrupted upload."""
    transfer = transfer or Transfer()
    infos = []
    for number in range(len(store.prefixes)):
        shard = store.shard(number)
        shard.verify()
        sums = {suffix: file_digest(f"{shard.prefix}.{suffix}") for suffix in shard.info.sizes}
        infos.append(replace(shard.info, sums=sums))
        _upload_shard(shard.prefix, infos[-1], _shard_url(url, number), transfer)
    manifest = {"shards": [info.to_json() for info in infos]}
    transfer.write(json.dumps(manifest).encode(), f"{url}.shards.json")
    return infos


def open_remote(url: str, cache: ShardCache) -> TokenStore:
    """Opens an uploaded store with one small request; shards are fetched when they are read."""
    try:
        listed = json.loads(cache.transfer.read(f"{url}.shards.json"))["shards"]
        infos = [StoreInfo.from_json(info) for info in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{redact(url)}.shards.json: does not list the shards of a store ({error}); publish it again"
        ) from error
    return TokenStore([_shard_url(url, number) for number in range(len(infos))], cache, infos)


def _shard_url(url: str, number: int) -> str:
    return f"{url}.{number:05d}"


def _upload_shard(prefix: str, info: StoreInfo, url: str, transfer: Transfer) -> None:
    data = json.dumps(info.to_json()).encode()
    try:
        if transfer.read(f"{url}.json") == data:
            return
    except UserError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
    for suffix in info.sizes:
        transfer.upload(f"{prefix}.{suffix}", f"{url}.{suffix}")
    transfer.write(data, f"{url}.json")
