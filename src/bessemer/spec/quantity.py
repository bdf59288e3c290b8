"""Quantities in human notation (`20M` tokens, `2%` warm-up, `10 min`), and the base class of all spec sections.

Each parser takes a YAML value (a number or a string) and returns an int or float in one unit, or raises ValueError with
the accepted forms. K, M, B, T are powers of ten; Ki, Mi, Gi are powers of 1024; bytes follow the same rule (`64MB`,
`64MiB`). Arithmetic is exact: 2.3M is 2,300,000.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

LARGEST = 10**18  # more than any run trains on, and within 64 bits
LARGEST_COUNT = 10**12  # upper limit of settings that have only a lower one
LONGEST_S = 10**10  # three centuries
MAX_CONTEXT, MAX_BATCH, MAX_VOCAB = 10**8, 10**12, 10**7  # tokens; at least ten times of any published run
MAX_LEARNING_RATE = 100.0  # SGD on normalized weights has been trained at 10
# A comma only separates thousands: `1,5` is refused, because it could mean 1.5 or 15.
_NUMBER = r"((?=[.0-9])(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*)?(?:\.[0-9]+)?(?:e[+-]?[0-9]{1,3})?)"
_SCALE = {
    "": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12,
    "ki": 2**10, "mi": 2**20, "bi": 2**30, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
_UNITS = {  # unit -> accepted spellings, an example
    "tokens": (("token", "tokens", "tok", "toks"), "4096, 256K or 20M"),
    "steps": (("step", "steps"), "1000 or 10K"),
    "sequences": (("sequence", "sequences", "row", "rows"), "8"),
    "threads": (("thread", "threads"), "8"),
    "processes": (("process", "processes"), "2"),
}
_UNIT_OF = {word: unit for unit, (words, _) in _UNITS.items() for word in words}
_SECONDS = {
    "s": 1, "sec": 1, "secs": 1, "second": 1, "seconds": 1, "m": 60, "min": 60, "mins": 60, "minute": 60, "minutes": 60,
    "h": 3600, "hr": 3600, "hrs": 3600, "hour": 3600, "hours": 3600, "d": 86400, "day": 86400, "days": 86400,
}  # fmt: skip
_COUNT = re.compile(rf"{_NUMBER}\s*([kmbgt]i?)?\s*({'|'.join(_UNIT_OF)})?", re.I)
_BYTES = re.compile(rf"{_NUMBER}\s*([kmgt]i?)?(b|bytes?)?", re.I)
_SHARE = re.compile(rf"{_NUMBER}\s*(%)?", re.I)
_TIME_PART = re.compile(rf"{_NUMBER}\s*([a-z]+)[\s,]*", re.I)
_LONGEST_TEXT = 64


def format_value(value: Any) -> str:
    """A value for a message: in YAML notation, on one line, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    if isinstance(value, int) and abs(value) >= 10**_LONGEST_TEXT:
        return f"a number of over {_LONGEST_TEXT} digits"  # Python refuses to print thousands of digits
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, (dict, list)):
        text = json.dumps(value, default=str)
    else:
        text = str(value)
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."


def format_names(names: Iterable[str], most: int = 8) -> str:
    """Names for a message: the first ones, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def _invalid(forms: str, value: Any, reason: str = "") -> ValueError:
    return ValueError(f"expected {forms}, got {format_value(value)}" + (f": {reason}" if reason else ""))


def _match(pattern: re.Pattern[str], value: Any) -> re.Match[str] | None:
    """Match a YAML value with a pattern; a number is matched as its text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, int) and abs(value) > LARGEST:
        return None  # Python cannot print an int of thousands of digits
    text = str(value).strip()
    return pattern.fullmatch(text) if len(text) <= _LONGEST_TEXT else None


def _number(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace("_", ""))


def parse_count(value: Any, unit: str = "tokens", least: int = 0, most: int = LARGEST) -> int:
    """`20M`, `256K tokens`, `1e9`, `4096`, `64Ki` -> int. Refuses another unit."""
    forms = f"a number of {unit} such as {_UNITS[unit][1]}"
    match = _match(_COUNT, value)
    if not match:
        raise _invalid(forms, value)
    given_unit = _UNIT_OF[match[3].lower()] if match[3] else unit
    if given_unit != unit:
        raise _invalid(forms, value, f"the unit is {given_unit}, not {unit}")
    number = _number(match[1]) * _SCALE[(match[2] or "").lower()]
    if number.denominator != 1:
        raise _invalid(forms, value, "it is not a whole number")
    if number < least:
        raise _invalid(forms, value, f"it must be at least {least}")
    if number > most:
        raise _invalid(forms, value, f"it must be at most {most:,}")
    return int(number)


