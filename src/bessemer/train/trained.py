"""Loads a trained model from a run, an import or a Hugging Face folder, for generation, evaluation and serving."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import torch

from bessemer.checkpoint.lineage import read_tags
from bessemer.checkpoint.manifest import DamagedCheckpoint
from bessemer.checkpoint.store import CheckpointStore
from bessemer.data.tokenizer.tokenizer import PromptFormat, Tokenizer, end_token, hf_prompt_format, native_prompt_format
from bessemer.errors import UserError
from bessemer.model.families.folder import HfFolder, find_origin, load_weights
from bessemer.model.families.registry import read_shape
from bessemer.model.generate import Sampling, generate
from bessemer.model.transformer import Decoder, make_module
from bessemer.run.directory import Run
from bessemer.spec.schema import ParallelSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import pick_device


def find_checkpoint(run: Run, which: str) -> Path:
    """`last`, `best` or a checkpoint's name."""
    shelf = CheckpointStore(run.checkpoints)
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
    """A model in evaluation mode and its tokenizer: from a run's checkpoint, an import (`export --to bessemer`), or a
    Hugging Face folder."""
    path = Path(folder)
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"device {device!r}: write auto, cpu, cuda or mps")
    is_run = os.path.exists(path / "events.jsonl")
    if not is_run and os.path.exists(path / "config.json") and not os.path.exists(path / "model.json"):
        target = pick_device(ParallelSpec(device=device))  # type: ignore[arg-type]
        return _load_folder(path, target)
    if is_run or not os.path.exists(path / "model.json"):
        run = Run.existing(path)
        shelf, checkpoint = CheckpointStore(run.checkpoints), find_checkpoint(run, which)
    else:
        shelf = CheckpointStore(path)
        checkpoint = _imported_checkpoint(shelf, path, which)
    target = pick_device(ParallelSpec(device=device))  # type: ignore[arg-type]
    description = json.loads((path / "model.json").read_text())
    model = _empty(ModelShape.from_dict(description["shape"]), target)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    try:
        shelf.load(checkpoint, state)
    except DamagedCheckpoint as error:
        raise UserError(f"{error}; choose another with --checkpoint") from None
    if not os.path.exists(path / "tokenizer.json"):
        raise UserError(f"{path}: has no tokenizer.json to read a prompt with")
    return model.eval(), Tokenizer.load(path / "tokenizer.json", description["eos"] or None)


def _empty(shape: ModelShape, device: torch.device) -> Decoder:
    """A model with allocated, uninitialised weights."""
    with torch.device("meta"):
        model = make_module(shape)
    model.to_empty(device=device)
    return model


def _imported_checkpoint(shelf: CheckpointStore, path: Path, which: str) -> Path:
    saved = {path.name: path for path, _ in shelf.committed("model")}
    if not saved or which not in {"last", "best", *saved}:
        raise UserError(f"{path}: no checkpoint {which!r}; there are {', '.join(saved) or 'none'}")
    return saved.get(which, list(saved.values())[-1])


def _load_folder(path: Path, device: torch.device) -> tuple[Decoder, Tokenizer]:
    """A Hugging Face folder of a native family, in float32."""
    folder = HfFolder(path)
    family, shape = read_shape(folder.config)
    model = _empty(shape, device)
    load_weights(model, folder, family)
    return model.eval(), Tokenizer.load(path, end_token(path))


def prompt_format(folder: str | Path, tokenizer: Tokenizer) -> PromptFormat:
    """The prompt format of the model that `load_trained` returns."""
    origin = find_origin(Path(folder))
    if origin is None or not origin.own_tokenizer:
        return native_prompt_format(tokenizer)
    return hf_prompt_format(origin.folder.path, tokenizer, trained_here=(Path(folder) / "events.jsonl").exists())


def stream_text(
    model: Decoder, tokenizer: Tokenizer, prompt: list[int], max_tokens: int, ends: Collection[int], sampling: Sampling
) -> Iterator[str]:
    """Generated text, piece by piece; a piece waits until its bytes are complete characters."""
    if model.shape.labels:
        raise UserError("a classifier writes no text: export it with `bessemer export --to hf` and run it there")
    new: list[int] = []
    shown = 0
    for token in generate(model, prompt, max_tokens, ends, sampling):
        new.append(token)
        text = tokenizer.decode(new, continues=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(new, continues=True)[shown:]
