"""What is exported: a native model on disk, of a run or of an import, and real tokens to compare on."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bessemer.checkpoint.manifest import verify
from bessemer.checkpoint.shelf import MODEL, Shelf
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.data.prepare import open_prepared
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.spec.shape import ModelShape, Rope
from bessemer.train.restore import find_checkpoint

ROWS, LENGTH = 2, 96  # of the comparison: every weight takes part, and a large vocabulary's logits stay small
SENTENCES = (
    "The converter was tilted, the blast turned on, and for twenty minutes the flame told the blower what was left in "
    "the iron: first silicon, then carbon, until it dropped and the steel was poured.",
    "def parse(line: str) -> dict[str, float]:\n    key, value = line.split('=', 1)\n    return {key: float(value)}\n",
    "In 1856 he read a paper in Cheltenham; by 1880, 1.3 million tons a year (3,561 a day) were made that way.",
    "Überall in Europa, à Paris comme à Kraków, 东京 и Москва, people asked: how hot is 1,600 °C?",
)


@dataclass(frozen=True)
class Native:
    """A native model on disk. `place` has its model.json and its tokenizer; weights are read when asked for."""

    place: Path
    checkpoint: Path
    shape: ModelShape
    weights: SavedTensors
    tokenizer: Tokenizer | None


def open_native(place: Path, which: str = "last") -> Native:
    """A run, or what `--to bessemer` wrote. Every file of the checkpoint is hashed first; Damaged names a bad one."""
    try:
        about = json.loads((place / "model.json").read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{place}: is neither a run nor an imported model (no model.json in it)") from None
    if (place / "events.jsonl").exists():
        checkpoint = find_checkpoint(Run.existing(place), which)
    else:
        found = {path.name: path for path, _ in Shelf(place).committed("model")}
        if not found or which not in {"last", "best", *found}:
            raise UserError(f"{place}: no checkpoint {which!r}; there are {', '.join(found) or 'none'}")
        checkpoint = found.get(which, list(found.values())[-1])
    verify(checkpoint)
    file = place / "tokenizer.json"
    tokenizer = Tokenizer.load(file, about["eos"]) if about["eos"] and file.exists() else None
    shape = _exportable(ModelShape.from_dict(about["shape"]), place)
    return Native(place, checkpoint, shape, SavedTensors(checkpoint, MODEL), tokenizer)


def _exportable(shape: ModelShape, place: Path) -> ModelShape:
    """The same network in words that other programs have: what it is good for, and NTK's stretch as its base."""
    rope = shape.rope
    settings = place / "settings.json"
    if shape.positions == "rope" and "attention" in shape.mixers and not shape.max_positions and settings.exists():
        trained = json.loads(settings.read_text())["context"]
        shape = replace(shape, max_positions=int(rope.original * rope.factor) or trained)
    if rope.scaling == "ntk":
        size = int((shape.mla.rope_dim if shape.mla else shape.head_dim) * rope.share)
        theta = rope.theta * rope.factor ** (size / (size - 2))
        shape = replace(shape, rope=Rope(theta=theta, share=rope.share, interleaved=rope.interleaved))
    return shape


def real_tokens(shape: ModelShape, tokenizer: Tokenizer | None, place: Path) -> tuple[Tensor, str]:
    """(rows, length) ids to compare on, and where they are from: held-out data of the run, sentences, or chance."""
    windows = [window for window in shape.windows if window]
    # Longer than the narrowest window, so that it is seen to close.
    length = min(max(LENGTH, min(windows, default=0) + 32), 1024, shape.max_positions or LENGTH)
    ids, origin = _held_out(place, ROWS * length), "held-out data"
    if ids is None and tokenizer is not None:
        said = [id for text in SENTENCES for id in [tokenizer.eos_id, *tokenizer.encode(text)]]
        ids, origin = torch.tensor((said * (1 + ROWS * length // len(said)))[: ROWS * length]), "sentences"
    if ids is None or int(ids.max()) >= shape.vocab:
        generator = torch.Generator().manual_seed(0)
        ids, origin = torch.randint(0, shape.vocab, (ROWS * length,), generator=generator), "random tokens"
    return ids.view(ROWS, length), origin


def _held_out(place: Path, count: int) -> Tensor | None:
    about = place / "data.json"
    if not about.exists():
        return None
    folder = Path(json.loads(about.read_text())["folder"])
    if not (folder / "prepared.json").exists():  # the caller's own datasets, or moved since
        return None
    for store in open_prepared(folder).validation.values():
        if store.tokens >= count:
            return torch.from_numpy(store.slice(0, count).astype("int64"))
    return None
