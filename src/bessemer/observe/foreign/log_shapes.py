"""The lines that frameworks print: how each is recognised, where its step is, how its numbers are written.

A shape is a row of a table. Progress bars and the dictionaries that Trainer prints carry no step of their own and are
read in log_records.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bessemer.observe.foreign.text import NUMBER, UNIT, UNITS, read_number

Pairs = Callable[[str, int], list[tuple[str, str, str]]]  # from line and start: keys, numbers, units


def _findall(pattern: str) -> Pairs:
    return re.compile(pattern).findall


# `key: 1.2ms` or `key=[1.2]`; a key may have several words.
COLON_PAIRS = _findall(
    r"(?<![\w/.@%-])([A-Za-z][\w/.@%-]{0,120}(?: [A-Za-z(][\w/.()-]{0,60}){0,3}?)\s{0,20}[:=]\s{0,20}"
    rf"[\[(]{{0,4}}(?:np\.\w+\()?({NUMBER})\s?({UNIT})?(?![\w:.])"
)
# `key: 1.2` or `key 1.2` between bars; a key may have any words.
PIPE_PART = re.compile(
    rf"\s{{0,40}}([A-Za-z][^:=]{{0,120}}?)(?:: {{0,40}}|\s{{1,40}})({NUMBER})\s?({UNIT})?"
    r"(?:/[\d.,]{1,30})?(?: {0,9}\([^)]{0,60}\))?\s{0,40}$"
)
# `key 1.2ms, key 3`
SPACE_PAIRS = _findall(rf"([A-Za-z][a-z_ ]{{0,60}}?):? ({NUMBER})({UNIT})?(?=[,\s]|$)")
DASH_PAIRS = _findall(rf"- ([^\s:]{{1,200}}):(?:np\.\w+\()?({NUMBER})()")
DICT_PAIRS = _findall(rf"""["']([^"']{{1,200}})["']: ["']?(?:np\.\w+\()?({NUMBER})()["']?\)?(?=[,}}])""")


def pipe_pairs(line: str, start: int = 0) -> list[tuple[str, str, str]]:
    matches = [PIPE_PART.match(part) for part in line[start:].split("|")]
    return [(match[1], match[2], match[3] or "") for match in matches if match]


COMMA = r"(?P<step>\d[\d,]{0,15})(?:\s{0,9}/\s{0,9}(?P<total>\d[\d,]{0,15}))?"


@dataclass(frozen=True)
class Shape:
    """`step` has a group of this name, maybe `total`, and `validation` if what follows is of a validation. `percent`
    are keys whose values are percent without a sign; `means` tells that values are means since the line before;
    `repeats` that a line repeats the last validation; `block` matches the lines after this one that have its numbers.
    """

    format: str
    markers: tuple[bytes, ...]
    step: re.Pattern[str]
    pairs: Pairs
    keys: Mapping[str, str] = field(default_factory=dict)
    percent: frozenset[str] = frozenset()
    means: bool = False
    repeats: bool = False
    block: re.Pattern[str] | None = None
    whole_line: bool = False  # some numbers stand before the step

    def may_match(self, line: bytes) -> bool:
        for marker in self.markers:  # noqa: SIM110  # twice as fast as all()
            if marker not in line:
                return False
        return True

    def numbers(self, line: str, match: re.Match[str]) -> dict[str, float]:
        groups = self.step.groupindex
        prefix = "validation " if "validation" in groups and match["validation"] else ""
        start = line.find("|") if self.whole_line else match.end()
        names, percent, numbers = self.keys, self.percent, {}
        for key, text, unit in self.pairs(line, start):
            value = read_number(text)
            if unit:
                value *= UNITS[unit]
            elif key in percent:
                value /= 100
            numbers[prefix + names.get(key, key)] = value
        return numbers


def _shape(format: str, markers: str, step: str, pairs: Pairs, **options: object) -> Shape:
    return Shape(format, tuple(word.encode() for word in markers.split("&")), re.compile(step), pairs, **options)  # type: ignore[arg-type]


PIPED_STEP = rf"(?i)(?:^|\s)step\s+{COMMA}\s*(?:\([\d.]+%\)\s*)?\|"
SHAPES = (
    _shape("megatron", "validation loss at&iteration", r"(?P<validation>validation loss at) iteration (?P<step>\d+)"
           r"(?: on validation set)? *\|", pipe_pairs),
    _shape("nemo", "Training epoch&global_step:", r"iteration \d+/\d+ \|.*?global_step: (?P<step>\d+)", pipe_pairs,
           whole_line=True),
    _shape("megatron", "iteration& |", r"iteration\s+(?P<step>\d+)/\s*(?P<total>\d+|infinity) \|", pipe_pairs,
           means=True),
    _shape("torchtitan", "step:&memory:&tps:", rf"(?P<validation>validate )?\bstep:\s*{COMMA}\s", COLON_PAIRS),
    _shape("nanochat", "step &lrm:&|", PIPED_STEP, pipe_pairs, percent=frozenset({"mfu", "bf16_mfu"})),
    _shape("nanochat", "Step &| Validation ", rf"^Step {COMMA} \|", pipe_pairs),
    _shape("nanogpt", "iter &loss&time", r"(?:^|\s)iter (?P<step>\d+): ", SPACE_PAIRS, keys={"time": "step_s"}),
    _shape("nanogpt", "step &: train loss&val loss", r"(?:^|\s)step (?P<step>\d+): ", SPACE_PAIRS,
           keys={"train loss": "estimated train loss"}),
    _shape("modded_nanogpt", "step:&train_time:", rf"\bstep:{COMMA} (?=train_|val_)", COLON_PAIRS),
    _shape("litgpt", "iter & step &loss train:", r"iter \d+ step (?P<step>\d+) \|", COLON_PAIRS, repeats=True),
    _shape("maxtext", "completed step:&loss:", r"completed step: (?P<step>\d+), ", COLON_PAIRS),
    _shape("verl", "step:& - ", r"\bstep:(?P<step>\d+) (?=- )", DASH_PAIRS),
    _shape("openrlhf", "Global step &: {", r"Global step (?P<step>\d+)[^{]*: \{", DICT_PAIRS),
    _shape("deepspeed", "steps: &iter time (s):", r"\bsteps: (?P<step>\d+) (?=loss)", COLON_PAIRS, means=True),
    _shape("deepspeed", "step=&skipped=", r"\bstep=(?P<step>\d+), (?=skipped=)", COLON_PAIRS),
    _shape("deepspeed", "global_step=&SamplesPerSec=", r"global_step=(?P<step>\d+), ", COLON_PAIRS),
    _shape("olmo_core", "[step=", rf"\[step={COMMA}", lambda line, start: [],
           block=re.compile(rf"^\s{{1,40}}(\w[\w/ .()%-]{{0,200}}?)=({NUMBER})()\s{{0,40}}$")),
    _shape("composer", "[batch=", rf"\[batch={COMMA}\]:", lambda line, start: [],
           block=re.compile(rf"^\s{{1,40}}(?:Train |Eval )?(\w[\w/ .()%-]{{0,200}}?): ({NUMBER})()\s{{0,40}}$")),
)  # fmt: skip
# Any other line with a step and a loss.
ANY_STEP = re.compile(
    r"(?i)(?:^|[^a-z_])(?:global[ _]?step|step|iter|iteration|update|batch)s?\s{0,9}[:=#]?\s{0,20}[\[(]?" + COMMA
)
LOSS_KEY = re.compile(r"(?i)loss([_/]\w+)?$")
ANY_EPOCH = re.compile(r"(?i)(?:^|[^a-z])epoch\s{0,9}[:=#]?\s{0,20}[\[(]?(\d{1,9})")
COMPANIONS = ("deepspeed",)  # formats whose lines add to those of another
OVERFLOW = re.compile(r"Attempted loss scale: [\d.e+]+, reducing to ([\d.e+]+)")
SETTING = re.compile(
    r"^\s{0,9}(?:\S{1,40}: )?([a-z][a-z0-9_]{1,80}) \.{2,80} (\S.{0,400})"
)  # Megatron's list of its arguments


def parse_any(line: str) -> tuple[int, dict[str, float], int | None] | None:
    """Step, numbers and number of steps of a line of no known framework; None without both a step and a loss."""
    match = ANY_STEP.search(line)
    step = _count(match["step"]) if match else None
    if match is None or step is None:
        return None
    for pairs in (pipe_pairs,) if "|" in line else (COLON_PAIRS, SPACE_PAIRS):
        numbers = {key.strip(): read_number(text) * UNITS.get(unit, 1.0) for key, text, unit in pairs(line, 0)}
        numbers = {key: value for key, value in numbers.items() if key.lower() not in ("step", "iter", "iteration")}
        if any(LOSS_KEY.search(key) for key in numbers):
            return step, numbers, _count(match["total"])
    return None


def parse_shape(shape: Shape, line: str) -> tuple[int, dict[str, float], int | None] | None:
    """Step, numbers and number of steps of a line, if it has the shape."""
    match = shape.step.search(line)
    step = _count(match["step"]) if match else None
    if match is None or step is None:
        return None
    total = _count(match["total"]) if "total" in shape.step.groupindex else None
    return step, shape.numbers(line, match), total


def _count(text: str | None) -> int | None:
    """A number of steps; None for what no run reaches."""
    if not text:
        return None
    digits = text.replace(",", "")
    return int(digits) if digits.isdecimal() and len(digits) < 16 else None