def parse_bytes(value: Any) -> int:
    """`64MB`, `1GiB`, `1048576` -> bytes."""
    forms = "a size such as 64MB or 1GiB"
    match = _match(_BYTES, value)
    if not match:
        raise _invalid(forms, value)
    size = int(_number(match[1]) * _SCALE[(match[2] or "").lower()])
    if not 1 <= size <= LARGEST:
        raise _invalid(forms, value, "it is too large" if size else "it must be at least one byte")
    return size


def parse_share(value: Any) -> float:
    """`2%` or `0.02` -> 0.02, between 0 and 1."""
    forms = "a share such as 2% or 0.02"
    match = _match(_SHARE, value)
    if not match:
        raise _invalid(forms, value)
    share = _number(match[1]) / (100 if match[2] else 1)
    if share > 1:
        hint = f"; for {float(share):g} percent write {float(share):g}%" if not match[2] and share <= 100 else ""
        raise _invalid(forms, value, f"it must be between 0 and 100%{hint}")
    return float(share)


def parse_duration(value: Any) -> float:
    """`10 min`, `1.5h`, `1h 30m`, `90s` -> seconds. Refuses a number without a unit."""
    forms = "a time with its unit, such as 90s, 10 min or 2h"
    text = value.strip() if isinstance(value, str) and len(value) <= _LONGEST_TEXT else ""
    total, at = Fraction(), 0
    while at < len(text):
        match = _TIME_PART.match(text, at)
        # A capital M means a million everywhere else, so it does not mean minutes here.
        if not match or match[2] == "M" or match[2].lower() not in _SECONDS:
            raise _invalid(forms, value)
        total += _number(match[1]) * _SECONDS[match[2].lower()]
        at = match.end()
    if not text:
        raise _invalid(forms, value)
    if total > LONGEST_S:
        raise _invalid(forms, value, "it is too long")
    return float(total)


def parse_number(value: Any, most: float = LARGEST) -> float:
    """A plain number above 0, such as 3e-4."""
    forms = "a number such as 3e-4"
    if isinstance(value, str) and _match(_SHARE, value) and not value.strip().endswith("%"):
        raise _invalid(forms, value, "remove the quotes")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _invalid(forms, value)
    if not 0 < value <= most:  # also refuses NaN
        raise _invalid(forms, value, f"it must be above 0 and at most {most:g}")
    return float(value)


def parse_span(value: Any) -> int | float | str:
    """A length of training: `2%` -> float share, `2000 steps` -> int, `500M tokens` -> '500000000 tokens'."""
    forms = "a length such as 2%, 2000 steps or 500M tokens"
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    if isinstance(value, str) and value.strip().endswith("%"):
        return parse_share(value)
    in_tokens = isinstance(value, str) and re.search(r"tok(en)?s?$", value.strip(), re.I)
    try:  # a number without a unit counts steps
        return f"{parse_count(value)} tokens" if in_tokens else parse_count(value, "steps")
    except ValueError:
        raise _invalid(forms, value) from None


def parse_interval(value: Any) -> int | str:
    """How often: `500 steps` -> 500, `10 min` -> '600.0 s'."""
    forms = "an interval such as 500 steps or 10 min"
    try:
        seconds = parse_duration(value)
    except ValueError:
        pass
    else:
        if seconds > 0:
            return f"{seconds} s"
        raise _invalid(forms, value, "it must be longer than 0")
    try:
        steps = parse_count(value, "steps")
    except ValueError:
        raise _invalid(forms, value) from None
    if steps < 1:
        raise _invalid(forms, value, "it must be at least one step")
    return steps


def span_steps(span: int | float | str, total_steps: int, tokens_per_step: int) -> int:
    """A parsed span in steps of a run of `total_steps`."""
    if isinstance(span, str):
        return -(-int(span.split()[0]) // tokens_per_step)
    return round(span * total_steps) if isinstance(span, float) else span


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str | None:
    """Three digits in the largest unit that the rounded value reaches: 999,999 is 1M, not 1e+03K."""
    for size, suffix in units:
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:,.0f}{suffix}" if abs(scaled) >= 999.5 else f"{scaled:.3g}{suffix}"
    return None


