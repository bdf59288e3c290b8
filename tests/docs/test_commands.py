"""Commands and Python blocks of README and docs, executed as they are shown, block by block, in a folder of tiny runs
(example_home.py). What needs a cluster, a GPU, a cloud, a server, a person or minutes is listed with its reason."""

import glob
import io
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bessemer.cli import main

from .example_home import train_models, write_files
from .test_blocks import PAGES, ROOT, blocks, shown_commands, words_of

# Why commands that begin so are not executed here, and the test that runs their like with what it needs.
NOT_EXECUTED = {
    "watch runs": "serves a page until Ctrl-C: tests/watch/test_page.py",
    "watch imported": "serves a page until Ctrl-C: tests/watch/test_foreign.py",
    "serve ": "serves until Ctrl-C: tests/serve/test_api.py",
    "mcp ": "serves until Ctrl-C: tests/assist/test_server.py",
    "bench serve": "a server: tests/bench/test_serve.py",
    "evaluate judge": "the server of a judge: tests/evaluate/test_judge.py",
    "align vote": "a person: tests/align/test_vote.py",
    "align tally": "the votes of people: tests/align/test_vote.py",
    "align probe sycophancy": "a model with room for its 40 questions: tests/align/test_sycophantic_dpo.py",
    "bench scaling": "minutes of measurement: tests/bench/test_scaling.py",
    "bench optimise": "minutes of measurement: tests/bench/test_optimise.py",
    "bench": "minutes of measurement: tests/cli/test_bench.py",
    "chaos ": "minutes of damaged runs: tests/chaos/test_chaos.py",
    "train my-run.yaml --rehearse": "a minute of processes: tests/chaos/test_rehearsal.py",
    "train my-run.yaml --set parallel": "several processes, one of them by DeepSpeed: tests/parallel/test_deepspeed.py",
    "train my-run.yaml --profile": "a minute of traces: tests/cli/test_profile.py",
    "train recipes/extend-context.yaml": "a model of 1B parameters: tests/evaluate/test_needle.py",
    "evaluate runs/extend-context": "a model of 1B parameters: tests/evaluate/test_needle.py",
    "evaluate runs/demo --tasks": "published test sets: tests/evaluate/test_harness.py",
    "evaluate SmolLM2-135M-Instruct/": "a task of your own: tests/evaluate/test_own_tasks.py",
    "evaluate compare": "results of three models: tests/evaluate/test_statistics.py",
    "data publish run.yaml s3": "a bucket: tests/session/test_published.py",
    "data check smith.yaml": "rows with a mistake: tests/cli/test_data_check.py",
    "data check chats.jsonl": "rows with a mistake: tests/cli/test_data_check.py",
    "train smith.yaml": "rows with a mistake: tests/session/test_chat_checks.py",
    "doctor --store": "a bucket: tests/bench/test_doctor.py",
    "doctor /scratch/runs --nodes": "a cluster: tests/launch/test_preflight.py",
    "launch run.yaml --on local": "two GPUs: tests/launch/test_queue.py",
    "launch logs": "a submitted job: tests/launch/test_queue.py",
    "launch cancel": "a submitted job: tests/launch/test_queue.py",
    "control ": "a run that trains: tests/watch/test_api.py",
    "spec check sft.yaml": "the folder that `bessemer new` wrote: tests/starters/test_starters.py",
    "generate runs/large": "minutes of sampling: tests/cli/test_generate.py",
    "train student.yaml": "the answers of a large model: tests/docs/test_recipes.py",
    "plan forecast": "a run of some hundred steps: tests/plan/test_forecast.py",
    "train my-run.yaml --set precision=fp8": "a GPU: tests/train/lowp/test_fp8.py",
    "train dpo.yaml": "the data of recipes in another folder: tests/docs/test_recipes.py",
    "train reward.yaml": "the data of recipes in another folder: tests/docs/test_recipes.py",
    "align best": "minutes of sampling: tests/align/test_best_of.py",
}
# Values of the pages, and what stands for them in a run of thirty steps.
SMALLER = {"--step": "12", "/scratch/runs": "scratch/runs"}
CHECKPOINT = ("step-00001000.a1", "step-00000020.a1")
# Findings (none once they are fixed), readings of this machine, and a budget that the page shows to be refused.
EXIT_CODES = {
    "review *.py": (0,), "review": (1,), "doctor": (0, 1), "plan search --model 7b --tokens 1T": (2,),
    "watch forward runs/my-run --to": (0,), "watch forward runs/my-run": (2,),  # its spec names no tracker
}  # fmt: skip
SECONDS = ("plan simulate", "plan search")
WITHOUT_RUNS = ("plan", "spec", "review", "doctor", "new", "assist", "diagnose", "launch")


