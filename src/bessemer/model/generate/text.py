"""Text of a growing answer: pieces that no later token can change, and stop strings that span tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """Decodes token by token. Only the last few tokens are decoded again, so the cost does not grow with the text.

    `text` holds what is final: not the bytes of an unfinished character, and not what may become a stop string.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str] = ()) -> None:
        self.decode, self.stop_strings = decode, tuple(stop_strings)
        self.tokens: list[int] = []
        self.text = ""
        self._before = self._read = 0  # tokens[before:read] give the context in which later tokens are decoded
        self._pending = ""  # decoded, but perhaps the start of a stop string

    def push(self, token: int) -> str | None:
        """Add a token. Returns the stop string that it completed."""
        self.tokens.append(token)
        known = self.decode(self.tokens[self._before : self._read])
        text = self.decode(self.tokens[self._before :])
        if len(text) <= len(known) or text.endswith(_INCOMPLETE):
            return None  # an unfinished character
        self._before, self._read = self._read, len(self.tokens)
        return self._release(text[len(known) :])

    def _release(self, piece: str) -> str | None:
        pending = self._pending + piece
        hits = [(at, stop) for stop in self.stop_strings if (at := pending.find(stop)) >= 0]
        if hits:
            at, stop = min(hits)
            self.text += pending[:at]
            self._pending = ""
            return stop
        held = max(
            (n for stop in self.stop_strings for n in range(1, len(stop)) if pending.endswith(stop[:n])), default=0
        )
        self.text += pending[: len(pending) - held]
        self._pending = pending[len(pending) - held :]
        return None

    def finish(self) -> str:
        """The complete text, when no more tokens follow."""
        known, rest = self.decode(self.tokens[self._before : self._read]), self.decode(self.tokens[self._before :])
        self.text += self._pending + rest[len(known) :]
        self._pending, self._before, self._read = "", len(self.tokens), len(self.tokens)
        return self.text
