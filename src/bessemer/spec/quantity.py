"""Quantities as a person writes them: `20M` tokens, `256K` a batch, `2%` warm-up, `10 min`.

Each parser takes what YAML gave (a number or a string) and returns a plain int or float in one unit, or raises
ValueError with the accepted forms. K, M, B, T are powers of ten for counts of tokens and parameters; batch and context
sizes are usually powers of two, so `Ki`/`Mi` are powers of 1024; bytes follow the same rule (`64MB`, `64MiB`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_NUMBER = r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)"
_SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"s": 1, "sec": 1, "second": 1, "min": 60, "m": 60, "minute": 60, "h": 3600, "hour": 3600, "d": 86400, "day": 86400}
_COUNT = re.compile(rf"^{_NUMBER}\s*([kmbgt]i?)?\s*(tokens?|tok|params?|parameters|steps?|sequences?|rows?)?$", re.I)
_BYTES = re.compile(rf"^{_NUMBER}\s*([kmgt]i?)?b?(?:ytes?)?$", re.I)
_DURATION = re.compile(rf"^{_NUMBER}\s*([a-z]+?)s?$", re.I)
_SHARE = re.compile(rf"^{_NUMBER}\s*(%)?$")


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


def _whole(value: float, written: Any) -> int:
    if value != int(value):
        raise ValueError(f"{written!r} is not a whole number")
    return int(value)


def _reject_bool(value: Any, forms: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"expected {forms}, got {value!r}")


def parse_count(value: Any) -> int:
    """`20M`, `256K tokens`, `1e9`, `4096`, `64Ki` -> int."""
    forms = "a count such as 4096, 256K or 20M"
    _reject_bool(value, forms)
    if isinstance(value, (int, float)):
        if value < 0:
            raise ValueError(f"expected {forms}, got {value}: it must not be negative")
        return _whole(float(value), value)
    match = _COUNT.match(value.strip())
    if not match:
        raise ValueError(f"expected {forms}, got {value!r}")
    suffix = (match[2] or "").lower()
    return _whole(round(_number(match[1]) * (_BINARY.get(suffix) or _SCALE[suffix]), 6), value)


def parse_bytes(value: Any) -> int:
    """`64MB`, `1GiB`, `1048576` -> bytes."""
    forms = "a size such as 64MB or 1GiB"
    _reject_bool(value, forms)
    if isinstance(value, (int, float)):
        return _whole(float(value), value)
    match = _BYTES.match(value.strip())
    if not match:
        raise ValueError(f"expected {forms}, got {value!r}")
    suffix = (match[2] or "").lower()
    return int(_number(match[1]) * (_BINARY.get(suffix) or _SCALE[suffix]))


def parse_share(value: Any) -> float:
    """`2%` or `0.02` -> 0.02, between 0 and 1."""
    forms = "a share such as 2% or 0.02"
    _reject_bool(value, forms)
    match = _SHARE.match(str(value).strip())
    if not match:
        raise ValueError(f"expected {forms}, got {value!r}")
    share = _number(match[1]) / (100 if match[2] else 1)
    if not 0 <= share <= 1:
        raise ValueError(f"expected {forms}, got {value!r}: it must lie between 0 and 100%")
    return share


def parse_duration(value: Any) -> float:
    """`10 min`, `1.5h`, `90s` -> seconds. A bare number is refused: it has no unit."""
    forms = "a time with its unit, such as 90s, 10 min or 2h"
    if not isinstance(value, str):
        raise ValueError(f"expected {forms}, got {value!r}")
    match = _DURATION.match(value.strip())
    unit = match[2].lower() if match else ""
    if not match or unit not in _SECONDS:
        raise ValueError(f"expected {forms}, got {value!r}")
    return _number(match[1]) * _SECONDS[unit]


def parse_number(value: Any) -> float:
    """A plain number such as 3e-4."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"expected a number such as 3e-4, got {value!r}")
    return float(value)


def parse_span(value: Any) -> int | float | str:
    """A length of training: `2%` of the run -> float share, `2000 steps` -> int steps, `500M tokens` -> '500000000 tokens'."""
    forms = "a length such as 2%, 2000 steps or 500M tokens"
    _reject_bool(value, forms)
    text = str(value).strip()
    if text.endswith("%"):
        return parse_share(text)
    if re.search(r"tok(en)?s?$", text, re.I):
        return f"{parse_count(text)} tokens"
    if isinstance(value, float) and 0 <= value < 1:
        return value
    try:
        return parse_count(value)
    except ValueError:
        raise ValueError(f"expected {forms}, got {value!r}") from None


def parse_interval(value: Any) -> int | str:
    """How often: `500 steps` -> 500, `10 min` -> '600.0 s'."""
    forms = "an interval such as 500 steps or 10 min"
    _reject_bool(value, forms)
    try:
        return f"{parse_duration(value)} s"
    except ValueError:
        pass
    try:
        steps = parse_count(value)
    except ValueError:
        raise ValueError(f"expected {forms}, got {value!r}") from None
    if steps < 1:
        raise ValueError(f"expected {forms}, got {value!r}: it must be at least one step")
    return steps


def span_steps(span: int | float | str, total_steps: int, tokens_per_step: int) -> int:
    """A parsed span in steps of a run of `total_steps`."""
    if isinstance(span, str):
        return -(-int(span.split()[0]) // tokens_per_step)
    return round(span * total_steps) if isinstance(span, float) else span


def human_count(value: float) -> str:
    """1300000 -> '1.3M'; exact integers below 10,000 are kept."""
    for size, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if abs(value) >= size * 0.9995 and not (suffix == "K" and value < 10_000 and value == int(value)):
            return f"{value / size:.3g}{suffix}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.3g}"


def human_bytes(value: float) -> str:
    """A size for people, decimal units: 31500000 -> '31.5 MB'."""
    for size, suffix in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(value) >= size:
            return f"{value / size:.3g} {suffix}"
    return f"{value:.0f} B"


def human_time(seconds: float) -> str:
    """112 -> '1m 52s'."""
    seconds = int(round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d {seconds % 86400 // 3600:02d}h"


def _quantity(parse: Callable[[Any], Any], example: str) -> list[Any]:
    return [BeforeValidator(parse), WithJsonSchema({"type": ["number", "string"], "examples": [example]})]


def _or_auto(parse: Callable[[Any], Any], example: str) -> list[Any]:
    """Like `_quantity`, with `auto` let through to the planner; one validator, so one message for a bad value."""
    return _quantity(lambda value: value if value == "auto" else parse(value), example)


Count = Annotated[int, *_quantity(parse_count, "20M")]
Bytes = Annotated[int, *_quantity(parse_bytes, "64MB")]
Share = Annotated[float, *_quantity(parse_share, "2%")]
Seconds = Annotated[
    float,
    *_quantity(parse_duration, "10 min"),
    PlainSerializer(lambda value: None if value is None else f"{value} s", when_used="json"),
]
Auto = Literal["auto"]
AutoCount = Annotated[int | Auto, *_or_auto(parse_count, "20M")]
AutoSpan = Annotated[int | float | str, *_or_auto(parse_span, "2%")]
AutoInterval = Annotated[int | str, *_or_auto(parse_interval, "500 steps")]
AutoNumber = Annotated[float | Auto, *_or_auto(parse_number, "3e-4")]
