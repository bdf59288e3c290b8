"""A remote tier that fails: the local disk under a URL of its own, with requests that break now and then."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "flaky"
BREAKS = 0.3  # of the requests


class FlakyFiles(LocalFileSystem):
    """While `failing`, three of ten requests that move data raise, before or after they had an effect."""

    protocol = PROTOCOL
    failing: ClassVar[bool] = False
    broken: ClassVar[int] = 0
    _dice: ClassVar[random.Random] = random.Random(0)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        text = str(path)
        return super()._strip_protocol(text.removeprefix(f"{PROTOCOL}://"))

    def _maybe(self) -> None:
        if FlakyFiles.failing and self._dice.random() < BREAKS:
            FlakyFiles.broken += 1
            raise OSError("the storage did not answer")

    def put_file(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe()
        result = super().put_file(*args, **kwargs)
        self._maybe()
        return result

    def get_file(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe()
        return super().get_file(*args, **kwargs)

    def ls(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe()
        return super().ls(*args, **kwargs)


def register() -> None:
    fsspec.register_implementation(PROTOCOL, FlakyFiles, clobber=True)
