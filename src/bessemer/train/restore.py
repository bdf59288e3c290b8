"""A trained model out of a run's directory, for generation and whatever comes after training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from bessemer.checkpoint.lineage import read_tags
from bessemer.checkpoint.manifest import Damaged
from bessemer.checkpoint.shelf import Shelf
from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.model.generate import Sampling, generate
from bessemer.model.transformer import Decoder, network
from bessemer.run.directory import Run
from bessemer.spec.parallel import ParallelSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import pick_device


def find_checkpoint(run: Run, which: str) -> Path:
    """`last`, `best` or a checkpoint's name."""
    shelf = Shelf(run.checkpoints)
    which = read_tags(run.checkpoints).get(which, which)
    names = {path.name: path for path, _ in shelf.committed()}
    if not names:
        raise UserError(f"{run.folder}: no checkpoint yet; train it first")
    if which == "last":
        return list(names.values())[-1]
    if which == "best":
        best = shelf.best()
        if best is None:
            raise UserError(f"{run.folder}: no checkpoint has a validation loss; use last")
        return best
    names |= {path.name: path for path, _ in shelf.committed("model")}
    if which not in names:
        raise UserError(f"{run.folder}: no checkpoint {which!r}; there are last, best, {', '.join(names)}")
    return names[which]


def load_trained(folder: str | Path, which: str = "last", device: str = "auto") -> tuple[Decoder, Tokenizer]:
    """The model of a checkpoint in evaluation mode, and the tokenizer it was trained with."""
    run = Run.existing(folder)
    checkpoint = find_checkpoint(run, which)
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"device {device!r}: write auto, cpu, cuda or mps")
    target = pick_device(ParallelSpec(device=device))  # type: ignore[arg-type]
    about = json.loads((run.folder / "model.json").read_text())
    shape = ModelShape.from_dict(about["shape"])
    with torch.device("meta"):
        model = network(shape)
    model.to_empty(device=target)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    try:
        Shelf(run.checkpoints).load(checkpoint, state)
    except Damaged as error:
        raise UserError(f"{error}; choose another with --checkpoint") from None
    return model.eval(), Tokenizer.load(run.folder / "tokenizer.json", about["eos"])


def stream_text(
    model: Decoder, tokenizer: Tokenizer, prompt: str, max_tokens: int, sampling: Sampling
) -> Iterator[str]:
    """New text, piece by piece; a piece waits until its bytes are whole characters."""
    ids = [tokenizer.eos_id, *tokenizer.encode(prompt)]
    new: list[int] = []
    said = 0
    for token in generate(model, ids, max_tokens, tokenizer.eos_id, sampling):
        new.append(token)
        text = tokenizer.decode(new, continues=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[said:]
            said = len(text)
    yield tokenizer.decode(new, continues=True)[said:]
