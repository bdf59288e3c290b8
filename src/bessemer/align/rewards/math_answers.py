r"""Compares mathematical answers by exact rational arithmetic: numbers, fractions, percent, units, LaTeX, tuples.

`1,234.50`, `\frac{1}{2}`, `1/2`, `0.5`, `50\%`, `3 \cdot 10^{-2}` and `12\text{ cm}` are read; nothing is evaluated as
code. What is not a number is compared as text without spaces and LaTeX's layout commands.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

_LONGEST, _LARGEST_EXPONENT, _DEEPEST = 400, 64, 20
_MARKS = (r"####\s*(.+)", r"(?i:answer)\s*(?:is|:|=)\**:?\s*(.+)")
_NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,2}(?![\w.]))?")
_NOT_UNITS = {"pi", "or", "and"}
_LAST_NUMBER = re.compile(
    r"(?:(?<![\w)])[-−])?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?)(?:\s*/\s*\d+)?(?:\s*\\?%)?"
)
# \text{...}, two letters or more, or one of a few letters after a space: 2x is no number.
_UNIT = re.compile(
    r"\s*(?:\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}|([A-Za-z°][A-Za-z°²³][A-Za-z°²³ ./]*|(?<=\s)[mgshlL]|°))"
    r"(\^\{?\d\}?)?\s*$"
)
_LAYOUT = re.compile(r"\\(?:left|right|displaystyle|,|;|!|:|quad|qquad| )|[$~]|\\[()\[\]]")


@dataclass(frozen=True)
class MathAnswer:
    """`value` is None where the text is no number; then `text` is compared."""

    text: str
    value: Fraction | None
    unit: str = ""
    percent: bool = False


def extract_answer(text: str) -> str | None:
    r"""The final answer of a solution: its last `\boxed{}`, else what follows `####` or "the answer is", else its last
    number."""
    if (boxed := _last_boxed(text)) is not None:
        return boxed
    for mark in _MARKS:
        if lines := re.findall(mark, text):
            return re.split(r"\.(?:\s|$)", str(lines[-1]))[0].strip()
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1] if numbers else None


def equal_answers(first: str, second: str) -> bool:
    """Whether two answers are the same number, or tuple of numbers, or text.

    Units are compared if both have one. A percentage equals its fraction, and also the bare number (50 % is 0.5 and
    50), since questions for a percentage are answered either way.
    """
    parts = [_split_tuple(_strip_outside(text)) for text in (first, second)]
    if len(parts[0]) != len(parts[1]):
        return False
    return all(_equal(parse_answer(a), parse_answer(b)) for a, b in zip(*parts, strict=True))


def parse_answer(text: str) -> MathAnswer:
    """Reads one answer, such as `x = 12\\text{ cm}`."""
    text = _strip_outside(text)
    plain = _plain_text(text)
    if len(text) > _LONGEST:
        return MathAnswer(plain, None)
    text = re.sub(r"^[A-Za-z]\w?\s*=\s*", "", text)
    percent = bool(re.search(r"(?:\\?%|percent)\s*$", text))
    text = re.sub(r"\s*(?:\\?%|percent)\s*$", "", text)
    value, unit = _evaluate(text), ""
    match = _UNIT.search(text) if value is None else None
    if match and (match[2] or "").strip() not in _NOT_UNITS:
        value = _evaluate(text[: match.start()])
        unit = _plain_unit((match[1] or match[2]) + (match[3] or "")) if value is not None else ""
    return MathAnswer(plain, value, unit, percent and value is not None)


def _equal(first: MathAnswer, second: MathAnswer) -> bool:
    if first.value is None or second.value is None:
        return first.value is second.value and first.text == second.text and bool(first.text)
    if first.unit and second.unit and first.unit != second.unit:
        return False
    divisors = [100 if answer.percent else 1 for answer in (first, second)]
    same = first.value / divisors[0] == second.value / divisors[1]
    return same or (first.percent != second.percent and first.value == second.value)


def _last_boxed(text: str) -> str | None:
    at = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if at < 0:
        return None
    start = text.find("{", at)
    if start < 0 or text[at:start].strip("\\abcdefghijklmnopqrstuvwxyz "):
        return text[at:].split(None, 1)[1].strip() if len(text[at:].split(None, 1)) > 1 else None
    end = _closing(text, start)
    return None if end is None else text[start + 1 : end].strip()


def _closing(text: str, start: int) -> int | None:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
    return None


def _strip_outside(text: str) -> str:
    text = re.sub(r"\^\{?\\circ\}?", "°", text.replace("−", "-").replace("\\$", "").replace("{,}", ","))
    text = _LAYOUT.sub(" ", re.sub(r"\\!|(?<=\d)\\,(?=\d{3})", "", text))
    text = text.strip().strip("*`\"'").strip()
    text = text.rstrip(".,;: ")
    if text.startswith("\\boxed"):
        text = _last_boxed(text) or text
    return text


def _split_tuple(text: str) -> list[str]:
    """The parts of `(1, 2)`, `[0, 1)` or `\\{1, 2\\}`, with the brackets as a part; other texts are one part."""
    opened = text[:2] if text.startswith("\\{") else text[:1]
    closed = text[-2:] if text.endswith("\\}") else text[-1:]
    inside = text[len(opened) : len(text) - len(closed)]
    if opened not in ("(", "[", "\\{") or closed not in (")", "]", "\\}") or not re.search(r",(?!\d{3}\b)|,\s", inside):
        return [text]
    parts, depth = [""], 0
    for character in inside:
        depth += (character in "({[") - (character in ")}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [opened + closed, *parts]


def _plain_text(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text).replace("\\dfrac", "\\frac")
    return re.sub(
        r"\s+", "", text.replace("\\tfrac", "\\frac").replace("\\cdot", "*").replace("\\times", "*")
    ).casefold()


def _plain_unit(text: str) -> str:
    unit = re.sub(r"[\s.{}^]", "", text).casefold().replace("²", "2").replace("³", "3").replace("°", "degree")
    return unit[:-1] if len(unit) > 3 and unit.endswith("s") else unit


def _evaluate(text: str) -> Fraction | None:
    try:
        return _Parser(text).parse()
    except (ValueError, ZeroDivisionError, RecursionError):
        return None


class _Parser:
    """Recursive descent over + - * / ^, parentheses, \\frac and \\sqrt of squares, in fractions. Powers are bounded, so
    no text costs much time."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"\\[dt]frac", r"\\frac", text).replace("\\cdot", "*").replace("\\times", "*")
        self.text = text.replace("\\div", "/").replace("×", "*").replace("÷", "/").replace("**", "^")
        self.at = self.depth = 0

    def parse(self) -> Fraction:
        value = self._sum()
        if self._peek():
            raise ValueError(self.text)
        return value

    def _peek(self) -> str:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _take(self, token: str) -> bool:
        self._peek()
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def _sum(self) -> Fraction:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError(self.text)
        value = self._product()
        while (sign := self._peek()) and sign in "+-":
            self.at += 1
            value += self._product() if sign == "+" else -self._product()
        self.depth -= 1
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while True:
            if self._take("*"):
                value *= self._signed()
            elif self._take("/"):
                value /= self._signed()
            elif (
                self._peek() == "\\" and self.text.startswith("\\frac", self.at) and value.denominator == 1
            ):  # a mixed number
                part = self._signed()
                value += part if value >= 0 else -part
            else:
                return value

    def _signed(self) -> Fraction:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise ValueError(self.text)
        sign = -1 if self._take("-") else 1
        value = sign * self._power() if sign > 0 or not self._take("+") else self._power()
        self.depth -= 1
        return value

    def _power(self) -> Fraction:
        base = self._atom()
        if not self._take("^"):
            return base
        exponent = self._group() if self._peek() == "{" else self._signed()
        if (
            exponent.denominator != 1
            or abs(exponent) > _LARGEST_EXPONENT
            or max(abs(base.numerator), base.denominator) > 10**30
        ):
            raise ValueError(self.text)
        return base ** int(exponent)

    def _group(self) -> Fraction:
        if not self._take("{"):
            raise ValueError(self.text)
        value = self._sum()
        if not self._take("}"):
            raise ValueError(self.text)
        return value

    def _atom(self) -> Fraction:
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise ValueError(self.text)
            return value
        if self._take("{"):
            self.at -= 1
            return self._group()
        if self._take("\\frac"):
            return self._digit_or_group() / self._digit_or_group()
        if self._take("\\sqrt"):
            return _exact_root(self._digit_or_group())
        self._peek()
        match = _NUMBER.match(self.text, self.at)
        if not match:
            raise ValueError(self.text)
        self.at = match.end()
        value = Fraction(match[0].replace(",", ""))
        mixed = re.compile(r"\s+(\d+)\s*/\s*(\d+)").match(self.text, self.at)  # 1 1/2
        if mixed and value.denominator == 1 and int(mixed[2]):
            self.at = mixed.end()
            value += Fraction(int(mixed[1]), int(mixed[2]))
        return value

    def _digit_or_group(self) -> Fraction:
        if self._peek() == "{":
            return self._group()
        if not self._peek().isdigit():
            raise ValueError(self.text)
        self.at += 1
        return Fraction(self.text[self.at - 1])


def _exact_root(value: Fraction) -> Fraction:
    if value < 0:
        raise ValueError(value)
    root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
    if root * root != value:
        raise ValueError(value)
    return root
