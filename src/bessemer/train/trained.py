"""Loads a trained model from a run, an import or a Hugging Face folder, for generation, evaluation and serving."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.checkpoint.base import CheckpointWeights
from bessemer.checkpoint.lineage import read_tags
from bessemer.checkpoint.manifest import DamagedCheckpoint
from bessemer.checkpoint.store import MODEL, CheckpointStore
from bessemer.data.prepare import chat_template
from bessemer.data.tokenizer.chat import Message, message_text, prompt_ids, read_template, turn_end_ids
from bessemer.data.tokenizer.tokenizer import PromptFormat, Tokenizer, end_token, hf_prompt_format, native_prompt_format
from bessemer.errors import UserError
from bessemer.model.adapters import MergedWeights, merge
from bessemer.model.classifier import read_model
from bessemer.model.families.adapter import AdapterFolder, VirtualFolder, is_virtual, read_adapter
from bessemer.model.families.compressed_tensors import open_folder
from bessemer.model.families.folder import HfFolder, find_origin, load_weights
from bessemer.model.families.registry import needs_wrap
from bessemer.model.generate import Generator, Request, Sampling
from bessemer.model.generate.speculate import Drafter
from bessemer.model.transformer import Decoder, make_module
from bessemer.model.virtual_tokens import VIRTUAL, load_virtual
from bessemer.model.wrapped import wrap
from bessemer.run.directory import Run
from bessemer.spec.adapter import ADAPTER_CONFIG
from bessemer.spec.load import load_spec
from bessemer.spec.rl import RL_OBJECTIVES
from bessemer.spec.schema import ParallelSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import pick_device


def find_checkpoint(run: Run, which: str) -> Path:
    """`last`, `best` or a checkpoint's name."""
    store = CheckpointStore(run.checkpoints)
    which = read_tags(run.checkpoints).get(which, which)
    names = {path.name: path for path, _ in store.committed()}
    if not names:
        raise UserError(f"{run.folder}: no checkpoint yet; train it first")
    if which == "last":
        return list(names.values())[-1]
    if which == "best":
        best = store.best()
        if best is None:
            raise UserError(f"{run.folder}: no checkpoint has a validation loss; use last")
        return best
    names |= {path.name: path for path, _ in store.committed("model")}
    if which not in names:
        raise UserError(f"{run.folder}: no checkpoint {which!r}; there are last, best, {', '.join(names)}")
    return names[which]


class ReadsText:
    """How a model reads prompts and ends answers. `template` is of conversations: a built-in name or Jinja source; None
    if the model knows none."""

    tokenizer: Tokenizer
    format: PromptFormat
    template: str | None

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer: those of the model's files, and the end of a turn of its chat template."""
        ends = turn_end_ids(self.template, self.tokenizer) if self.template else frozenset()
        return self.format.ends | ends

    def prompt(self, text: str, parse_special: bool = False) -> list[int]:
        """Ids of a text to continue."""
        _check_encodable(text)
        return self.format.encode(self.tokenizer, text, parse_special)

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation that the assistant is to continue."""
        if self.template is None:
            raise UserError("the model has no chat template: it was trained on plain text; name one with --template")
        for message in messages:
            _check_encodable(message_text(message))
        ids = prompt_ids(messages, self.tokenizer, self.template)
        prefix = list(self.format.prefix if self.template == "none" else self.format.chat_prefix)
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer."""
        return self.tokenizer.decode(ids, continues=True)


@dataclass(frozen=True)
class TextReader(ReadsText):
    """Encodes prompts and decodes answers of a model that is elsewhere."""

    tokenizer: Tokenizer
    format: PromptFormat
    template: str | None = None


