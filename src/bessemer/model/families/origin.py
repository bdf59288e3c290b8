"""The Hugging Face folder that a model came from: its conventions and the files that an export gives back.

A run that starts from `model.hf` keeps copies of them in RUN/hf, so that it stays whole when the folder moves.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from bessemer.errors import UserError
from bessemer.model.families.folder import Folder, told
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec

COPIES = "hf"  # in a run's folder


@dataclass(frozen=True)
class Origin:
    """`own_tokenizer`: the model still has the folder's tokenizer, perhaps with more tokens. `copied`: the folder is
    the model's own place, not one that a run was started from."""

    folder: Folder
    own_tokenizer: bool
    copied: bool = False


def find_origin(place: Path, depth: int = 8) -> Origin | None:
    """Of a run, an import or a Hugging Face folder. None for a run from random weights, and for one made by an older
    version whose folder is gone."""
    if (place / "config.json").is_file():
        return Origin(Folder(place), True, copied=True)
    if (place / COPIES / "config.json").is_file():
        copies = Folder(place / COPIES)
        return Origin(copies, bool(copies.tokenizer_files))
    if not (place / "spec.yaml").is_file() or not depth:
        return None
    return _of_spec(load_spec(place / "spec.yaml"), depth)


def _of_spec(spec: RunSpec, depth: int = 8) -> Origin | None:
    if spec.model.hf is not None:
        try:
            folder = Folder(spec.model.hf)
        except UserError:  # moved since
            return None
        path = spec.tokenizer.path
        return Origin(folder, path is None or Path(path).resolve().parent == folder.path.resolve())
    if spec.start_from is not None:
        parents = Path(spec.start_from).parents
        places = [place for place in parents[:2] if (place / "model.json").is_file()]
        return find_origin(places[0], depth - 1) if places else None
    return None


def keep_origin(run: Path, spec: RunSpec) -> None:
    """Copy the small files of the folder that the run starts from, unless that was done before."""
    origin = None if (run / COPIES).exists() else _of_spec(spec)
    if origin is None:
        return
    with told(run / COPIES, "written"):
        partial = run / f".{COPIES}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        files = {"config.json": origin.folder.path / "config.json"}
        if origin.own_tokenizer:
            files |= origin.folder.tokenizer_files
            if origin.folder.generation_config is not None:
                files["generation_config.json"] = origin.folder.path / "generation_config.json"
        for name, path in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, partial / name)
        partial.rename(run / COPIES)
