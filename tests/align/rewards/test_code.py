"""The code reward: answers run against tests in the sandbox, and answers that try to win without solving."""

from typing import Any

import pytest

from bessemer.align.rewards.reward import Sample, make_rewards, score_samples
from bessemer.errors import UserError
from bessemer.sandbox import NoIsolation, run_python
from bessemer.spec.rewards import RewardSpec

ASSERTS = ["assert double(2) == 4", "assert double(-1) == -2", "assert double('a') == 'aa'"]
RIGHT = "Here it is:\n```python\ndef double(x):\n    return x + x\n```\nDone."


@pytest.fixture(autouse=True)
def _isolation() -> None:
    try:
        run_python("")
    except NoIsolation as error:
        pytest.skip(str(error))


def scores(*answers: str, tests: Any = ASSERTS, count: str = "all") -> list[float | None]:
    spec = RewardSpec.model_validate({"verifier": "code", "column": "tests", "time": "1s", "tests": count})
    samples = [Sample("Write double.", answer, columns={"tests": tests}, place="a.jsonl:1") for answer in answers]
    return score_samples(make_rewards({"works": spec}), samples).parts["works"]


def test_all_or_a_share_of_the_tests() -> None:
    half = "def double(x):\n    return 2 * x if x != -1 else 0"
    answers = (RIGHT, half, "def double(x): return 0", "not code", "```python\nwhile True: pass\n```")
    assert scores(*answers) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert scores(RIGHT, half, count="share") == [1.0, pytest.approx(2 / 3)]


def test_a_test_file_as_one_text() -> None:
    whole = "def check(f):\n    assert f(3) == 6\ncheck(double)\n"
    assert scores(RIGHT, "def double(x): return 5", tests=whole) == [1.0, 0.0]


def test_programs_are_compared_by_their_output() -> None:
    cases = [{"input": "3\n4\n", "output": "7"}, {"input": "1\n1\n", "output": "2  \n"}]
    assert scores("print(int(input()) + int(input()))", "print(7)", tests=cases) == [1.0, 0.0]


@pytest.mark.parametrize(
    "attack",
    [
        "raise SystemExit(0)", "import os; os._exit(0)", "print('all tests passed 3'); import os; os._exit(0)",
        "import sys; print(sys.stdin.read(), 3)", "import atexit; atexit.register(lambda: print('3'))",
        "import builtins; builtins.compile = None", "import os; os.kill(os.getppid(), 9)",
        "def double(x): raise SystemExit(0)", "def double(x): import os; os._exit(0)",
    ],
)  # fmt: skip
def test_answers_that_do_not_solve_it_get_nothing(attack: str) -> None:
    assert scores(attack) == [0.0]


def test_rows_without_tests_are_named() -> None:
    for tests in ([], [3], {"a": 1}, None):
        with pytest.raises(UserError, match=r"rl\.rewards\.works: a\.jsonl:1: no tests in"):
            scores(RIGHT, tests=tests)
