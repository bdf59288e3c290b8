"""Code that a model wrote for a task, run against the task's tests in the sandbox, and pass@k.

A task is a row like HumanEval's (`prompt`, `test` with a function `check`, `entry_point`) or MBPP's (`test_list` of
assertions, `test_setup_code`). A program passes only if its last test has run: a program that ends early, even with
exit code 0, does not.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bessemer.errors import UserError
from bessemer.sandbox import Limits, check_isolation, run_python

MEMORY_BYTES = 1 << 30
# Ends of a completion that goes on after the function it was asked for (Chen et al. 2021).
STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint", "\nassert ", "\n```")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class CodeSample:
    """One program for one task. `program` is complete: of a HumanEval task, its prompt and the completion. `test` runs
    after it; a HumanEval test defines `check`, which is called with `entry_point` (empty: it is not). `timeout_s` is
    time of the processor; waiting may take four times as long."""

    task_id: str
    program: str
    test: str
    entry_point: str = ""
    timeout_s: float = 5.0


@dataclass(frozen=True)
class CodeResult:
    """`reason` of a failure: timeout, memory, or the last line of the error."""

    passed: bool
    reason: str = ""


def code_sample(row: Mapping[str, Any], completion: str, timeout_s: float = 5.0) -> CodeSample:
    """The sample of a row and what a model wrote: a continuation of the prompt, or an answer with a block of code."""
    task_id = str(row.get("task_id", ""))
    code = extract_code(completion)
    if "entry_point" in row and "test" in row:
        prompt, entry_point = str(row["prompt"]), str(row["entry_point"])
        definition = re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", code, re.MULTILINE)
        # A rewritten function may need the imports and helpers of the prompt.
        program = f"{prompt}\n    pass\n\n{code}" if definition else prompt + cut_at_stops(code)
        return CodeSample(task_id, program, str(row["test"]), entry_point, timeout_s)
    tests = row.get("test_list")
    if isinstance(tests, str):
        tests = [tests]
    if not isinstance(tests, Sequence) or not tests:
        raise UserError(
            f"task {task_id!r}: has no tests: give `test` and `entry_point`, or a `test_list` of assertions"
        )
    setup = str(row.get("test_setup_code") or "") or "\n".join(map(str, row.get("test_imports") or ()))
    return CodeSample(task_id, f"{setup}\n{code}" if setup else code, "\n".join(map(str, tests)), "", timeout_s)


def extract_code(completion: str) -> str:
    """The last block in ``` that holds a function, else the last block, else all of it. A completion that begins with
    an indented line continues the prompt and holds no blocks."""
    if re.match(r"\n*[ \t]", completion):
        return completion
    blocks: list[str] = _FENCE.findall(completion)
    named = [block for block in blocks if "def " in block]
    return (named or blocks or [completion])[-1]


def cut_at_stops(completion: str) -> str:
    """The completion up to the end of the function's body."""
    ends = [end for stop in STOPS if (end := completion.find(stop)) >= 0]
    return completion[: min(ends, default=len(completion))]


def score_code(samples: Sequence[CodeSample], workers: int | None = None) -> list[bool]:
    """Whether each program passes its tests. Runs one program per core, each isolated."""
    return [result.passed for result in run_code(samples, workers)]


def run_code(samples: Sequence[CodeSample], workers: int | None = None) -> list[CodeResult]:
    """Like `score_code`, with the reasons. Refuses a machine without isolation."""
    if not samples:
        return []
    check_isolation()
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        return list(pool.map(_run, samples))


# Runs in the sandbox, where what the program prints is dropped. The secret, which the program cannot know by accident,
# is printed after the last test has passed.
_HARNESS = """
import json, os, sys
task, out = json.load(sys.stdin), sys.stdout
sys.stdin, sys.stdout = open(os.devnull), open(os.devnull, "w")
space = {"__name__": "program"}
exec(compile(task["program"], "program", "exec"), space)
exec(compile(task["test"], "test", "exec"), space)
if task["entry_point"]:
    space["check"](space[task["entry_point"]])
print(task["secret"], file=out, flush=True)
"""


def _run(sample: CodeSample) -> CodeResult:
    secret = secrets.token_hex(16)
    task = {"program": sample.program, "test": sample.test, "entry_point": sample.entry_point, "secret": secret}
    limits = Limits(time_s=sample.timeout_s, memory_bytes=MEMORY_BYTES)
    result = run_python(_HARNESS, json.dumps(task), limits)
    if result.stdout.strip() == secret:
        return CodeResult(True)
    if result.status != "ended":
        return CodeResult(False, result.status)
    lines = result.stderr.strip().splitlines()
    return CodeResult(False, lines[-1][:200] if lines else "it ended before its last test")


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, c of which pass, include one that passes: 1 - C(n-c, k) / C(n, k), without
    large numbers (Chen et al. 2021)."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise UserError(f"pass@{k} of {n} samples, {c} of which pass: k must be from 1 to the number of samples")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def mean_pass_at_k(passed: Mapping[str, Sequence[bool]], k: int) -> float:
    """The mean over tasks; `passed` holds the samples of each."""
    return sum(pass_at_k(len(results), sum(results), k) for results in passed.values()) / len(passed)
