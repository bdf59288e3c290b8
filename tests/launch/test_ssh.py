"""The SSH target over a real sshd on this machine."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bessemer
from bessemer.errors import UserError
from bessemer.launch import ssh
from bessemer.launch.job import run_client
from bessemer.launch.request import LaunchRequest
from bessemer.launch.submit import submit
from bessemer.run.directory import Run

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not SSHD or not shutil.which("ssh"), reason="no sshd: apt install openssh-server"),
]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A host that SSH reaches: this one, by a daemon and keys of the test's own."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nPidFile none\nStrictModes no\n"
        f"AuthorizedKeysFile {tmp_path}/user.pub\nUsePAM no\nPermitRootLogin prohibit-password\n"
        f"SetEnv PYTHONPATH={Path(bessemer.__file__).parents[1]}\n"
    )
    (tmp_path / "ssh_config").write_text(
        f"Host box again\n  HostName 127.0.0.1\n  Port {port}\nHost other\n  HostName 127.0.0.1\n  Port {port + 1}\n"
        f"Host *\n  User {getpass.getuser()}\n  IdentityFile {tmp_path}/user\n"
        f"  StrictHostKeyChecking no\n  UserKnownHostsFile {tmp_path}/known\n  BatchMode yes\n  LogLevel ERROR\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where the daemon drops its privileges
    monkeypatch.setenv("SSH", f"ssh -F {tmp_path}/ssh_config")
    log = (tmp_path / "sshd.log").open("w")
    daemon = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(tmp_path / "sshd_config")], stderr=log)
    try:
        for _ in range(50):
            if (
                subprocess.run(["ssh", "-F", tmp_path / "ssh_config", "box", "true"], capture_output=True).returncode
                == 0
            ):
                break
            time.sleep(0.2)
        else:
            pytest.skip(f"sshd does not let us in here: {(tmp_path / 'sshd.log').read_text()[-300:]}")
        yield "box"
    finally:
        daemon.terminate()
        daemon.wait(10)
        log.close()


def test_a_run_over_ssh_is_started_told_of_and_stopped(host: str, ask: Callable[..., LaunchRequest]) -> None:
    request = ask("ssh", hosts=(host,), gpus=0)
    budget = request.spec.budget.model_copy(update={"steps": 100_000})
    request = LaunchRequest(**{**vars(request), "spec": request.spec.model_copy(update={"budget": budget})})
    job = submit(request, lambda line: None)
    assert job is not None and job.id == host
    run = Run(request.folder.parent)
    until = time.monotonic() + 60
    while not list(run.events("started")) if run.events_path.exists() else True:
        assert time.monotonic() < until, (request.folder / f"{host}.log").read_text()
        time.sleep(0.2)
    assert [state.state for state in ssh.states(job)] == ["RUNNING"]
    with pytest.raises(UserError, match="already"):
        submit(request, lambda line: None)
    assert run_client(ssh.cancel(job)) == f"{host}: told to save and exit\n"
    until = time.monotonic() + 60
    while ssh.states(job)[0].state != "ENDED":
        assert time.monotonic() < until
        time.sleep(0.2)
    assert [event["reason"] for event in run.events("interrupted")] == ["SIGTERM"]
    assert f"{host}: " in run_client(ssh.logs(job))


@pytest.fixture
def other(host: str, tmp_path: Path) -> Iterator[str]:
    """A second machine by its hostname, which the first does not know by the name that ssh has for it."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root and unshare for a second hostname")
    text = (tmp_path / "sshd_config").read_text()
    port = int(text.split()[1])
    (tmp_path / "other_config").write_text(text.replace(f"Port {port}", f"Port {port + 1}"))
    command = f"hostname aa-other && exec {SSHD} -D -e -f {tmp_path}/other_config"
    with (tmp_path / "other.log").open("w") as log:
        daemon = subprocess.Popen(["unshare", "--uts", "sh", "-c", command], stderr=log)
        try:
            for _ in range(50):
                asked = ["ssh", "-F", tmp_path / "ssh_config", "other", "hostname"]
                if subprocess.run(asked, capture_output=True, text=True).stdout.strip() == "aa-other":
                    break
                time.sleep(0.2)
            else:
                pytest.skip(f"no second sshd: {(tmp_path / 'other.log').read_text()[-300:]}")
            yield "other"
        finally:
            daemon.terminate()
            daemon.wait(10)


def test_two_machines_that_know_no_name_of_each_other_train_together(
    host: str, other: str, ask: Callable[..., LaunchRequest]
) -> None:
    """Rank 0 is on the machine whose hostname sorts first, and that is not the one they meet at."""
    request = ask("ssh", hosts=(host, other), gpus=0)
    job = submit(request, lambda line: None)
    assert job is not None
    run, until = Run(request.folder.parent), time.monotonic() + 150
    logs = [request.folder / f"{name}.log" for name in (host, other)]
    while not run.events_path.exists() or run.state != "finished":
        assert time.monotonic() < until, "\n".join(path.read_text() for path in logs if path.exists())
        time.sleep(0.2)
    assert [record["step"] for record in run.metrics()] == list(range(600))
    assert len(next(run.events("started"))["machine"]) and (run.folder / "layout.json").exists()


def test_one_machine_under_two_names_is_refused(host: str, ask: Callable[..., LaunchRequest]) -> None:
    with pytest.raises(UserError, match="again: is the same machine as box: list each machine once in --hosts"):
        submit(ask("ssh", hosts=(host, "again"), gpus=0), lambda line: None)
