"""Progress of long work on data: how much, how fast, how long yet; at most one line a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

Say = Callable[[str], None]


class Meter:
    """Lines such as `tokenizing web 41 % 12.3 MB/s eta 90 s`."""

    def __init__(self, say: Say | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.say: Say = say or (lambda line: None)
        self._clock = clock
        self.start("", 0)

    def start(self, what: str, total_bytes: int) -> None:
        self._what, self._total_bytes, self._done_bytes = what, total_bytes, 0
        self._start_s = self._last_s = self._clock()

    def counting(self, texts: Iterable[str], what: str, total_bytes: int, then: str) -> Iterator[str]:
        """The texts as they are read; `then` is said after the last."""
        self.start(what, total_bytes)
        for text in texts:
            yield text
            self.advance(len(text))
        self.say(then)

    def advance(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        now_s = self._clock()
        if now_s - self._last_s < 1:
            return
        self._last_s = now_s
        rate = self._done_bytes / (now_s - self._start_s)
        share = min(1.0, self._done_bytes / max(self._total_bytes, 1))
        rest_bytes = max(0, self._total_bytes - self._done_bytes)
        left = f" eta {rest_bytes / rate:.0f} s" if rate else ""  # files may be empty
        self.say(f"{self._what} {100 * share:.0f} % {rate / 1e6:.1f} MB/s{left}")
