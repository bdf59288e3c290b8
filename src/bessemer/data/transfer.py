"""Whole files between this machine and an object store, in blocks that are tried again when the network fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bessemer.data.read.remote import file_system, told
from bessemer.data.read.secrets import shown
from bessemer.errors import UserError

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
        for attempt in range(1, self.attempts + 1):
            try:
                with told(url):
                    return request()
            except (FileNotFoundError, PermissionError) as error:  # asking again would not help
                raise UserError(f"{shown(url)}: {error}; publish it again, or correct the address") from error
            except OSError as error:
                if attempt == self.attempts:
                    raise UserError(
                        f"{shown(url)}: failed {attempt} times, at last with: {error}; "
                        "check the network and the storage service, then run again"
                    ) from error
            time.sleep(self.pause_s * 2 ** (attempt - 1))
        raise AssertionError("a transfer is attempted at least once")
