"""Plans a spec from what a user names: a file or keys, a model size, tokens, GPUs. `bessemer plan` and the Python API
both plan through these functions.

Torch is imported only for this machine's device and for model folders: a plan for rented GPUs takes under a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.cost_model.memory import OtherModel
from bessemer.plan.hardware import parse_cluster
from bessemer.plan.request import (
    PlanRequest,
    depends_on_data,
    parse_count_option,
    request_from_options,
    request_from_spec,
)
from bessemer.plan.search.proposal import Proposal, propose
from bessemer.spec.load import load_document
from bessemer.spec.rl_checks import with_companions
from bessemer.spec.schema import RunSpec


def request_plan(
    spec: str | Path | Mapping[str, Any] | RunSpec | None, model: str | None, tokens: str | None,
    settings: Sequence[str] = (),
) -> PlanRequest:  # fmt: skip
    """From a spec, over which the options count as `--set` does, or from the options alone."""
    count = parse_count_option("--tokens", tokens)
    if spec is None:
        if model is None:
            raise UserError("write --model, such as --model 7b, or name a spec")
        return request_from_options(model, count, settings)
    overrides = [f"model={model.upper()}"] if model else []
    overrides += [f"budget.tokens={count}"] if count else []
    loaded = load_document(spec, [*settings, *overrides])
    run = with_companions(loaded.spec)
    if "name" not in loaded.document.data:  # a spec that is written from this one gets the name of its own file
        run = run.model_copy(update={"name": "auto"})
    sources, vocab = {}, None
    if depends_on_data(run) or run.tokenizer.path:
        from bessemer.data.estimate import estimate_sizes, estimate_vocab

        sources = estimate_sizes(run) if depends_on_data(run) else {}
        vocab = estimate_vocab(run, sources)
    if run.model.hf is None and not run.models:
        return replace(request_from_spec(run, None, vocab), sources=sources)
    from bessemer.export.describe import find_shape  # reads config.json, and loads torch for it

    request = request_from_spec(run, find_shape(run.model.hf) if run.model.hf else None, vocab)
    models = {name: other for name, other in run.models.items() if name != "teacher" or not run.distill.stored}
    others = (OtherModel(name, find_shape(other.path), other.train) for name, other in models.items())
    return replace(request, others=tuple(others), sources=sources)


def local_gpus(request: PlanRequest) -> str | None:
    """This machine's GPUs as the catalogue names them; None if a run would use another device."""
    from bessemer.train.speed import catalogued_gpus

    return catalogued_gpus(request.spec.parallel)


def propose_on(request: PlanRequest, gpus: str | None, network: str | None) -> Proposal:
    """The plan on the named GPUs, or on this machine's if they are in the catalogue."""
    if gpus is None and not request.from_options:
        gpus = local_gpus(request)
    if gpus is None:
        raise UserError("write --gpus, such as --gpus 8xH100")
    return propose(request, parse_cluster(gpus, network))
