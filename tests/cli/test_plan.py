"""`bessemer plan` as a user meets it: from words, a spec, a budget or questions; files that are written; nonsense."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Call

LINE = ("plan", "--model", "7b", "--tokens", "100B", "--gpus", "8xA100-80GB")
SPEC = "model: 1B\ndata:\n  sources:\n    web: data/\nbudget: {tokens: 20B}\nparallel: {tp: 2}\n"


@pytest.fixture(autouse=True)
def nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_a_line_of_wishes(call: Call) -> None:
    said = call(*LINE)
    assert said.code == 0 and said.err == ""
    for word in (
        "6.74B parameters on 100B tokens",
        "[data sheet, established]",
        "memory  [",
        "cost    $",
        "  change  ",
    ):
        assert word in said.out


def test_a_spec_is_planned_wherever_it_stands_in_the_line(call: Call) -> None:
    Path("run.yaml").write_text(SPEC)
    first = call("plan", "run.yaml", "--gpus", "8xH100", "--json")
    last = call("plan", "--json", "--gpus", "8xH100", "--set", "seed=1", "run.yaml")
    assert first.code == last.code == 0 and json.loads(first.out) == json.loads(last.out)
    found = json.loads(first.out)
    assert found["tokens"] == 20_000_000_000 and found["best"]["layout"]["tp"] == 2
    over = json.loads(
        call("plan", "run.yaml", "--gpus=8xH100", "--tokens", "5B", "--set", "parallel.tp=1", "--json").out
    )
    assert over["tokens"] == 5_000_000_000 and over["best"]["layout"]["tp"] == 1


def test_a_spec_without_gpus_is_planned_for_this_machine(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.train import speed as this_machine

    Path("here.yaml").write_text(
        "model: {width: 32, layers: 1, heads: 2}\ntokenizer: {vocab: 512}\ndata: {sources: {web: data/}, context: 64}\n"
        "budget: {tokens: 100K}\nparallel: {device: cpu}\n"
    )
    said = call("plan", "here.yaml")
    assert said.code == 0 and "this machine (" in said.out and "tokens/s)" in said.out and "others  --gpus" in said.out
    found = json.loads(call("plan", "here.yaml", "--json").out)
    assert found["duration"]["tokens_per_s"] > 0 and found["machine"]["device"] == "cpu"
    refused = call("plan", "here.yaml", "--write", "new.yaml")
    assert refused.code == 2 and "--write: for GPUs of the catalogue: write --gpus" in refused.err
    monkeypatch.setattr(this_machine, "catalogued_gpus", lambda parallel: "2 x H100")
    said = call("plan", "here.yaml")
    assert said.code == 0 and "2 x H100" in said.out and "others  --gpus" in said.out


def test_a_written_spec_is_checked_and_planned_again(call: Call) -> None:
    said = call(*LINE, "--write", "run.yaml")
    assert said.code == 0 and said.out.endswith("written  run.yaml\n")
    assert call("spec", "check", "run.yaml", "--skip-paths").out.startswith("run.yaml: fine (run run)")
    assert "bessemer plan --model 7b" in Path("run.yaml").read_text()
    plan, again = (
        json.loads(call(*words, "--json").out) for words in (LINE, ("plan", "run.yaml", "--gpus", "8xA100-80GB"))
    )
    assert again["best"] == plan["best"] and again["wall_s"] == plan["wall_s"]
    assert (
        call(*LINE, "--write", "run.yaml").err == "--write run.yaml: the file exists: give another name, or remove it\n"
    )


def test_a_spec_written_from_a_spec_is_a_run_of_its_own(call: Call) -> None:
    Path("run.yaml").write_text(SPEC)
    assert call("plan", "run.yaml", "--gpus", "8xH100", "--write", "other.yaml").code == 0
    assert "(run other)" in call("spec", "check", "other.yaml", "--skip-paths").out


def test_json_stays_json_when_files_are_written(call: Call) -> None:
    said = call(*LINE, "--write", "run.yaml", "--json")
    assert json.loads(said.out)["parameters"] > 6e9 and said.err == "written  run.yaml\n"


@pytest.mark.parametrize(
    ("target", "options", "file", "words"),
    [
        ("slurm", (), "job.sbatch", ("--nodes=2", "8")),
        ("kubernetes", ("--image", "image:1", "--volume", "claim"), "pytorchjob.yaml", ("image:1", "claim")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (
                    "sky",
                    ("--install", "bessemer", "--volume", "s3://bucket"),
                    "sky.yaml",
                    ("num_nodes: 2", "A100-80GB:8"),
                ),
                ("modal", ("--install", "bessemer"), "modal_app.py", ("A100-80GB:8",)),
            )
        ),
        ("ssh", ("--hosts", "one,two"), "launch.sh", ("one", "two")),
    ],
)
def test_job_files_of_a_planned_spec(
    call: Call, target: str, options: tuple[str, ...], file: str, words: tuple[str, ...]
) -> None:
    assert call("plan", "--model", "7b", "--gpus", "16xA100-80GB", "--write", "big.yaml").code == 0
    said = call("plan", "job", "big.yaml", "--gpus", "16xA100-80GB", "--on", target, *options)
    assert said.code == 0, said.err
    text = (Path("runs/big/launch") / file).read_text()
    assert all(word in text for word in words)
    assert "start    " in said.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("pbs",), "--on pbs: write one of slurm"),
        (("kubernetes",), "--on kubernetes needs --image"),
        (("ssh", "--hosts", "one,two"), "lists 2 machines, but the plan has 1"),
        (("slurm", "--volume", "x"), "--volume: slurm has no such option"),
    ],
)
def test_job_files_that_cannot_be(call: Call, options: tuple[str, ...], words: str) -> None:
    Path("run.yaml").write_text(SPEC)
    said = call("plan", "job", "run.yaml", "--gpus", "8xH100", "--on", *options)
    assert said.code == 2 and words in said.err and said.err.count("\n") == 1
    assert not Path("runs").exists()


def test_a_budget_and_a_deadline(call: Call) -> None:
    said = call("plan", "search", "--model", "1b", "--tokens", "20B", "--budget", "500usd", "--deadline", "30d")
    assert said.code == 0 and said.out.startswith("within $500 and 30 days, cheapest first:")
    found = json.loads(call("plan", "search", "--budget", "500usd", "--json").out)
    assert 0 < found["offers"][0]["usd"] <= 500 and found["parameters"] > 5e8
    assert found["limits"] == {"budget_usd": 500.0, "deadline_days": 30.0}


def test_serving(call: Call) -> None:
    line = ("plan", "serve", "--model", "7b", "--rps", "10", "--ttft", "500ms", "--tpot", "50ms")
    said = call(*line)
    assert said.code == 0 and "a million tokens" in said.out and "setting  tensor_parallel_size" in said.out
    best = json.loads(call(*line, "--gpus", "A100-80GB", "--json").out)["best"]
    assert best["gpu"] == "A100-80GB" and best["tpot_s"] <= 0.05 and best["ttft_s"] <= 0.5
    answered = 10 * 3600 * 250 / 1e6  # millions of output tokens an hour
    assert best["usd_per_million_output"] == pytest.approx(best["usd_hour"] / answered)
    said = call(*line, "--emit", "vllm")
    assert said.code == 0 and "written  vllm.yaml" in said.out
    assert "\nmax-model-len: 2048\n" in Path("vllm.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "write --model and --gpus, such as: bessemer plan"),
        (("--model", "7b"), "write --model and --gpus"),
        (("--model", "7b", "--gpus", "8xA100", "--tokens", "-5"), "--tokens -5: expected a number of tokens such as"),
        (("--model", "7b", "--gpus", "8xA1000"), "not in the catalogue: write A100-80GB"),
        (("search", "--model", "7b", "--budget", "0usd"), "--budget 0usd: write dollars above 0"),
        (("search", "--model", "7b"), "write --budget, such as 5000usd"),
        (("search", "--deadline", "3d"), "write --model or --budget too"),
        (("--model", "7b", "--gpus", "8xA100", "--set", "parallel.tp=3"), "parallel.tp: 3 does not divide 32 heads"),
        (("--model", "7b", "--gpus", "8xA100", "--set", "parallel.tp=0"), "parallel.tp"),
        (("--model", "7b", "--gpus", "8xA100", "--set", "precision=bf17"), "did you mean bf16?"),
        (("--model", "7b", "--gpus", "8xA100", "--set", "data.context=1"), "data.context"),
        (("--model", "7b", "--gpus", "8xA100", "--tokens-per-second", "1.2M"), "6.1 PFLOP/s each"),
        (("--model", "7b", "--gpus", "8xA100", "--tokens-per-second", "55K"), "nearest: --tokens-per-second"),
        (("none.yaml", "--gpus", "8xA100"), "none.yaml: no such file"),
        (("serve", "--model", "7b", "--rps", "10", "--ttft", "0ms"), "--ttft 0ms: write a time above 0"),
        (("serve", "--model", "70b", "--rps", "1", "--tpot", "1ms"), "write --tpot"),
        (("serve", "--model", "7b", "--rps", "1", "--emit", "ollama"), "--emit ollama: write vllm, tensorrt-llm"),
    ],
    ids=str,
)
def test_nonsense_is_one_line_and_the_fix(call: Call, arguments: tuple[str, ...], words: str) -> None:
    said = call("plan", *arguments)
    assert (said.code, said.out) == (2, "")
    assert words in said.err and said.err.count("\n") == 1


def test_questions_on_a_terminal(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter(["1B", "20B", "1xH200"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda question, default: next(given))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    said = call("plan")
    assert said.code == 0 and "1.24B parameters on 20B tokens, 1 x H200" in said.out


def test_no_plan_loads_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom bessemer.cli.main import app\n"
        "for line in (['--model', '1b', '--gpus', '8xH100'], ['search', '--budget', '100usd'],\n"
        "             ['serve', '--model', '7b', '--rps', '1']):\n"
        "    app(['plan', *line], standalone_mode=False)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_lists_every_command_with_an_example(call: Call) -> None:
    text = call("plan", "--help").out
    for command in ("run", "search", "simulate", "serve", "memory", "job", "interview", "check"):
        assert f"\n  {command} " in text
        assert f"bessemer plan {command}" in text