@dataclass(frozen=True)
class LoadedModel(ReadsText):
    """A model in evaluation mode with everything that is needed to talk to it."""

    model: Decoder
    tokenizer: Tokenizer
    format: PromptFormat
    template: str | None = None
    context: int | None = None  # most tokens of a prompt; None for any number

    def check_length(self, ids: Sequence[int], name: str = "the prompt") -> None:
        """Refuse a prompt that is longer than what the model was made to read."""
        if self.context is not None and len(ids) > self.context:
            raise UserError(f"{name} has {len(ids):,} tokens and the model's context is {self.context:,}: shorten it")

    def generator(
        self, slots: int = 1, max_length: int | None = None, drafter: Drafter | None = None, compiled: bool = False
    ) -> Generator:
        """For many requests. On a GPU the weights are converted to bfloat16, in which the fast kernels compute."""
        shape = self.model.shape
        if shape.labels:
            raise UserError("a classifier writes no text: export it with `bessemer export --to hf` and run it there")
        if not shape.causal and not shape.decoder_layers:
            raise UserError("a model that attends to both sides writes no text: give one that predicts the next token")
        if self.model.head_weight.device.type == "cuda":
            self.model.to(torch.bfloat16)
        return Generator(self.model, slots, max_length, self.decode, drafter, compiled)

    def stream(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling, stop: Sequence[str] = ()
    ) -> Iterator[str]:
        """Text that continues one prompt, in pieces of complete characters, up to a stop string."""
        self.check_length(prompt)
        generator = self.generator(1, len(prompt) + max_tokens)
        return generator.stream(Request(prompt, max_tokens, sampling, self.stop_ids, tuple(stop)))


def _check_encodable(text: str) -> None:
    """Refuse a prompt with bytes that were no UTF-8, which Python holds as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not valid UTF-8 at character {error.start + 1}: correct its encoding") from None


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk: a checkpoint and the folder with its model.json, or a folder of Hugging Face or an adapter."""

    place: Path
    checkpoint: Path | None = None

    @property
    def shape(self) -> ModelShape:
        if self.checkpoint is None:
            return read_model(self.hf_folder.config)[1]
        return ModelShape.from_dict(json.loads((self.place / "model.json").read_text())["shape"])

    @property
    def hf_folder(self) -> HfFolder:
        if not os.path.exists(self.place / ADAPTER_CONFIG):
            return open_folder(self.place)
        return VirtualFolder(self.place) if is_virtual(self.place) else AdapterFolder(self.place)


def find_model(folder: str | Path, which: str = "last") -> ModelFiles:
    """The files of a run (its checkpoint `which`), one checkpoint's folder, an import or export, a Hugging Face folder
    or an adapter's folder."""
    path = Path(os.path.expanduser(folder))
    checkpoint = path if path.parent.name == "checkpoints" else Path(os.path.abspath(path))  # "." may be one
    if checkpoint.parent.name == "checkpoints" and os.path.exists(checkpoint.parent.parent / "events.jsonl"):
        path, which = checkpoint.parent.parent, checkpoint.name
    if not os.path.exists(path):
        raise UserError(f"{folder}: no such folder; give a run (`bessemer runs` lists them), a checkpoint or a model's")
    is_run = os.path.exists(path / "events.jsonl")
    adapter = os.path.exists(path / ADAPTER_CONFIG)
    if adapter or (not is_run and os.path.exists(path / "config.json") and not os.path.exists(path / "model.json")):
        return ModelFiles(path)
    if is_run or not os.path.exists(path / "model.json"):
        return ModelFiles(path, find_checkpoint(Run.existing(path), which))
    return ModelFiles(path, _imported_checkpoint(CheckpointStore(path), path, which))


def load_model(folder: str | Path, which: str = "last", device: str = "auto") -> LoadedModel:
    """Load a run (its checkpoint `which`), one checkpoint's folder, an import or export, a Hugging Face folder of a
    model (one without a native family is run by transformers), or a LoRA adapter's folder (merged into its base)."""
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UserError(f"device {device!r}: write auto, cpu, cuda or mps")
    files = find_model(folder, which)
    path, target = files.place, pick_device(ParallelSpec(device=device))  # type: ignore[arg-type]
    if files.checkpoint is None:
        return _load_folder(files.hf_folder, target)
    description = json.loads((path / "model.json").read_text())
    model = _empty(files.shape, target)
    saved = CheckpointWeights(files.checkpoint)
    if virtual := {name: saved[name] for name in saved if name.endswith(f".{VIRTUAL}")}:
        load_virtual(model, virtual)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    try:
        CheckpointStore(files.checkpoint.parent).load(files.checkpoint, state)
    except DamagedCheckpoint as error:
        raise UserError(f"{error}; choose another with --checkpoint") from None
    if not virtual:
        merged = MergedWeights(saved)
        for name in (f"{module}.{part}" for module in merged.adapted for part in ("weight", "bias")):
            if f"{MODEL}{name}" in state:
                state[f"{MODEL}{name}"].copy_(merged[name])
    if not os.path.exists(path / "tokenizer.json"):
        raise UserError(f"{path}: has no tokenizer.json to read a prompt with")
    tokenizer = Tokenizer.load(path / "tokenizer.json", description["eos"] or None)
    return LoadedModel(
        model.eval(), tokenizer, prompt_format(path, tokenizer), run_template(path, tokenizer), _context(model, path)
    )


