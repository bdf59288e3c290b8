"""The command line as a user meets it: help with examples, exit codes, messages on standard error and no traceback."""

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import bessemer
from bessemer.cli import main
from bessemer.errors import UserError
from bessemer.run.directory import RunWriter

from .conftest import Call

GOOD = "model: 10M\ndata:\n  sources:\n    web: data/\n"
DATA_VERBS = (
    "prepare", "publish", "teacher", "verify", "report", "check", "classifier", "perplexity", "audit", "extend",
)  # fmt: skip
ALIGN_VERBS = ("score", "best", "critique", "measure", "audit", "redteam", "vote", "tally")
CHECKPOINT_VERBS = (
    "list", "verify", "diff", "prune", "restore", "tag", "lineage", "import", "average", "pack", "unpack",
)  # fmt: skip
LAUNCH_VERBS = ("submit", "status", "logs", "cancel", "queue")
INSPECT_VERBS = ("lr", "gradients", "landscape", "histograms", "noise", "nan", "transfer", "warmup")
VERBS = (
    "plan run", "plan interview", "plan search", "plan simulate", "plan serve", "plan memory", "plan job", "plan check",
    "train", "runs list", "runs metrics", "replay", "chaos", "generate", "evaluate model", "evaluate compare",
    "export", "compress", "report", "model show", "bench", "watch page", "watch export", "watch forward", "control",
    "bench scaling", "bench optimise", "bench serve", "serve", "new", "demo", "mcp", "assist install", "diagnose",
    "doctor", "review", "sweep", "plan forecast", "plan ramp",
    "spec check", "spec show", "spec schema",
    *(f"data {verb}" for verb in DATA_VERBS), *(f"checkpoints {verb}" for verb in CHECKPOINT_VERBS),
    *(f"inspect {verb}" for verb in INSPECT_VERBS), *(f"launch {verb}" for verb in LAUNCH_VERBS),
    *(f"align {verb}" for verb in ALIGN_VERBS),
)  # fmt: skip


def test_help_names_every_verb(call: Call) -> None:
    said = call("--help")
    assert said.code == 0 and said.err == ""
    for verb in VERBS:
        assert f"\n  {verb.split()[0]} " in said.out


def test_every_verb_is_in_one_section_of_the_help() -> None:
    listed = [name for names in main.SECTIONS.values() for name in names]
    assert sorted(listed) == sorted({verb.split()[0] for verb in VERBS})


@pytest.mark.parametrize("group", sorted({"align probe", "evaluate judge", *(v.split()[0] for v in VERBS if " " in v)}))
def test_help_of_a_group_has_an_example(group: str) -> None:
    text = CliRunner().invoke(main.app, [*group.split(), "--help"]).output
    assert f"Example: bessemer {group.split()[0]}" in text or "\nExamples:\n" in text


def test_help_names_values_as_the_documentation_does() -> None:
    text = CliRunner().invoke(main.app, ["train", "--help"]).output
    assert "\n  SPEC " in text and "--set TEXT" in text and "--profile-steps N" in text
    assert not re.search(r"--\S+ <", text)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_an_example_that_is_parsed(verb: str) -> None:
    result = CliRunner().invoke(main.app, [*verb.split(), "--help"])
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    short = {
        "plan run": "plan",
        "runs list": "runs",
        "evaluate model": "evaluate",
        "watch page": "watch",
    }  # the default of a group
    assert f"Example: bessemer {short.get(verb, verb)}" in text


def test_every_verb_is_in_the_list_above() -> None:
    commands = {command.name for command in main.app.registered_commands}
    groups = {
        f"{group.name} {command.name or command.callback.__name__}"
        for group in main.app.registered_groups
        for command in group.typer_instance.registered_commands
    }
    alone = {  # a group that does something by itself too
        group.name for group in main.app.registered_groups
        if (own := group.typer_instance.registered_callback) and own.invoke_without_command is True
    }  # fmt: skip
    assert commands | groups | alone == set(VERBS)


@pytest.mark.parametrize("verb", ["sycophancy", "truthful"])
def test_help_of_a_probe_has_an_example(verb: str) -> None:
    result = CliRunner().invoke(main.app, ["align", "probe", verb, "--help"])
    assert result.exit_code == 0 and f"Example: bessemer align probe {verb}" in " ".join(result.output.split())


def test_version(call: Call) -> None:
    said = call("--version")
    assert (said.code, said.out) == (0, f"bessemer {bessemer.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("spec",),
        ("spec", "chek"),
        ("data",),
        ("data", "prepare"),
        ("data", "perplexity", "out"),
        ("train",),
        ("runs", "--nope"),
        ("replay", "x"),
        ("chaos",),
        ("chaos", "spec.yaml", "--count", "0"),
        ("inspect", "lr"),
        ("checkpoints", "tag", "run"),
        ("--nope",),
    ],
)
def test_a_call_that_cannot_be_parsed_shows_the_usage(call: Call, arguments: tuple[str, ...]) -> None:
    said = call(*arguments)
    assert said.code == 2 and "Usage: bessemer" in said.err + said.out