def human_count(value: float) -> str:
    """1300000 -> '1.3M'; exact integers below 10,000 are kept."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 10_000:
        return f"{value:,.0f}"
    return _scaled(value, ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))) or f"{value:.3g}"


def human_bytes(value: float) -> str:
    """31500000 -> '31.5 MB', in decimal units."""
    return _scaled(value, ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB"))) or f"{value:.0f} B"


def human_time(seconds: float) -> str:
    """112 -> '1m 52s'."""
    if not math.isfinite(seconds):
        return "?"
    total_s = max(0, round(seconds))
    if total_s < 60:
        return f"{total_s}s"
    if total_s < 3600:
        return f"{total_s // 60}m {total_s % 60:02d}s"
    if total_s < 86400:
        return f"{total_s // 3600}h {total_s % 3600 // 60:02d}m"
    return f"{total_s // 86400}d {total_s % 86400 // 3600:02d}h"


def _quantity(parse: Callable[[Any], Any], example: str) -> list[Any]:
    return [BeforeValidator(parse), WithJsonSchema({"type": ["number", "string"], "examples": [example]})]


def _or_auto(parse: Callable[[Any], Any], example: str) -> list[Any]:
    """Like `_quantity`, but `auto` is left to the planner. One validator, so one message for a bad value."""
    return _quantity(lambda value: value if value == "auto" else parse(value), example)


Count = Annotated[int, *_quantity(partial(parse_count, least=1), "20M")]
BatchTokens = Annotated[int, *_quantity(partial(parse_count, least=1, most=MAX_BATCH), "256K")]
StepCount = Annotated[int, *_quantity(partial(parse_count, unit="steps", least=1, most=10**12), "1000")]
Bytes = Annotated[int, *_quantity(parse_bytes, "64MB")]
Share = Annotated[float, *_quantity(parse_share, "2%")]
Seconds = Annotated[
    float, *_quantity(parse_duration, "10 min"), PlainSerializer(lambda value: f"{value} s", when_used="json")
]
Auto = Literal["auto"]
AutoCount = Annotated[int | Auto, *_or_auto(partial(parse_count, least=1), "20M")]
AutoContext = Annotated[int | Auto, *_or_auto(partial(parse_count, least=1, most=MAX_CONTEXT), "2048")]
AutoBatch = Annotated[int | Auto, *_or_auto(partial(parse_count, least=1, most=MAX_BATCH), "256K")]
AutoVocab = Annotated[int | Auto, *_or_auto(partial(parse_count, least=1, most=MAX_VOCAB), "8K")]
AutoSequences = Annotated[int | Auto, *_or_auto(partial(parse_count, unit="sequences", least=1, most=1_000_000), "8")]
AutoDegree = Annotated[int | Auto, *_or_auto(partial(parse_count, unit="processes", least=1, most=1_000_000), "2")]
AutoThreads = Annotated[int | Auto, *_or_auto(partial(parse_count, unit="threads", least=1, most=65_536), "8")]
AutoSpan = Annotated[int | float | str, *_or_auto(parse_span, "2%")]
AutoInterval = Annotated[int | str, *_or_auto(parse_interval, "500 steps")]
AutoNumber = Annotated[float | Auto, *_or_auto(partial(parse_number, most=MAX_LEARNING_RATE), "3e-4")]


Paths = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


def setting(default: Any, description: str, *examples: Any, **limits: Any) -> Any:
    """A key of a section. A default of `...` makes it required; limits are pydantic's (ge, le, pattern).

    A lower limit without an upper one gets the upper limit LARGEST_COUNT.
    """
    if limits.keys() & {"ge", "gt"} and not limits.keys() & {"le", "lt"}:
        limits["le"] = LARGEST_COUNT
    return Field(default, description=description, examples=list(examples) or None, **limits)


def check_url(value: str, example: str) -> str:
    """The value if it is a URL without a password; ValueError otherwise."""
    scheme, separator, rest = value.partition("://")
    if not (scheme and separator and rest.strip("/")):
        raise ValueError(f"expected a URL such as {example}, got {format_value(value)}")
    if "@" in rest.partition("/")[0]:
        raise ValueError("the URL contains a password: remove it, and set it in the environment")
    return value


def section(kind: type[SpecSection], description: str) -> Any:
    """A key that holds a section; left out, the section has its defaults."""
    return Field(default_factory=kind, description=description)


class SpecSection(BaseModel):
    """A section of the spec: strict types, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, validate_default=False, allow_inf_nan=False)


class ShortSection(SpecSection):
    """A section that may also be written as the value of one key: `model: 10M` for `model: {preset: 10M}`.

    `short` names that key. Lists are also short forms of keys that hold paths.
    """

    short: ClassVar[str] = ""

    def __init_subclass__(cls, short: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.short = short

    @model_validator(mode="before")
    @classmethod
    def _expand_short(cls, value: Any) -> Any:
        is_short = isinstance(value, str) or (isinstance(value, list) and cls.short == "path")
        return {cls.short: value} if is_short and cls.short else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        full = handler.resolve_ref_schema(handler(core))
        return {"anyOf": [{"type": "string"}, full], "description": full.get("description", "")}
