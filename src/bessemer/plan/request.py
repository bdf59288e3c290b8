"""What a user asks of the planner, as a spec: from a few words of the command line, or from a spec that leaves things
open. Both ways lead to one RunSpec, so that one planner answers both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bessemer.errors import UserError
from bessemer.plan.recipe.fine_tuning import Basis, RecipeAnswer
from bessemer.plan.recipe.shape import design
from bessemer.plan.search.search import FixedDegrees
from bessemer.spec.document import Document
from bessemer.spec.load import SpecError, validate
from bessemer.spec.model import model_shape
from bessemer.spec.quantity import human_count, parse_count
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS, ModelShape

SIZE = re.compile(r"(?:[a-z0-9.]+[-_ ])*?(\d+(?:\.\d+)?)\s*([kmbt])", re.I)
SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# Tokens that presets are usually given: theirs of Llama 1 and 3 and of GPT-2, and few for small ones.
WORDS = {"1M": 2048, "3M": 4096, "10M": 8192, "30M": 16_384, "60M": 16_384, "125M": 50_304, "350M": 50_304,
         "760M": 50_304, "7B": 32_000, "13B": 32_000, "34B": 32_000}  # fmt: skip
LLAMA_3_WORDS = 128_256
USUAL_WORDS = 32_000  # where a tokenizer is yet to be trained
USUAL_CONTEXT = 4096
CLEAN = RecipeAnswer(
    ("dedup_exact", "dedup_minhash"), "what is there ten times is recited about 1,000 times as often",
    "Kandpal et al. 2022", "established",
)  # fmt: skip
DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")


@dataclass(frozen=True)
class PlanRequest:
    """A spec with what is settled, the shape of its model, and why that shape. `answers` are choices that were made
    for the user on the way, by key of the spec; `from_words` where there is no spec: its data is yet to be named."""

    spec: RunSpec
    shape: ModelShape
    reason: str
    source: str = "asked"
    basis: Basis | Literal[""] = ""
    answers: Mapping[str, RecipeAnswer[Any]] = field(default_factory=dict)
    from_words: bool = False


def ask(
    model: str, tokens: int | None = None, context: int | None = None, batch: int | None = None,
    precision: str = "auto", degrees: Mapping[str, int | None] | None = None,
) -> PlanRequest:  # fmt: skip
    """From the words of a command line. Degrees are those of `parallel` in a spec."""
    if context is not None and context < 2:
        raise UserError(f"--context {context}: write 2 tokens or more, such as 4096")
    section, words, reason, answers = _model(model, context or USUAL_CONTEXT)
    sources = {"sources": {"text": "data/"}, "clean": list(CLEAN.value)}
    data: dict[str, Any] = {"model": section, "tokenizer": {"vocab": words}, "data": sources}
    if context is not None:
        data["data"]["context"] = context
    budget = {"tokens": tokens, "batch": batch}
    data["budget"] = {key: value for key, value in budget.items() if value is not None}
    data["parallel"] = {key: degree for key, degree in (degrees or {}).items() if degree is not None}
    if precision != "auto":
        data["precision"] = precision
    spec = _validated(data)
    return PlanRequest(
        spec, model_shape(spec.model, words), reason, answers={**answers, "data.clean": CLEAN}, from_words=True
    )


def ask_spec(spec: RunSpec, given: ModelShape | None = None) -> PlanRequest:
    """From a spec; `given` is the shape of a folder that it names."""
    words = given.vocab if given else spec.tokenizer.vocab
    if words == "auto":
        preset = next((key for key in PRESETS if key.lower() == (spec.model.preset or "").lower()), "")
        words = WORDS.get(preset, LLAMA_3_WORDS) if preset else USUAL_WORDS
    shape = model_shape(spec.model, int(words), given)
    return PlanRequest(spec, shape, f"the spec's, with {words:,} tokens of vocabulary")


def option_count(name: str, text: str | None) -> int | None:
    """Tokens of an option of the command line."""
    try:
        return None if text is None else parse_count(text, least=1)
    except ValueError as fault:
        raise UserError(f"{name} {text}: {fault}") from None


def _model(text: str, context: int) -> tuple[dict[str, Any], int, str, Mapping[str, RecipeAnswer[Any]]]:
    """The spec's section for a size or preset, its vocabulary, why, and the choices of a design."""
    match = SIZE.fullmatch(text.strip())
    if not match:
        raise UserError(
            f"--model {text!r}: no size found: write one such as 7B or llama-7b, or a preset of {', '.join(PRESETS)}"
        )
    name = f"{match[1]}{match[2].upper()}"
    if name in PRESETS:
        words = WORDS.get(name, LLAMA_3_WORDS)
        usual = RecipeAnswer(words, f"usual for the preset {name}", "Llama 1 and 3, GPT-2", "established")
        return {"preset": name}, words, f"the preset {name}", {"tokenizer.vocab": usual}
    try:
        found = design(float(match[1]) * SCALES[match[2].lower()], context)
    except UserError as fault:
        raise UserError(f"--model {text}: {fault}") from None
    shape = found.shape
    section = {key: getattr(shape, key) for key in ("width", "layers", "heads", "kv_heads", "head_dim", "ffn", "tied")}
    section["rope"] = {"theta": shape.rope.theta}
    reason = f"{human_count(shape.parameters)} parameters for a wish of {name}"
    return section, shape.vocab, reason, found.answers


def _validated(data: dict[str, Any]) -> RunSpec:
    try:
        return validate(Document(data, "command line"))
    except SpecError as error:
        raise UserError(error.problems[0]) from None


def kept_by(spec: RunSpec) -> FixedDegrees:
    """What the spec settles of a layout: degrees that are written, and how a pass is run."""
    parallel, memory = spec.parallel, spec.memory
    written = {key: getattr(parallel, key) for key in DEGREES if key in parallel.model_fields_set}
    degrees = {key: int(degree) for key, degree in written.items() if degree != "auto"}
    stages = None
    if "pipeline" in parallel.model_fields_set:
        stages = parallel.pipeline.stages if parallel.pipeline.schedule in ("interleaved", "zero_bubble") else 1
    how = memory.activations if memory.activations in ("none", "selective", "full") else None
    rows = None if spec.budget.micro_batch == "auto" else int(spec.budget.micro_batch)
    return FixedDegrees(**degrees, micro_rows=rows, activations=how, stages=stages)  # type: ignore[arg-type]


def tokens_of(spec: RunSpec, context: int) -> int | None:
    """The length that the spec gives, in tokens; None where it is left open."""
    budget = spec.budget
    if budget.epochs is not None:
        raise UserError("budget.epochs: a plan reads no data: write --tokens, such as --tokens 20B")
    if budget.steps is None:
        return None if budget.tokens == "auto" else budget.tokens
    if budget.batch == "auto":
        raise UserError("budget.steps: a plan needs the length in tokens: write budget.batch too, or --tokens")
    return budget.steps * max(1, round(budget.batch / context)) * context
