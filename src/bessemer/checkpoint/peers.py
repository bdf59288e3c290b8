"""Who else saves and loads the same checkpoint."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

Word = TypeVar("Word")


class Peers(Protocol):
    """The processes of a run, as far as checkpoints are concerned; see `parallel/world.py`."""

    size: int
    saving: Any  # a process group for the thread that writes

    @property
    def main(self) -> bool: ...
    def agree(self, word: Word) -> Word: ...
    def gather(self, word: Word, saving: bool = False) -> list[Word]: ...


class Alone:
    """One process."""

    size, saving, main = 1, None, True

    def agree(self, word: Word) -> Word:
        return word

    def gather(self, word: Word, saving: bool = False) -> list[Word]:
        return [word]
