"""Feeds the emitted training scripts: Bessemer's batches and learning rates, and the initial weights.

A script stays a plain loop of its framework; what makes its losses equal to Bessemer's comes from here.
`python -m bessemer.launch.emit.feed FOLDER` writes the weights that `bessemer train` would begin with (random from the
seed, from `start_from` or from `model.hf`) as a Hugging Face folder, and compares it with Bessemer's network before it
gets its name. Legend: B rows of T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.checkpoint.manifest import DamagedCheckpoint
from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import stream_model
from bessemer.data.prepare import open_prepared
from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.exclusions import banned_documents, read_exclusions
from bessemer.data.stream.order import Segment
from bessemer.errors import UserError
from bessemer.export.hf import open_native, to_hf
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import build_model
from bessemer.plan.decide import TrainPlan
from bessemer.plan.schedule import run_schedule
from bessemer.session.data import build_stream, make_rows
from bessemer.session.start import load_source, open_source
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape


@dataclass
class MicroBatch:
    """A micro-batch on its device. `inputs` are keyword arguments of a transformers causal language model."""

    inputs: dict[str, Any]
    targets_BT: Tensor
    weights_BT: Tensor

    def loss(self, logits_BTV: Tensor) -> Tensor:
        """The sum of the weighted cross-entropies. Divide it by the step's count, never by the micro-batch's."""
        nll_R = F.cross_entropy(logits_BTV.float().flatten(0, 1), self.targets_BT.flatten(), reduction="none")
        return (nll_R * self.weights_BT.flatten()).sum()


@dataclass
class EmittedRun:
    """The run that an emitted folder describes. Batches are random access: any step on any rank."""

    folder: Path
    spec: RunSpec
    plan: TrainPlan
    shape: ModelShape
    stream: BatchStream

    def lr(self, step: int) -> float:
        return run_schedule(self.spec.schedule, self.plan).lr(step)

    def count(self, step: int) -> float:
        """The divisor of the step's losses, summed over all ranks."""
        return self.stream.step_count(step) or 1.0

    def micro_batches(
        self, step: int, rank: int, ranks: int, device: torch.device | str, rows: int | None = None
    ) -> list[MicroBatch]:
        """One rank's share of a step, in micro-batches of `rows` rows (default: as planned); as many on every rank."""
        rows = rows or min(self.plan.micro_rows, -(-self.stream.steps.rows(step) // ranks))
        return [self._to_micro_batch(batch, device) for batch in self.stream.micro_batches(step, rows, rank, ranks)]

    def _to_micro_batch(self, batch: Batch, device: torch.device | str) -> MicroBatch:
        tokens, targets, weights = (
            torch.from_numpy(part).to(device) for part in (batch.tokens, batch.targets, batch.weights)
        )
        separate = not self.spec.data.cross_documents and not batch.single_document
        mask = AttentionMask(torch.from_numpy(batch.documents).to(device) if separate else None)
        T, windows = tokens.shape[1], sorted({self.shape.window(layer) for layer in range(self.shape.layers)})
        masks = [None if mask.plain(w, T) else mask.mask(w, T, T, tokens.device) for w in windows]
        # Models with full and sliding-window layers take one mask for each kind.
        masks_by_kind = dict(zip(("full_attention", "sliding_attention"), masks, strict=False))
        inputs = {
            "input_ids": tokens, "attention_mask": masks_by_kind if len(masks) > 1 else masks[0],
            "position_ids": mask.positions(0, T, tokens.device).expand_as(tokens),
        }  # fmt: skip
        return MicroBatch(inputs, targets, weights)


def open_emitted(folder: str | Path) -> EmittedRun:
    """Read the shared files of an emitted folder and open the prepared data that they name."""
    folder = Path(folder)
    spec = load_spec(folder / "spec.yaml")
    plan = TrainPlan.from_json((folder / "settings.json").read_text())
    data = open_prepared(Path(json.loads((folder / "data.json").read_text())["folder"]))
    rows = make_rows(spec, data, plan.context)
    stream = build_stream(spec, data, rows, plan, [Segment(0, 0)])
    assert isinstance(stream, BatchStream), "files are random access"
    entries = [entry for path in spec.data.exclude for entry in read_exclusions(path)]
    if entries:
        stream = stream.replace(banned=banned_documents(entries, stream.sources)[0])
    shape = ModelShape.from_dict(json.loads((folder / "model.json").read_text())["shape"])
    return EmittedRun(folder, spec, plan, shape, stream)


def load_model(folder: Path, gradient_checkpointing: bool) -> Any:
    """The transformers model with the run's initial weights, in fp32, ready to train."""
    from transformers import AutoModelForCausalLM

    if not (folder / "model" / "config.json").exists():
        raise UserError(f"{folder}: no initial weights: run `python -m bessemer.launch.emit.feed {folder}`")
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    )  # fmt: skip
    # Where the end-of-document token is also the padding token, transformers would never train its embedding.
    model.get_input_embeddings().padding_idx = None
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def decay_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Parameter groups in which matrices are decayed and vectors are not, as in Bessemer's optimizers."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = ([p for p in trained if (p.ndim < 2) == flat] for flat in (False, True))
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def write_initial_weights(folder: str | Path) -> Path:
    """Write FOLDER/model unless it exists; its path. Needs the whole model in host memory, in fp32."""
    folder = Path(folder).absolute()
    target = folder / "model"
    if (target / "config.json").exists():
        return target
    spec = load_spec(folder / "spec.yaml")
    shape = ModelShape.from_dict(json.loads((folder / "model.json").read_text())["shape"])
    if shape.wrapped:
        raise UserError(f"model.wrap: {spec.model.hf} is already a transformers model: copy that folder to {target}")
    model = build_model(shape, "cpu", spec.seed, spec.model.init)
    source = open_source(spec)
    if spec.start_from:
        weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        try:
            CheckpointStore(Path(spec.start_from).parent).load(Path(spec.start_from), weights)
        except DamagedCheckpoint as error:
            raise UserError(f"start_from: {error}") from None
    elif source:
        load_source(model, source)
    state = model.state_dict()
    checkpoint = stream_model(folder, state, state.__getitem__, {"first_weights_of": spec.name})
    try:
        return to_hf(open_native(folder), target).folder
    finally:
        shutil.rmtree(checkpoint)


if __name__ == "__main__":
    print(write_initial_weights(sys.argv[1]))
