"""A cache of whole shards on this machine's disk, for stores that lie in an object store.

A cached shard is a folder that gets its name when it is complete and checked. Who uses one holds a lock on it, which
the system frees when the process dies: a killed run leaves no state that another could trip over, only files that the
next one deletes.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

import xxhash

from bessemer.data.read.secrets import shown
from bessemer.data.store_format import About, commit, file_sum
from bessemer.data.transfer import Transfer
from bessemer.errors import UserError

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
        (self.folder / ".locks").mkdir(parents=True, exist_ok=True)
        self._leases: dict[str, Lease] = {}
        self._mutex = threading.Lock()
        self._wanted: SimpleQueue[tuple[str, About] | None] = SimpleQueue()
        self._asked: set[str] = set()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[type[ShardCache], tuple[Path, int | None, Transfer]]:
        return ShardCache, (self.folder, self.limit_bytes, self.transfer)

    def abouts(self, urls: Sequence[str]) -> list[About]:
        """What the `.json` of each shard says."""
        found = []
        for url, data in zip(urls, self.transfer.read_all([f"{url}.json" for url in urls]), strict=True):
            try:
                found.append(About.from_json(json.loads(data)))
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{shown(url)}.json: is not that of a store ({error}); publish it again") from error
        return found

    def check_limit(self, url: str, about: About) -> None:
        """Refuses a shard that could never be fetched."""
        if self.limit_bytes is not None and about.size_bytes > self.limit_bytes:
            raise UserError(
                f"{self.folder}: the cache may hold {self.limit_bytes:,} bytes, but the shard {shown(url)} alone has "
                f"{about.size_bytes:,}: raise the limit to several times that"
            )

    def fetch(self, url: str, about: About, close: Close, number: int) -> Lease:
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

    def expect(self, shards: Sequence[tuple[str, About]]) -> None:
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

    def _fetch_ahead(self, url: str, about: About) -> None:
        name = _name(url, about)
        # Who reads the shard will meet the same errors, and report them.
        with suppress(UserError, _NoRoom, OSError), self._open_lock(name) as file:
            self.check_limit(url, about)
            if _lock(file, wait=False) and not (self.folder / name).exists():
                self._fetch(url, about, self.folder / name, patient=False)
        self._asked.discard(name)

    def _fetch(self, url: str, about: About, folder: Path, patient: bool) -> None:
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

    def _make_room(self, url: str, about: About, name: str, patient: bool) -> Path:
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
            if entry.name == ".locks" or "-" not in name:
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
        """Lock files stay: deleting one that another process has just opened would let two hold it."""
        return open(self.folder / ".locks" / name, "wb")


class _NoRoom(Exception):
    pass


def _name(url: str, about: About) -> str:
    """The folder of a shard: another content under the same URL is another shard."""
    return f"{xxhash.xxh3_128_hexdigest(f'{url} {about.digest}'.encode())}-{about.size_bytes}"


def _lock(file: IO[bytes], shared: bool = False, wait: bool = True) -> bool:
    """Locks a file, or changes the kind of lock; False where it would have to wait and may not."""
    import fcntl

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(
            f"{file.name}: its file system has no locks ({error}); put the cache on a local disk"
        ) from error
    return True