def test_a_good_spec(call: Call) -> None:
    Path("my-run.yaml").write_text(GOOD)
    said = call("spec", "check", "my-run.yaml", "--set", "seed=5", "--set", "data.sources={code: my-run.yaml}")
    assert (said.code, said.out, said.err) == (0, "my-run.yaml: fine (run my-run)\n", "")


def test_a_spec_in_full_is_a_spec_again(call: Call) -> None:
    Path("my-run.yaml").write_text(GOOD)
    shown = call("spec", "show", "my-run.yaml", "--set", "optimizer.lr=1e-4", "--set", "model.layers=3")
    assert shown.code == 0
    model = yaml.safe_load(shown.out)["model"]
    assert (model["preset"], model["layers"]) == ("10M", 3)
    Path("full.yaml").write_text(shown.out)
    again = call("spec", "show", "full.yaml")
    assert again.out == shown.out


def test_five_mistakes_are_five_lines_on_standard_error(call: Call) -> None:
    Path("bad.yaml").write_text(
        "modle: 10M\nseed: x\ndata: {sources: {web: data/}, context: 1}\nlr: 1\nbudget: {steps: 5, epochs: 1}\n"
    )
    said = call("spec", "check", "bad.yaml")
    assert said.code == 2 and said.out == ""
    assert [line.split(": ")[:2] for line in said.err.splitlines()] == [
        ["bad.yaml:1", "modle"],
        ["bad.yaml:2", "seed"],
        ["bad.yaml:3", "data.context"],
        ["bad.yaml:4", "lr"],
        ["bad.yaml:5", "budget.epochs"],
    ]
    assert call("train", "bad.yaml").err == said.err
    assert call("spec", "show", "bad.yaml").err == said.err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "spec.yaml: no such file"),
        ("", "spec.yaml: data: missing; write data:"),
        ("a: [", "spec.yaml:1: not YAML"),
        ("- 1", "spec.yaml:1: a spec is a mapping of keys"),
        (b"\x7fELF\xff\x00", "spec.yaml: not UTF-8 text"),
        (b"PK\x03\x04", "spec.yaml:1: not text"),
        ("folder", "spec.yaml: is a folder; pass the YAML file of a spec"),
    ],
)
def test_a_file_that_is_no_spec(call: Call, content: str | bytes | None, told: str) -> None:
    if content == "folder":
        Path("spec.yaml").mkdir()
    elif content is not None:
        Path("spec.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    for verb in (("spec", "check"), ("spec", "show"), ("train",)):
        said = call(*verb, "spec.yaml")
        assert said.code == 2 and said.out == ""
        assert said.err.startswith(told)


def test_a_setting_without_its_equals_sign(call: Call) -> None:
    Path("my-run.yaml").write_text(GOOD)
    said = call("spec", "check", "my-run.yaml", "--set", "seed")
    assert (said.code, said.err) == (2, "--set seed: write it as key=value, such as --set optimizer.lr=3e-4\n")


def test_a_fault_that_does_not_exist_is_refused_before_anything_runs(call: Call) -> None:
    Path("my-run.yaml").write_text(GOOD)
    said = call("chaos", "my-run.yaml", "--faults", "poison,earthquake")
    assert said.code == 2 and said.out == ""
    assert said.err.startswith("--faults 'earthquake': there is no such fault; there are poison-random")
    assert said.err.count("\n") == 1 and not Path("runs").exists()


def test_the_schema_is_json(call: Call) -> None:
    said = call("spec", "schema")
    assert said.code == 0
    assert json.loads(said.out)["title"] == "RunSpec"


def test_no_folder_of_runs(call: Call) -> None:
    said = call("runs")
    assert (said.code, said.out) == (2, "")
    assert said.err == "runs: no such folder; runs are written to ./runs unless the spec says otherwise\n"
    Path("file").write_text("")
    assert call("runs", "file").err.startswith("file: is a file, not a folder")


def test_an_empty_folder_of_runs(call: Call) -> None:
    Path("runs").mkdir()
    said = call("runs")
    assert said.code == 0 and said.out.startswith("no runs in runs; start one with")
    assert call("runs", "--json").out == "[]\n"


def test_runs_good_and_damaged(call: Call) -> None:
    with RunWriter("runs/good") as run:
        run.event("started", total_steps=2000)
        run.step({"step": 1233, "loss": 2.5})
        run.validation({"step": 1000, "loss": math.nan})
        run.event("failed", reason="[/red] disk [full]")
    RunWriter("runs/empty").close()
    Path("runs/broken/events.jsonl").mkdir(parents=True)
    said = call("runs")
    assert said.code == 0 and said.err == ""
    lines = {line.split()[0]: line for line in said.out.splitlines()}
    assert lines["good"].split()[1:5] == ["failed", "1,234/2,000", "2.500", "nan"]
    assert lines["good"].rstrip().endswith("[/red] disk [full]")
    assert len(said.out.splitlines()) == 4 and all(line == line.rstrip() for line in said.out.splitlines())
    assert lines["empty"].split()[1:5] == ["new", "-", "-", "-"]
    assert "unreadable" in lines["broken"]
    found = {run["name"]: run for run in json.loads(call("runs", "--json").out, parse_constant=pytest.fail)}
    assert found.keys() == {"good", "empty", "broken"}
    assert (found["good"]["step"], found["good"]["validation_loss"]) == (1234, "nan")
    alone = json.loads(call("runs", "runs/good", "--json").out)
    assert [run["name"] for run in alone] == ["good"]


def test_a_budget_below_the_steps_done_is_not_shown_as_their_total(call: Call) -> None:
    with RunWriter("runs/shorter") as run:
        run.event("started", total_steps=391)
        run.step({"step": 390, "loss": 2.5})
        run.event("finished", total_steps=98)
    assert call("runs").out.splitlines()[1].split()[:3] == ["shorter", "finished", "391"]


@pytest.mark.parametrize("verb", [("replay", "--step", "1"), ("generate",)])
def test_a_folder_that_is_no_run(call: Call, verb: tuple[str, ...]) -> None:
    said = call(verb[0], ".", *verb[1:])
    assert said.code == 2 and said.err.startswith(".: not a run (no events.jsonl)")


def test_a_users_mistake_is_told_without_a_traceback(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise UserError("first line\nsecond line \udcff")

    monkeypatch.setattr(main, "app", refuse)
    said = call()
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("first line\nsecond line ")


def test_ctrl_c_is_130(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    Path("runs").mkdir()
    monkeypatch.setattr("bessemer.run.directory.list_runs", interrupted)
    assert call("runs").code == 130


def test_a_fault_of_ours_is_not_hidden(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("ours")

    Path("runs").mkdir()
    monkeypatch.setattr("bessemer.run.directory.list_runs", broken)
    with pytest.raises(ZeroDivisionError):
        call("runs")


def in_a_process(
    *arguments: str | bytes, cwd: Path, shell: str = "", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """`shell` is what a shell puts behind the command, such as a redirection."""
    command = [sys.executable, "-m", "bessemer", *arguments]
    if shell:
        command = ["bash", "-c", f'"$@" {shell}', "-", *command]
    source = str(Path(bessemer.__file__).parents[1])  # this very package, wherever the process starts
    return subprocess.run(
        command, cwd=cwd, capture_output=True, env={**os.environ, "PYTHONPATH": source, **environment}
    )


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", [("runs", "."), ("spec", "schema"), ("--help",)])  # rich, print, typer
def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path, verb: tuple[str, ...], unbuffered: str) -> None:
    RunWriter(tmp_path / "good").close()
    done = in_a_process(*verb, cwd=tmp_path, shell=">/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr) == (1, b"the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    "shell", [">&-", "| true", *(pytest.param(how, marks=pytest.mark.slow) for how in (">&- 2>&-", "<&-"))]
)
def test_an_output_that_is_closed_is_no_fault(tmp_path: Path, shell: str) -> None:
    done = in_a_process("spec", "schema", cwd=tmp_path, shell=f"{shell}; exit ${{PIPESTATUS[0]}}")
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_is_one_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a/plan.json")

    Path("runs").mkdir()
    monkeypatch.setattr("bessemer.run.directory.list_runs", full)
    said = call("runs")
    assert said.code == 1 and said.err.startswith("runs/a/plan.json: No space left on device; free some space")


def test_a_real_process_with_a_file_name_that_is_no_text(tmp_path: Path) -> None:
    name = b"b\xffd.yaml"
    (tmp_path / os.fsdecode(name)).write_text(GOOD)
    done = in_a_process("spec", "check", name, "--skip-paths", cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(rb"b\udcffd.yaml: fine")
    done = in_a_process("spec", "check", b"n\xffne.yaml", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(rb"n\udcffne.yaml: no such file")


def test_a_real_process_refuses_a_bad_spec(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model: 11M\ndata: 5\n")
    done = in_a_process("train", "bad.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert [line.split(b": ")[:2] for line in done.stderr.splitlines()] == [
        [b"bad.yaml:1", b"model.preset"],
        [b"bad.yaml:2", b"data"],
    ]


def test_a_refused_layout_starts_no_process(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.cli.train.start_processes", lambda count: pytest.fail("started"))
    Path("run.yaml").write_text(GOOD + "parallel: {device: cpu, pp: 64}\n")
    said = call("train", "run.yaml")
    assert said.code == 2 and said.err.count("\n") == 1 and said.err.startswith("parallel.pp: 64 stages need as many")
    assert not Path("runs").exists()


def test_more_processes_than_a_cpu_can_run_are_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.cli.train.start_processes", lambda count: pytest.fail("started"))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    Path("run.yaml").write_text(GOOD + "parallel: {device: cpu, dp_replicate: 64}\n")
    said = call("train", "run.yaml")
    assert said.code == 2 and said.err.startswith("parallel: needs 64 processes") and "enough for 8" in said.err
    assert not Path("runs").exists()


def test_help_cuts_no_sentence(call: Call) -> None:
    for group in ("", "data", "checkpoints", "inspect", "launch", "plan", "spec", "bench", "model"):
        text = call(*group.split(), "--help").out
        commands = text[text.index("\nCommands:" if group else "\nStart:") :]
        assert re.search(r"[\w,]\.\.\.", commands) is None, commands
    assert "newest first." in " ".join(call("--help").out.split())


COMPLETE = {"_BESSEMER_COMPLETE": "complete_bash", "COMP_WORDS": "bessemer checkpoints p", "COMP_CWORD": "2"}


def test_a_shell_completes_verbs_without_loading_torch() -> None:
    code = (
        "import atexit, sys; atexit.register(lambda: sys.stderr.write(str({'torch', 'numpy'} & set(sys.modules))))\n"
        "from bessemer.cli.main import run; run()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **COMPLETE})
    assert done.stdout.split() == ["prune", "pack"]
    assert done.stderr == "set()"


def test_ctrl_c_while_modules_are_imported_prints_nothing() -> None:
    code = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
from bessemer.__main__ import run
run()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_completion_is_installed_for_a_shell(tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "bessemer", "--install-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "bessemer" in (tmp_path / ".bashrc").read_text()


def test_warnings_of_other_packages_are_not_shown_and_ours_are_one_line() -> None:
    code = """
import logging, os, sys, warnings
from bessemer.cli.main import silence_libraries
silence_libraries()
warnings.warn("theirs")
logging.getLogger("theirs").warning("theirs too")
warnings.warn_explicit("the file is damaged", UserWarning, "ceilings.py", 1, module="bessemer.plan.hardware")
assert os.environ["TORCH_LOGS"] == "-all"
"""
    quiet = {key: value for key, value in os.environ.items() if key not in ("TORCH_LOGS", "PYTHONWARNINGS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=quiet)
    assert (done.returncode, done.stderr) == (0, "warning: the file is damaged\n")
    loud = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, env=quiet)
    assert "UserWarning: theirs" in loud.stderr


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (("--lr", "3"), "optimizer.lr=3"),
        (("--learning-rate=2e-5",), "optimizer.lr=2e-5"),
        (("--optimizer.lr", "3"), "optimizer.lr=3"),
        (("--batch",), "budget.batch=VALUE"),
        (("--seed", "1"), "seed=1"),
    ],
)
def test_a_key_of_the_spec_as_an_option_of_train_gets_its_set(call: Call, given: tuple[str, ...], key: str) -> None:
    said = call("train", "x.yaml", *given)
    assert said.code == 2 and said.err.endswith(f": write --set {key}\n") and len(said.err.splitlines()) == 1
    assert "No such option: --nonsense" in call("train", "x.yaml", "--nonsense", "3").err


def test_a_negative_number_of_tokens_is_refused(call: Call) -> None:
    said = call("generate", "runs/x", "--max-tokens", "-3")
    assert said.code == 2 and "Invalid value for '--max-tokens'" in said.err


def test_tables_in_a_pipe_are_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    from bessemer.cli.console import table_console

    table = Table("reason", box=None)
    table.add_row("word " * 200)
    table_console().print(table)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_sweep_over_an_unknown_key_is_a_mistake_of_the_spec(tmp_path: Path) -> None:
    spec = {"name": "t", "model": "1M", "data": {"sources": {"a": "a.jsonl"}}, "budget": {"steps": 20}}
    path = tmp_path / "a.yaml"
    path.write_text(json.dumps({**spec, "sweep": {"parameters": {"optimizer.lrr": [1, 2]}}}))
    result = CliRunner().invoke(main.app, ["spec", "check", str(path), "--skip-paths"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).count("did you mean lr?") == 1


def test_new_without_a_kind_lists_them() -> None:
    result = CliRunner().invoke(main.app, ["new"])
    assert isinstance(result.exception, UserError) and "sentiment, text-generation" in str(result.exception)
