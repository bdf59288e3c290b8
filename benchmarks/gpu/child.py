"""One measurement in a process of its own: a failure, a hang or a full card is an entry in the results, not the end."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def options_for(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every script here has."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    dated = HERE.parent / "results" / f"{time.strftime('%Y-%m-%d')}-gpu-{name}.json"
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), help="for the runs and their data")
    parser.add_argument("--out", type=Path, default=dated)
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one measurement")
    parser.add_argument("--commit", default="", help="to note, where there is no git")
    return parser


def add_length(parser: argparse.ArgumentParser) -> None:
    """The options of scripts that measure speed: how a run computes, and how many of its steps are taken."""
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)


class Results:
    """Measurements on their way into a dated file: what is known is written at once."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.options, self.found = options, list[dict[str, Any]]()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        self.log = options.folder / f"{options.out.stem}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        git = ["git", "rev-parse", "--short", "HEAD"] if shutil.which("git") else ["true"]
        asked = subprocess.run(git, capture_output=True, text=True, check=False)
        self.head: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"), "commit": options.commit or asked.stdout.strip() or "unknown",
            "command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "cuda": torch.version.cuda,
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "cores": os.cpu_count(),
        }  # fmt: skip

    def measure(self, note: dict[str, Any], environment: dict[str, str] | None = None, **case: Any) -> dict[str, Any]:
        """What speed.py says of a case, or its error, which goes into the file with `note`."""
        found = note | self._speed(case, environment or {})
        self.found.append(found)
        what = " ".join([*map(str, note.values()), found["system"], found["model"], *found["settings"]])
        said = found.get("error") or (
            f"{found['tokens_per_s']:,} tokens/s, MFU {found['mfu']:.1%}, peak {found['peak_gib']:.1f} GiB, "
            f"first step after {found['first_step_s']:.0f} s"
        )
        print(f"{what}: {said}", flush=True)
        self.write()
        return found

    def write(self) -> None:
        self.options.out.parent.mkdir(parents=True, exist_ok=True)
        self.options.out.write_text(json.dumps(self.head | {"results": self.found}, indent=1) + "\n")

    def conclude(self, titles: list[str], rows: list[list[str]]) -> None:
        """Write everything with a table in Markdown, and print that."""
        lines = [titles, ["---"] * len(titles), *(row + [""] * (len(titles) - len(row)) for row in rows)]
        self.head["table"] = [f"| {' | '.join(line)} |" for line in lines]
        self.write()
        print("\n".join(self.head["table"]))

    def _speed(self, case: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
        told = {"system": case["system"], "model": case["model"], "settings": case["set"]}
        command = [sys.executable, str(HERE / "speed.py"), "--folder", str(self.options.folder)]
        for key, value in case.items():
            for one in value if isinstance(value, list) else [value]:
                command += [f"--{key}", str(one)]
        with tempfile.TemporaryDirectory() as folder, self.log.open("a") as log:
            print("\n$", *command, file=log, flush=True)
            answer = Path(folder) / "answer.json"
            command += ["--json", str(answer), "--started", str(time.time())]
            child = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | environment, start_new_session=True
            )
            try:
                child.wait(self.options.timeout)
            except subprocess.TimeoutExpired:
                return told | {"error": f"not done after {self.options.timeout:.0f} s"}
            finally:  # also where this process is told to end: what is left would hold the card
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)  # its compile workers too
                    child.wait()
            return json.loads(answer.read_text()) if answer.exists() else told | {"error": f"died, see {self.log}"}