def _context(model: Decoder, place: Path) -> int | None:
    """The stated context of a model, else the trained one of its run. ALiBi and Mamba read any length."""
    shape = model.shape
    if shape.decoder_layers or (shape.positions not in ("rope", "learned") and not shape.wrapped):
        return None
    settings = place / "settings.json"
    trained = json.loads(settings.read_text())["context"] if settings.exists() else None
    return shape.max_positions or trained


def _empty(shape: ModelShape, device: torch.device) -> Decoder:
    """A model with allocated, uninitialised weights."""
    with torch.device("meta"):
        model = make_module(shape)
    model.to_empty(device=device)
    return model


def _imported_checkpoint(store: CheckpointStore, path: Path, which: str) -> Path:
    saved = {path.name: path for path, _ in store.committed("model")}
    if not saved or which not in {"last", "best", *saved}:
        raise UserError(f"{path}: no checkpoint {which!r}; there are {', '.join(saved) or 'none'}")
    return saved.get(which, list(saved.values())[-1])


def _load_folder(folder: HfFolder, device: torch.device) -> LoadedModel:
    """A Hugging Face folder in float32."""
    path = folder.path
    model: Decoder
    if needs_wrap(folder.config):
        model = wrap(path, device)
        if isinstance(folder, VirtualFolder):
            raise UserError(
                f"{folder.adapter_path}: virtual tokens need a model with a native family, and {path} has none"
            )
        if isinstance(folder, AdapterFolder):
            _merge_into(model, read_adapter(folder.adapter.path, model.shape))
    else:
        family, shape = read_model(folder.config)
        model = _empty(shape, device)
        load_weights(model, folder, family)
        if isinstance(folder, VirtualFolder):
            load_virtual(model, read_adapter(folder.adapter_path, shape))
    tokenizer = Tokenizer.load(path, end_token(path))
    return LoadedModel(
        model.eval(), tokenizer, prompt_format(path, tokenizer), _folder_template(path), _context(model, path)
    )


@torch.no_grad()
def _merge_into(model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Merges an adapter, by native names, into the weights of a model."""
    for module in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        parts = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.rpartition(".")[0] == module}
        weight: Any = model.get_submodule(module).weight
        weight.copy_(merge(module, weight, parts))


def run_template(path: Path, tokenizer: Tokenizer) -> str | None:
    """The chat template of a run: what it trained conversations with, else that of the model it started from."""
    spec = load_spec(path / "spec.yaml") if (path / "spec.yaml").is_file() else None
    if spec is not None and any(source.is_chat for source in spec.data.sources.values()):
        return chat_template(spec.tokenizer)
    if spec is not None and spec.objective in RL_OBJECTIVES:
        return None if spec.tokenizer.chat == "none" else chat_template(spec.tokenizer)
    origin = find_origin(path)
    return _folder_template(origin.folder.path) if origin is not None and origin.own_tokenizer else None


def folder_template_file(path: Path) -> Path | None:
    """The file of a Hugging Face folder that holds its chat template."""
    if (path / "chat_template.jinja").is_file():
        return path / "chat_template.jinja"
    config = path / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    return config if isinstance(template, str) else None


def _folder_template(path: Path) -> str | None:
    file = folder_template_file(path)
    return read_template(str(file), ()) if file else None


def prompt_format(folder: str | Path, tokenizer: Tokenizer) -> PromptFormat:
    """The prompt format of a model's folder."""
    origin = find_origin(Path(folder))
    if origin is None or not origin.own_tokenizer:
        return native_prompt_format(tokenizer)
    return hf_prompt_format(origin.folder.path, tokenizer, trained_here=(Path(folder) / "events.jsonl").exists())