def reason(line: str) -> str | None:
    """Why a command is not executed."""
    return next((why for start, why in NOT_EXECUTED.items() if line.startswith(start)), None)


def is_slow(words: list[str]) -> bool:
    """It reads or trains a run, or computes for seconds."""
    on_runs = words[0] not in WITHOUT_RUNS or any(word.startswith("runs/") for word in words)
    return on_runs or " ".join(words).startswith(SECONDS)


def command_blocks(page: Path, chosen: Callable[[list[str]], bool]) -> list[list[list[str]]]:
    """The commands of each block that are executed and for which `chosen` holds."""
    executed = []
    for body in blocks(page, "", "sh", "bash", "console", "text"):
        lines = re.sub(r"\\\n\s*", " ", body).splitlines()
        commands = [words for line in lines if (words := words_of(line))]
        executed.append([words for words in commands if reason(" ".join(words)) is None and chosen(words)])
    return [block for block in executed if block]


def here(words: list[str]) -> list[str]:
    """The command for this folder: small numbers, names of files for their patterns."""
    shown = [SMALLER.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    shown = [SMALLER.get(word, word).replace(*CHECKPOINT) if word != "--step" else word for word in shown]
    return [name for word in shown for name in (sorted(glob.glob(word)) if "*" in word else [word])]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, one_probe: None) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train_models()
    return folder


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Enters a copy of a folder; each call a new one."""
    copies = iter(range(1000))

    def enter_copy(folder: Path) -> None:
        copy = tmp_path / str(next(copies))
        shutil.copytree(folder, copy, symlinks=True)
        monkeypatch.chdir(copy)

    monkeypatch.setenv("HOME", str(tmp_path))  # where some assistants keep their settings
    return enter_copy


def execute(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["bessemer", *here(words)])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    if "--write" in words:  # an earlier block of the page may have written it
        Path(words[words.index("--write") + 1]).unlink(missing_ok=True)
    try:
        main.run()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def wrong_ends(
    page: Path, home: Path, chosen: Callable[[list[str]], bool], enter: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> dict[str, str]:  # fmt: skip
    """Commands of a page that end otherwise than the page says, with their last words."""
    wrong = {}
    for block in command_blocks(page, chosen):
        enter(home)
        for words in block:
            line = " ".join(words)
            code = execute(words, monkeypatch)
            printed = capsys.readouterr()
            expected = next((codes for start, codes in EXIT_CODES.items() if line.startswith(start)), (0,))
            if code not in expected or "Traceback" in printed.err:
                wrong[line] = f"exit {code}: {printed.err[-500:]}"
    return wrong


def pages_with(chosen: Callable[[list[str]], bool]) -> list[Path]:
    return [page for page in PAGES if command_blocks(page, chosen)]


@pytest.mark.parametrize("page", pages_with(lambda words: not is_slow(words)), ids=lambda page: page.name)
def test_commands_that_need_no_run(
    page: Path, files: Path, enter: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], one_probe: None,
) -> None:  # fmt: skip
    assert wrong_ends(page, files, lambda words: not is_slow(words), enter, monkeypatch, capsys) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", pages_with(is_slow), ids=lambda page: page.name)
def test_commands_on_runs(
    page: Path, runs: Path, enter: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert wrong_ends(page, runs, is_slow, enter, monkeypatch, capsys) == {}


def test_the_table_has_no_stale_rows() -> None:
    lines = {" ".join(words) for page in PAGES for words in shown_commands(page)}
    for start, why in NOT_EXECUTED.items():
        assert any(line.startswith(start) and reason(line) == why for line in lines), start
        (test,) = re.findall(r"tests/[\w/]+\.py", why)
        assert (ROOT / test).is_file(), test
    executed = [line for line in lines if reason(line) is None]
    assert len(executed) > 90 and len(executed) > len(lines) / 2


# Blocks of Python that show a part of a file; those of python.md and foreign-runs.md have tests of their own.
PYTHON_ELSEWHERE = {
    "adapters.md": "tests/model/test_adapters.py",
    "review.md": "tests/diagnose/review/test_review.py",
    "serve.md": "tests/serve/test_api.py",
    "python.md": "tests/docs/test_python.py",
    "foreign-runs.md": "tests/docs/test_foreign_runs.py",
}


def run_python(page: str, **given: Any) -> dict[str, Any]:
    variables: dict[str, Any] = dict(given)
    for body in blocks(ROOT / "docs" / page, "python"):
        exec(compile(body, page, "exec"), variables)
    return variables


class TestPython:
    def test_every_page_has_its_test(self) -> None:
        pages = {page.name for page in PAGES if blocks(page, "python")}
        source = Path(__file__).read_text()
        assert PYTHON_ELSEWHERE.keys() <= pages
        assert all((ROOT / test).is_file() for test in PYTHON_ELSEWHERE.values())
        assert {page for page in pages if f'run_python("{page}"' not in source} == PYTHON_ELSEWHERE.keys()

    def test_an_objective(self) -> None:
        objective = run_python("classify.md")["Confident"]
        assert objective.judged.bad == "low" and objective.counts(None, SimpleNamespace(count=3)) == {"penalty": 3}

    def test_a_loss_of_pairs(self) -> None:
        squared = run_python("preferences.md")["squared"]
        assert squared(SimpleNamespace(difference=4.0), SimpleNamespace(beta_value=0.5)) == 1.0

    def test_an_environment(self) -> None:
        calculator = run_python("reinforcement.md")["Calculator"]()
        assert calculator.reset("What is 2 + 3?", "5") is None
        assert calculator.step("CALC: 2 + 3") == ([{"role": "tool", "content": "5"}], 0.1, False)
        assert calculator.step("5 ") == ("", 1.0, True)

    def test_a_reward(self) -> None:
        assert run_python("rewards.md")["short"](["a b c", "a"], None, max_words=[2, 2]) == [0.0, 1.0]

    @pytest.mark.slow
    def test_runs(self, runs: Path, enter: Callable[[Path], None], capsys: pytest.CaptureFixture[str]) -> None:
        enter(runs)
        run_python("guide.md")
        assert capsys.readouterr().out.splitlines()[-1].startswith("29 ")
        run_python("models.md")
        assert capsys.readouterr().out
        scores = run_python("reward-models.md")["model"].score_with_std(["What is 2+2?"], ["4"])
        assert len(scores) == 1 and scores[0][1] >= 0

    @pytest.mark.slow
    def test_a_dataset_of_python(self, runs: Path, enter: Callable[[Path], None]) -> None:
        enter(runs)
        spec = Path("run.yaml").read_text().replace('"text": "data/"', '"mine": {"path": "python"}')
        tokenizer = next(Path("runs").glob("*/tokenizer.json"))  # rows from Python train none
        Path("run.yaml").write_text(
            spec.replace('"vocab": 300', f'"path": "{tokenizer}"').replace("{", '{"name": "mine",', 1)
        )
        run_python("data.md", my_dataset=[f"the anvil {i} and the hammer" for i in range(300)])

    @pytest.mark.slow
    def test_files_of_another_framework(
        self, runs: Path, enter: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        enter(runs)
        run_python("emit.md")
        assert "accelerate launch" in capsys.readouterr().out and (Path("out") / "train.py").exists()
