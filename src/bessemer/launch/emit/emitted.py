"""What `emit` gives back, and small helpers of the writers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from bessemer.errors import UserError


@dataclass(frozen=True)
class Emitted:
    """Files by name, relative to the folder they are meant for; the line that starts the run; what is different."""

    files: dict[str, str]
    command: str
    notes: list[str]


def write_files(emitted: Emitted, folder: str | Path) -> list[Path]:
    """Write them. What a former call wrote is replaced; a folder with weights of another run is refused."""
    folder = Path(folder)
    model, spec = folder / "model", folder / "spec.yaml"
    if model.exists() and (not spec.exists() or spec.read_text(encoding="utf-8") != emitted.files["spec.yaml"]):
        raise UserError(f"{model}: holds the first weights of another spec: delete it, or name another folder")
    written = []
    for name, text in emitted.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def script(name: str) -> str:
    """One of the training scripts, word for word."""
    return files("bessemer.launch.emit").joinpath("scripts", name).read_text(encoding="utf-8")


def comments(notes: Iterable[str]) -> str:
    """Notes for the end of a file whose comments begin with a hash."""
    return "\n# What is different from the run in Bessemer:\n" + "".join(f"# - {note}\n" for note in notes)


def first_weights(folder: Path) -> str:
    """The command that makes the folder with the first weights, before the framework is started."""
    return f"python -m bessemer.launch.emit.initial {folder}"
