"""`bessemer launch` as a user meets it."""

import json
import time
from pathlib import Path

import pytest

from bessemer.launch.job import LaunchJob

from .conftest import Call

SPEC = "model: 10M\ndata:\n  sources:\n    web: data/\n"


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without sbatch and the like."""
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_dry_run_prints_every_file_and_writes_nothing(call: Call) -> None:
    Path("my-run.yaml").write_text(SPEC)
    said = call("launch", "my-run.yaml", "--on", "slurm", "--nodes", "2", "--gpus", "8", "--time", "24h", "--dry-run")
    assert (said.code, said.err) == (0, "")
    for name in ("job.sbatch", "node.sh", "spec.yaml"):
        assert f"##### {Path.cwd()}/runs/my-run/launch/{name}\n" in said.out
    assert "#SBATCH --time=1-00:00:00" in said.out
    assert [path.name for path in Path().iterdir()] == ["my-run.yaml"]


@pytest.mark.usefixtures("nothing_installed")
def test_without_the_client_the_files_are_written_and_the_command_told(call: Call) -> None:
    Path("my-run.yaml").write_text(SPEC)
    said = call("launch", "my-run.yaml", "--on", "slurm", "--set", "name=other")
    assert said.code == 0
    folder = Path.cwd() / "runs" / "other" / "launch"
    assert "sbatch is not installed here. On a machine that has it, run:\n" in said.out
    assert said.out.endswith(f"  sbatch --parsable {folder}/job.sbatch\n")
    assert {path.name for path in folder.iterdir()} == {"job.sbatch", "node.sh", "spec.yaml"}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--on missing: write one of slurm, kubernetes, sky, modal, ssh, local"),
        (("--on", "kubernetes"), "--on kubernetes needs --image IMAGE"),
        (("--on", "ssh", "--hosts", "a", "--qos", "x"), "--qos: ssh has no such option; it is for slurm"),
        (
            ("--on", "slurm", "--partition", "x\n#SBATCH --evil"),
            "--partition 'x\\n#SBATCH --evil': contains a line break",
        ),
        (("--on", "slurm", "--gpus", "8", "--set", "parallel.dp_shard=5"), "parallel: dp_shard 5 needs 5 processes"),
        (("--on", "local", "--gpus", "99"), "--gpus 99: this machine has "),
    ],
)
def test_a_mistake_is_one_line(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    monkeypatch.setenv("BESSEMER_QUEUE", str(tmp_path / "queue"))
    Path("my-run.yaml").write_text(SPEC)
    said = call("launch", "my-run.yaml", *arguments)
    assert said.code == 2 and said.err.startswith(told) and said.err.count("\n") == 1


def test_a_secret_is_refused_by_file_and_line_and_nothing_written(call: Call) -> None:
    token = "hf_" + "aB3dE5gH7j" * 4
    Path("my-run.yaml").write_text(SPEC.replace("data/", f"https://host/{token}"))
    said = call("launch", "my-run.yaml", "--on", "slurm")
    assert said.code == 2 and "spec.yaml:" in said.err and "a Hugging Face token" in said.err
    assert token not in said.err and not Path("runs").exists()


def test_nothing_was_launched(call: Call) -> None:
    assert call("launch", "status").out == "no launched runs under runs\n"
    said = call("launch", "cancel", "my-run")
    assert said.code == 2 and said.err.startswith("my-run: nothing was launched under runs/my-run")


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("on", "client"), [("slurm", "squeue"), ("kubernetes", "kubectl"), ("sky", "sky"), ("modal", "modal")]
)
def test_a_missing_client_is_named_with_the_command_to_run(call: Call, on: str, client: str) -> None:
    folder = Path("runs/my-run/launch")
    folder.mkdir(parents=True)
    LaunchJob(on, "my-run", "42", str(folder.absolute()), time.time(), 1, 8).save()
    said = call("launch", "status", "my-run")
    assert said.code == 2 and said.err.startswith(
        f"{client} is not installed here; on a machine that has it, run: {client} "
    )
    listed = json.loads(call("launch", "status", "--json").out)  # one that cannot be asked does not hide the others
    assert [(row["name"], row["on"], row["state"]) for row in listed] == [("my-run", on, "?")]


def test_a_record_that_cannot_be_read_is_named(call: Call) -> None:
    path = Path("runs/my-run/launch/job.json")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    said = call("launch", "status", "my-run")
    assert said.code == 2 and said.err.startswith("runs/my-run/launch/job.json: not a readable job record")


def test_an_empty_queue(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BESSEMER_QUEUE", str(tmp_path / "queue"))
    assert call("launch", "queue").out.startswith("the queue is empty")
    assert call("launch", "queue", "--json").out == "[]\n"
