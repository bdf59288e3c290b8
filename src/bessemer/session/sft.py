"""What `objective: sft` adds to a start: the formats of its sources, whole conversations in a row, the template of the
model's folder, and the checks for mistakes before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bessemer.data.read.chat_formats import describe_format, recognise_source
from bessemer.errors import UserError
from bessemer.model.families.folder import HfFolder
from bessemer.plan.decision import Plan
from bessemer.spec.data import SourceSpec
from bessemer.spec.schema import RunSpec
from bessemer.train.trained import folder_template_file

PYTHON_SOURCE = "python"


def with_sft_defaults(spec: RunSpec) -> RunSpec:
    """The spec with what fine-tuning implies where it is silent. Reads the first rows of each source."""
    if spec.objective != "sft":
        return spec
    data: dict[str, Any] = {"sources": {name: _recognise(name, source) for name, source in spec.data.sources.items()}}
    if "packing" not in spec.data.model_fields_set:
        data["packing"] = "best_fit"
    changes: dict[str, Any] = {"data": spec.data.model_copy(update=data)}
    if "chat" not in spec.tokenizer.model_fields_set:
        template = folder_template_file(HfFolder(spec.model.hf).path) if spec.model.hf else None
        changes["tokenizer"] = spec.tokenizer.model_copy(update={"chat": str(template or spec.tokenizer.chat)})
    return spec.model_copy(update=changes)


def _recognise(name: str, source: SourceSpec) -> SourceSpec:
    if not source.path or source.path == [PYTHON_SOURCE]:
        return source
    try:
        return recognise_source(name, source)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith("data.sources") else f"data.sources.{name}: {text}") from error


def log_sft(spec: RunSpec, plan: Plan) -> None:
    """Adds the formats, the template and the packing to the plan."""
    if spec.objective != "sft":
        return
    for name, source in spec.data.sources.items():
        if source.chat_format:
            plan.add(f"data.sources.{name}", describe_format(source), "format of its rows", "found")
    if any(source.is_chat for source in spec.data.sources.values()):
        own = spec.model.hf and Path(spec.tokenizer.chat).parent == HfFolder(spec.model.hf).path
        reason = (
            f"the folder's own template; learnt: {spec.tokenizer.learn}" if own else f"learnt: {spec.tokenizer.learn}"
        )
        plan.add("tokenizer.chat", spec.tokenizer.chat, reason, "found" if own else "asked")
    attention = "crosses conversations" if spec.data.cross_documents else "stays inside a conversation"
    plan.add("data.layout", spec.data.packing, f"attention {attention}", "rule", "established")
