"""Whole files between this machine and an object store, in blocks that are tried again when the network fails.

A cache of whole shards on this machine's disk, for stores that lie in an object store.

A cached shard is a folder that gets its name when it is complete and checked. Who uses one holds a lock on it, which
the system frees when the process dies: a killed run leaves no state that another could trip over, only files that the
next one deletes.

Stores in an object store: published from here, opened from anywhere and read through a cache of whole shards.
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

from bessemer.data.read.remote import file_system, told
from bessemer.data.read.secrets import shown
from bessemer.data.store.format import LOCKS, StoreInfo, commit, file_sum
from bessemer.data.store.shards import ShardedStore
from bessemer.data.store.token_store import TokenStore
from bessemer.errors import UserError
from bessemer.storage import lock_file, retry

_BLOCK_BYTES = 16 << 20

Result = TypeVar("Result")


@dataclass(frozen=True)
class Transfer:
    """How to reach a store's files. `storage` are options of the fsspec file system; secrets go in the environment.

    A request that fails is made `attempts` times in all, after pauses of `pause_s`, twice that and so on. Holds at most
    `connections` blocks of 16 MB in memory.
    """

    storage: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 5
    pause_s: float = 0.5
    connections: int = 8

    def read(self, url: str) -> bytes:
        """A small file."""
        fs, path = file_system(url, self.storage)
        data: bytes = self._insist(url, lambda: fs.cat_file(path))
        return data

    def read_all(self, urls: list[str]) -> list[bytes]:
        """Many small files, several at a time."""
        with ThreadPoolExecutor(self.connections) as pool:
            return list(pool.map(self.read, urls))

    def download(self, files: Mapping[str, tuple[str, int]]) -> None:
        """Local path -> (URL, bytes). All blocks of all files share the connections; nothing is synced or checked
        beyond the sizes."""
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
        self._insist(url, lambda: fs.put_file(path, remote))

    def write(self, data: bytes, url: str) -> None:
        fs, path = file_system(url, self.storage)
        self._insist(url, lambda: fs.pipe_file(path, data))

    def _fetch(self, path: str, url: str, start: int, stop: int) -> None:
        fs, remote = file_system(url, self.storage)

        def get() -> bytes:
            data: bytes = fs.cat_file(remote, start=start, end=stop)
            if len(data) != stop - start:
                raise ConnectionError(f"{len(data):,} bytes came instead of {stop - start:,}")
            return data

        data = self._insist(url, get)
        descriptor = os.open(path, os.O_WRONLY)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, memoryview(data)[done:], start + done)
        finally:
            os.close(descriptor)

    def _insist(self, url: str, request: Callable[[], Result]) -> Result:
        def attempt() -> Result:
            with told(url):
                return request()

        permanent = (FileNotFoundError, PermissionError)
        try:
            return retry(
                attempt, attempts=self.attempts, pause_s=self.pause_s,
                should_retry=lambda error: isinstance(error, OSError) and not isinstance(error, permanent),
            )  # fmt: skip
        except permanent as error:
            raise UserError(f"{shown(url)}: {error}; publish it again, or correct the address") from error
        except OSError as error:
            raise UserError(
                f"{shown(url)}: failed {self.attempts} times, at last with: {error}; "
                "check the network and the storage service, then run again"
            ) from error


_IDLE_S = 10.0  # a shard that was not read for so long is not in use
_WAIT_S = 60.0  # for space that other processes use
_POLL_S = 0.2

Close = Callable[[int], None]


@dataclass
class Lease:
    """A shard that this process uses, by a shared lock on it."""

    prefix: str  # of its local files
    file: IO[bytes]
    used_s: float
    closers: set[tuple[Close, int]]
    released: bool = False  # the files may be gone

    def touch(self) -> None:
        """It is being read."""
        self.used_s = time.monotonic()


class ShardCache:
    """Shards fetched whole when they are first read, several processes and threads at once fetching each only once.

    With `limit_bytes`, the shards that were used longest ago make room, never one that was read in the last ten
    seconds. When those alone take all the room for a minute, that is an error which says so.
    """

    def __init__(self, folder: str | Path, limit_bytes: int | None = None, transfer: Transfer | None = None) -> None:
        self.folder, self.limit_bytes, self.transfer = Path(folder), limit_bytes, transfer or Transfer()
        (self.folder / LOCKS).mkdir(parents=True, exist_ok=True)
        self._leases: dict[str, Lease] = {}
        self._mutex = threading.Lock()
        self._wanted: SimpleQueue[tuple[str, StoreInfo] | None] = SimpleQueue()
        self._asked: set[str] = set()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[type[ShardCache], tuple[Path, int | None, Transfer]]:
        return ShardCache, (self.folder, self.limit_bytes, self.transfer)

    def abouts(self, urls: Sequence[str]) -> list[StoreInfo]:
        """What the `.json` of each shard says."""
        found = []
        for url, data in zip(urls, self.transfer.read_all([f"{url}.json" for url in urls]), strict=True):
            try:
                found.append(StoreInfo.from_json(json.loads(data)))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{shown(url)}.json: is not that of a store ({error}); publish it again") from error
        return found

    def check_limit(self, url: str, about: StoreInfo) -> None:
        """Refuses a shard that could never be fetched."""
        if self.limit_bytes is not None and about.size_bytes > self.limit_bytes:
            raise UserError(
                f"{self.folder}: the cache may hold {self.limit_bytes:,} bytes, but the shard {shown(url)} alone has "
                f"{about.size_bytes:,}: raise the limit to several times that"
            )

    def fetch(self, url: str, about: StoreInfo, close: Close, number: int) -> Lease:
        """A shard's local files, fetched if need be. They stay while they are touched; later, or to make room for
        others, `close(number)` is called: drop the maps of the files then, so that the space becomes free."""
        self.check_limit(url, about)
        name = _name(url, about)
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
                _lock(file)  # waits for whoever is fetching it
                if not folder.exists():
                    self._fetch(url, about, folder, patient=True)
            except BaseException:
                file.close()
                raise
            file.close()

    def expect(self, shards: Sequence[tuple[str, StoreInfo]]) -> None:
        """Fetches shards in the background, as far as they can have room without driving out what is in use."""
        for url, about in shards:
            name = _name(url, about)
            if name not in self._asked and not (self.folder / name).exists():
                self._asked.add(name)
                self._wanted.put((url, about))
        self._start()

    def close(self) -> None:
        """Gives up what this process uses; the files stay for the next."""
        if self._thread:
            self._wanted.put(None)
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
        self._start()

    def _release(self, name: str) -> None:
        with self._mutex:
            lease = self._leases.pop(name, None)
        if lease:
            lease.released = True
            for close, number in lease.closers:
                close(number)
            lease.file.close()

    def _start(self) -> None:
        """The thread that fetches ahead and gives up idle shards. A daemon: the end of the process need not wait."""
        with self._mutex:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="shards", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                wanted = self._wanted.get(timeout=1.0)
            except Empty:
                now_s = time.monotonic()
                for name, lease in list(self._leases.items()):
                    if now_s - lease.used_s > _IDLE_S:
                        self._release(name)
                continue
            if wanted is None:
                with self._mutex:
                    self._thread = None
                return
            self._fetch_ahead(*wanted)

    def _fetch_ahead(self, url: str, about: StoreInfo) -> None:
        name = _name(url, about)
        # Who reads the shard will meet the same errors, and report them.
        with suppress(UserError, _NoRoom, OSError), self._open_lock(name) as file:
            self.check_limit(url, about)
            if _lock(file, wait=False) and not (self.folder / name).exists():
                self._fetch(url, about, self.folder / name, patient=False)
        self._asked.discard(name)

    def _fetch(self, url: str, about: StoreInfo, folder: Path, patient: bool) -> None:
        """Downloads and checks a shard whose lock is held."""
        for leftover in self.folder.glob(f"{folder.name}.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = self._make_room(url, about, folder.name, patient)
        try:
            prefix = str(partial / "shard")
            wanted = list(about.sizes)
            for _ in range(2):  # a second time for what came damaged
                self.transfer.download({f"{prefix}.{s}": (f"{url}.{s}", about.sizes[s]) for s in wanted})
                wanted = [s for s in wanted if s in about.sums and file_sum(f"{prefix}.{s}") != about.sums[s]]
                if not wanted:
                    break
            if wanted:
                raise UserError(
                    f"{shown(url)}.{wanted[0]}: does not have the content that was published; publish the store again"
                )
            commit(prefix, about)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _make_room(self, url: str, about: StoreInfo, name: str, patient: bool) -> Path:
        """An empty folder that stands for the shard's space from now on."""
        partial = self.folder / f"{name}.partial-{uuid.uuid4().hex[:8]}"
        needed, give_up_s = about.size_bytes, time.monotonic() + _WAIT_S
        while True:
            with self._open_lock("room") as room:
                _lock(room)
                used = self._sweep(needed, give_own=patient)
                if self.limit_bytes is None or used + needed <= self.limit_bytes:
                    partial.mkdir()
                    return partial
            if not patient:
                raise _NoRoom
            if time.monotonic() > give_up_s:
                raise UserError(
                    f"{self.folder}: {used:,} of the {self.limit_bytes:,} bytes that the cache may hold are in use, "
                    f"and the shard {shown(url)} needs {needed:,}: raise the limit to at least {used + needed:,}"
                )
            time.sleep(_POLL_S)

    def _sweep(self, needed: int, give_own: bool) -> int:
        """Deletes what killed processes left and, beyond the limit, what was used longest ago; the bytes then used."""
        sizes: dict[str, int] = {}
        ages: list[tuple[float, str]] = []
        for entry in os.scandir(self.folder):
            name, dot, _ = entry.name.partition(".partial-")
            if entry.name == LOCKS or "-" not in name:
                continue
            if dot and self._deleted(name, entry.name):
                continue
            sizes[entry.name] = int(name.rpartition("-")[2])
            if not dot:
                ages.append((entry.stat().st_mtime, name))
        used = sum(sizes.values())
        for own in (False, True) if give_own else (False,):
            for _, name in sorted(ages):
                if self.limit_bytes is None or used + needed <= self.limit_bytes:
                    return used
                if own:
                    self._release(name)
                if name in sizes and self._deleted(name, name):
                    used -= sizes.pop(name)
        return used

    def _deleted(self, name: str, folder: str) -> bool:
        """Deletes a folder of the shard unless somebody holds the shard's lock."""
        with self._open_lock(name) as file:
            if not _lock(file, wait=False):
                return False
            doomed = self.folder / f"{name}.partial-{uuid.uuid4().hex[:8]}"  # a half-deleted shard must not look whole
            os.replace(self.folder / folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
            return True

    def _open_lock(self, name: str) -> IO[bytes]:
        return open(self.folder / LOCKS / name, "wb")


class _NoRoom(Exception):
    pass


def _name(url: str, about: StoreInfo) -> str:
    """The folder of a shard: another content under the same URL is another shard."""
    return f"{xxhash.xxh3_128_hexdigest(f'{url} {about.digest}'.encode())}-{about.size_bytes}"


def _lock(file: IO[bytes], shared: bool = False, wait: bool = True) -> bool:
    """Locks a file, or changes the kind of lock; False where it would have to wait and may not."""
    try:
        return lock_file(file, shared=shared, wait=wait)
    except OSError as error:
        raise UserError(
            f"{file.name}: its file system has no locks ({error}); put the cache on a local disk"
        ) from error


def upload(store: TokenStore | ShardedStore, url: str, transfer: Transfer | None = None) -> list[StoreInfo]:
    """Publishes a store under `url`: its shards as `url.00000` and so on, and then `url.shards.json`, which tells of
    them all with their hashes and is returned. An upload that was interrupted goes on where it stopped."""
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
    return abouts


def open_remote(url: str, cache: ShardCache) -> ShardedStore:
    """A published store. Costs one small request, however many shards it has; these are fetched when they are read."""
    try:
        listed = json.loads(cache.transfer.read(f"{url}.shards.json"))["shards"]
        abouts = [StoreInfo.from_json(about) for about in listed]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{shown(url)}.shards.json: is not the list of a published store ({error}); publish it again"
        ) from error
    return ShardedStore([_shard_url(url, number) for number in range(len(abouts))], cache, abouts)


def _shard_url(url: str, number: int) -> str:
    return f"{url}.{number:05d}"


def _publish(prefix: str, about: StoreInfo, url: str, transfer: Transfer) -> None:
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
