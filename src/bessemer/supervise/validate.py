"""The validation loss of any weights of a run's model, on the sequences that the run is validated on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model.transformer import build
from bessemer.spec.parallel import ParallelSpec
from bessemer.spec.shape import ModelShape
from bessemer.supervise.feed import held_out_rows
from bessemer.supervise.replay import stream_of
from bessemer.supervise.session import existing_run
from bessemer.train.device import pick_device
from bessemer.train.evaluate import Evaluator
from bessemer.train.objective import make_pretrain


def validator(folder: Path) -> Callable[[Mapping[str, Tensor]], float]:
    """A function from weights, by native names, to the loss. One evaluation costs what one inside the run does."""
    _, spec = existing_run(folder)
    run, stream, data, plan = stream_of(folder)
    device = pick_device(ParallelSpec())
    held_out = held_out_rows(data, dict(stream.sources), plan.context)
    sizes = plan.context, plan.evaluate_tokens, plan.micro_rows
    evaluator = Evaluator(held_out, *sizes, plan.precision, device)
    if not evaluator.available:
        raise UserError(f"{folder}: holds out no data to choose by; leave out --greedy, or train with data.validation")
    about = json.loads((run.folder / "model.json").read_text())
    model = build(ModelShape.from_dict(about["shape"]), device, spec.seed)

    objective = make_pretrain(spec, stream.order.names, data.tokenizer, model.shape, plan.context)

    @torch.no_grad()
    def loss(weights: Mapping[str, Tensor]) -> float:
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        return evaluator.evaluate(model, objective).loss

    return loss
