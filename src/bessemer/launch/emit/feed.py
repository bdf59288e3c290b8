"""What the emitted training scripts use: our batches in our order as a transformers model takes them, our rates.

A script stays a plain loop of its framework; only what makes its losses equal to ours comes from here. Legend: B rows
of T tokens, V words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.data.prepare import open_prepared
from bessemer.data.stream.batches import Batch, BatchStream
from bessemer.data.stream.exclusions import banned_documents, read_exclusions
from bessemer.data.stream.order import Segment
from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.optim.schedule import Schedule
from bessemer.plan.decide import TrainPlan
from bessemer.session.data import build_stream, make_rows
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape


@dataclass
class MicroBatch:
    """A micro-batch on its device. `inputs` are keyword arguments of a causal language model of transformers."""

    inputs: dict[str, Any]
    targets_BT: Tensor
    weights_BT: Tensor

    def loss(self, logits_BTV: Tensor) -> Tensor:
        """The sum of the weighted cross-entropies: divide it by the step's count, never by the micro-batch's."""
        nll_R = F.cross_entropy(logits_BTV.float().flatten(0, 1), self.targets_BT.flatten(), reduction="none")
        return (nll_R * self.weights_BT.flatten()).sum()


@dataclass
class EmittedRun:
    """The run that an emitted folder describes. Any step's batch can be had on any rank: nothing is iterated."""

    folder: Path
    spec: RunSpec
    plan: TrainPlan
    shape: ModelShape
    stream: BatchStream

    def lr(self, step: int) -> float:
        asked, plan = self.spec.schedule, self.plan
        return Schedule(plan.peak_lr, plan.warmup_steps, plan.total_steps, asked.kind, asked.floor).lr(step)

    def count(self, step: int) -> float:
        """What the step's losses, over all ranks, are divided by."""
        return self.stream.step_count(step) or 1.0

    def micro_batches(
        self, step: int, rank: int, ranks: int, device: torch.device | str, rows: int | None = None
    ) -> list[MicroBatch]:
        """The rank's part of a step, in micro-batches of so many rows (default: as planned); as many on every rank."""
        rows = rows or min(self.plan.micro_rows, -(-self.stream.steps.rows(step) // ranks))
        return [self._micro(batch, device) for batch in self.stream.micro_batches(step, rows, rank, ranks)]

    def _micro(self, batch: Batch, device: torch.device | str) -> MicroBatch:
        tokens, targets, weights = (
            torch.from_numpy(part).to(device) for part in (batch.tokens, batch.targets, batch.weights)
        )
        apart = not self.spec.data.cross_documents and not batch.single_document
        sight = AttentionMask(torch.from_numpy(batch.documents).to(device) if apart else None)
        T, windows = tokens.shape[1], sorted({self.shape.window(layer) for layer in range(self.shape.layers)})
        masks = [None if sight.plain(w, T) else sight.mask(w, T, T, tokens.device) for w in windows]
        # Models with both kinds of layers take a mask for each kind.
        both = dict(zip(("full_attention", "sliding_attention"), masks, strict=False))
        inputs = {
            "input_ids": tokens, "attention_mask": both if len(masks) > 1 else masks[0],
            "position_ids": sight.positions(0, T, tokens.device).expand_as(tokens),
        }  # fmt: skip
        return MicroBatch(inputs, targets, weights)


def open_emitted(folder: str | Path) -> EmittedRun:
    """Reads the shared files of an emitted folder and opens the prepared data that they name."""
    folder = Path(folder)
    spec = load_spec(folder / "spec.yaml")
    plan = TrainPlan.from_json((folder / "settings.json").read_text())
    data = open_prepared(Path(json.loads((folder / "data.json").read_text())["folder"]))
    rows = make_rows(spec, data, plan.context)
    stream = build_stream(spec, data, rows, plan, [Segment(0, 0)])
    assert isinstance(stream, BatchStream), "files can be read again"
    entries = [entry for path in spec.data.exclude for entry in read_exclusions(path)]
    if entries:
        stream = stream.replace(banned=banned_documents(entries, stream.sources)[0])
    shape = ModelShape.from_dict(json.loads((folder / "model.json").read_text())["shape"])
    return EmittedRun(folder, spec, plan, shape, stream)


def load_model(folder: Path, gradient_checkpointing: bool) -> Any:
    """The transformers model with the run's first weights, in fp32, ready to train."""
    from transformers import AutoModelForCausalLM

    if not (folder / "model" / "config.json").exists():
        raise UserError(f"{folder}: has no first weights: run `python -m bessemer.launch.emit.initial {folder}`")
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    )  # fmt: skip
    # Where the end of a document pads as well, transformers would never train its embedding.
    model.get_input_embeddings().padding_idx = None
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def decay_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices are decayed, vectors are not, as in our own optimizers."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = ([p for p in trained if (p.ndim < 2) == flat] for flat in (False, True))
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
