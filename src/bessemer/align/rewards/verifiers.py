"""Verifiers: rewards that compare an answer with the row's, match a pattern, parse JSON, or run tests."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.align.rewards.math_answers import equal_answers, extract_answer
from bessemer.errors import UserError
from bessemer.sandbox import Limits, SandboxResult, check_isolation, run_python
from bessemer.spec.rewards import RewardSpec

if TYPE_CHECKING:
    from bessemer.align.rewards.reward import Sample

Verifier = Callable[[Sequence["Sample"]], list[float | None]]
_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)
_PARALLEL = min(8, os.cpu_count() or 1)


def make_verifier(spec: RewardSpec, key: str) -> Verifier:
    """The verifier of a spec; `key` names it in messages."""
    if spec.verifier == "code":
        check_isolation(spec.isolation == "limits", f"{key}.isolation")
        return lambda samples: _run_tests(spec, key, samples)
    if spec.verifier == "regex":
        pattern = re.compile(spec.pattern or "", re.DOTALL)
        return lambda samples: [float(pattern.search(sample.completion) is not None) for sample in samples]
    if spec.verifier == "json":
        validate = _json_validator(spec.json_schema, key)
        return lambda samples: [_is_valid_json(sample.completion, spec, validate) for sample in samples]
    compare = _equal_math if spec.verifier == "math" else _equal_text
    return lambda samples: [_compare(sample, spec, key, compare) for sample in samples]


def extract(text: str, pattern: str | None) -> str | None:
    """What the pattern's last match holds: its last group, or all of it. None without a match."""
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text, re.DOTALL if "\\n" in pattern else 0))
    if not matches:
        return None
    return matches[-1][matches[-1].re.groups] or ""


def normalise(text: str) -> str:
    """Text for an exact match: without case, surrounding quotes and punctuation, and with single spaces."""
    text = " ".join(text.casefold().split())
    return text.strip("\"'`*_.,;:!? ") or text


def _compare(sample: Sample, spec: RewardSpec, key: str, compare: Callable[[str, str, bool], bool]) -> float:
    right = sample.column(spec.column, f"{key}.column")
    answers = [_text_of(value, sample, key) for value in (right if isinstance(right, list) else [right])]
    text = extract(sample.completion, spec.extract)
    if text is not None and spec.verifier == "math" and spec.extract is None:
        text = extract_answer(text)
    return float(text is not None and any(compare(text, answer, spec.strict) for answer in answers))


def _text_of(value: Any, sample: Sample, key: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        problem = f"{key}: {sample.place}: the right answer is {value!r:.60}"
        raise UserError(f"{problem}; give a text or a number, or a list of them")
    return str(value)


def _equal_text(text: str, answer: str, strict: bool) -> bool:
    return text == answer if strict else normalise(text) == normalise(answer)


def _equal_math(text: str, answer: str, strict: bool) -> bool:
    if "\\boxed" in answer or "####" in answer:  # the column holds a solution
        answer = extract_answer(answer) or answer
    return equal_answers(text, answer)


def _json_validator(schema: dict[str, Any] | str | None, key: str) -> Callable[[Any], bool]:
    if schema is None:
        return lambda value: True
    try:
        import jsonschema
    except ImportError:
        raise UserError(f"{key}.json_schema needs a package: pip install 'bessemer[rewards]'") from None
    try:
        loaded = json.loads(Path(schema).expanduser().read_text()) if isinstance(schema, str) else schema
        kind = jsonschema.validators.validator_for(loaded)
        kind.check_schema(loaded)
    except (OSError, ValueError) as error:
        raise UserError(f"{key}.json_schema: {schema}: cannot be read ({error}); name a JSON schema") from None
    except jsonschema.SchemaError as error:
        raise UserError(f"{key}.json_schema: not a JSON schema ({error.message}); correct it") from None
    validator = kind(loaded)
    return lambda value: bool(validator.is_valid(value))


def _is_valid_json(text: str, spec: RewardSpec, validate: Callable[[Any], bool]) -> float:
    part = extract(text, spec.extract)
    if spec.extract is None and (fences := _FENCE.findall(text)):
        part = fences[-1]
    try:
        value = json.loads(part or "", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0.0
    return float(validate(value))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def code_of(text: str) -> str:
    """The last fenced block of an answer; without one, all of it."""
    fences = _FENCE.findall(text)
    return str(fences[-1]) if fences else text


# Runs in the sandbox. The result counts only behind a secret that the solution cannot print by accident, and after all
# tests: an answer that exits early has failed.
_HARNESS = """
import io, json, sys
task = json.load(sys.stdin)
sys.stdin = io.StringIO("")
names, passed = {"__name__": "__main__"}, 0
exec(compile(task["code"], "answer.py", "exec"), names)
for test in task["tests"]:
    try:
        exec(compile(test, "test.py", "exec"), names)
        passed += 1
    except BaseException:
        pass
print("\\n" + task["secret"], passed, flush=True)
"""


def _run_tests(spec: RewardSpec, key: str, samples: Sequence[Sample]) -> list[float | None]:
    limits = Limits(time_s=spec.time, memory_bytes=spec.memory, isolate=spec.isolation == "required")
    run = partial(run_python, limits=limits, packages=spec.packages)
    tests = [_tests_of(sample.column(spec.column, f"{key}.column"), sample, key) for sample in samples]

    def score(pair: tuple[Sample, list[Any]]) -> float:
        code, cases = code_of(pair[0].completion), pair[1]
        passed = _count_programs(code, cases, run) if isinstance(cases[0], dict) else _count(code, cases, run)
        return passed / len(cases) if spec.tests == "share" else float(passed == len(cases))

    with ThreadPoolExecutor(_PARALLEL) as pool:
        return list(pool.map(score, zip(samples, tests, strict=True)))


def _tests_of(value: Any, sample: Sample, key: str) -> list[Any]:
    tests = value if isinstance(value, list) else [value]
    texts = all(isinstance(test, str) for test in tests)
    programs = all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests)
    if not tests or not (texts or programs):
        problem = f"{key}: {sample.place}: no tests in {value!r:.60}"
        raise UserError(f"{problem}; give Python code, a list of asserts, or a list of {{input: ..., output: ...}}")
    return tests


def _count(code: str, tests: list[str], run: Callable[..., SandboxResult]) -> int:
    secret = secrets.token_hex(16)
    task = json.dumps({"code": code, "tests": tests, "secret": secret})
    result = run(_HARNESS, stdin=task)
    last = result.stdout.rstrip("\n").rpartition("\n")[2].split()
    return int(last[1]) if len(last) == 2 and last[0] == secret else 0


def _count_programs(code: str, tests: list[dict[str, Any]], run: Callable[..., SandboxResult]) -> int:
    """Tests of a program: its output for an input, compared without white space at the ends of lines."""
    passed = 0
    for test in tests:
        result = run(code, stdin=str(test["input"]))
        passed += result.ok and _lines(result.stdout) == _lines(str(test["output"]))
    return passed


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
