"""What a user asks the planner for: parsed from command-line options, from a spec, or asked in an interview.

Options and specs both become a RunSpec, so that one planner serves both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bessemer.errors import UserError
from bessemer.plan.cost_model.memory import OtherModel
from bessemer.plan.decision import EMPIRICAL, Basis, Plan, RecipeAnswer
from bessemer.plan.hardware import parse_cluster
from bessemer.plan.mixtures import SourceSize
from bessemer.plan.recipe.pretraining import design_shape
from bessemer.plan.search.search import FixedDegrees
from bessemer.spec.document import YamlDocument, apply_override
from bessemer.spec.load import SpecError, validate
from bessemer.spec.model import model_shape
from bessemer.spec.preference import ANSWER_OBJECTIVES
from bessemer.spec.quantity import human_count, human_time, parse_count, parse_duration
from bessemer.spec.reward_model import with_label_head
from bessemer.spec.rl import RL_OBJECTIVES
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS, ModelShape

SIZE = re.compile(r"(?:[a-z0-9.]+[-_ ])*?(\d+(?:\.\d+)?)\s*([kmbt])", re.I)
SCALES = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# Vocabularies of the presets: those of Llama 1 and GPT-2, and smaller ones for small models. Others have Llama 3's.
PRESET_VOCAB = {"1M": 2048, "3M": 4096, "10M": 8192, "30M": 16_384, "60M": 16_384, "125M": 50_304, "350M": 50_304,
                "760M": 50_304, "7B": 32_000, "13B": 32_000, "34B": 32_000}  # fmt: skip
LLAMA_3_VOCAB = 128_256
DEFAULT_VOCAB = 32_000  # if the tokenizer is not trained yet
DEFAULT_CONTEXT = 4096
CLEAN = RecipeAnswer(
    ("dedup_exact", "dedup_minhash"), "models recite text that occurs ten times about 1,000 times as often",
    "Kandpal et al. 2022", "established",
)  # fmt: skip
DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep")
DAY = 86_400.0
DEFAULT_DEADLINE_S = 30 * DAY  # if only a budget is given
MONEY = re.compile(
    r"(?:usd|\$)?\s*([0-9]{1,3}(?:,[0-9]{3})+|[0-9][0-9_]*(?:\.[0-9]+)?)\s*([kmb])?\s*(?:usd|dollars?|\$)?", re.I
)
DATA_SIZE = "data.size"  # decision: the estimated size of the data
TRIES = 5  # answers to one question of the interview
Prompt = Callable[[str, str], str]  # question and default -> answer


@dataclass(frozen=True)
class PlanRequest:
    """A spec with the user's settings, the shape of its model, and where that shape comes from. `answers` are choices
    made for the user on the way, by spec key. `from_options`: there is no spec file, and its data has no name yet.
    `others` are the further models of the spec. `sources` are the estimated sizes of its data, if the plan depends on
    them."""

    spec: RunSpec
    shape: ModelShape
    reason: str
    source: str = "asked"
    basis: Basis | Literal[""] = ""
    answers: Mapping[str, RecipeAnswer[Any]] = field(default_factory=dict)
    from_options: bool = False
    others: tuple[OtherModel, ...] = ()
    sources: Mapping[str, SourceSize] = field(default_factory=dict)


def request_from_options(model: str, tokens: int | None = None, settings: Sequence[str] = ()) -> PlanRequest:
    """From command-line options. `settings` are overrides of spec keys, as `--set` takes them."""
    document = YamlDocument({}, "command line")
    context = _apply(document, settings).get("data", {})
    context = context.get("context") if isinstance(context, dict) else None
    section, vocab, reason, answers = _model_section(model, context if isinstance(context, int) else DEFAULT_CONTEXT)
    data: dict[str, Any] = {
        "model": section, "tokenizer": {"vocab": vocab},
        "data": {"sources": {"text": "data/"}, "clean": list(CLEAN.value)},
        "budget": {} if tokens is None else {"tokens": tokens}, "parallel": {},
    }  # fmt: skip
    document = YamlDocument(data, "command line")
    _apply(document, settings)
    try:
        spec = validate(document)
    except SpecError as error:
        raise UserError(error.problems[0]) from None
    shape = model_shape(spec.model, vocab)
    return PlanRequest(spec, shape, reason, answers={**answers, "data.clean": CLEAN}, from_options=True)


def _apply(document: YamlDocument, settings: Sequence[str]) -> dict[str, Any]:
    for setting in settings:
        apply_override(document, setting)
    return dict(document.data)


def request_from_spec(
    spec: RunSpec, folder_shape: ModelShape | None = None, tokenizer_vocab: int | None = None
) -> PlanRequest:
    """From a spec. `folder_shape` is the shape of the model folder that the spec names, `tokenizer_vocab` the size of
    its tokenizer if that is known."""
    vocab = folder_shape.vocab if folder_shape else tokenizer_vocab or spec.tokenizer.vocab
    if vocab == "auto":
        preset = next((key for key in PRESETS if key.lower() == (spec.model.preset or "").lower()), "")
        vocab = PRESET_VOCAB.get(preset, LLAMA_3_VOCAB) if preset else DEFAULT_VOCAB
    shape = model_shape(spec.model, int(vocab), folder_shape)
    return PlanRequest(spec, with_label_head(spec, shape), f"the spec's, with a vocabulary of {vocab:,} tokens")


def parse_count_option(name: str, text: str | None) -> int | None:
    """A number of tokens, such as 100B."""
    try:
        return None if text is None else parse_count(text, least=1)
    except ValueError as error:
        raise UserError(f"{name} {text}: {error}") from None


def _model_section(text: str, context: int) -> tuple[dict[str, Any], int, str, Mapping[str, RecipeAnswer[Any]]]:
    """The spec's model section for a size or preset, its vocabulary, the reason, and the choices of a designed
    shape."""
    match = SIZE.fullmatch(text.strip())
    if not match:
        raise UserError(
            f"--model {text!r}: no size found: write one such as 7B or llama-7b, or a preset of {', '.join(PRESETS)}"
        )
    name = f"{match[1]}{match[2].upper()}"
    if name in PRESETS:
        vocab = PRESET_VOCAB.get(name, LLAMA_3_VOCAB)
        answer = RecipeAnswer(vocab, f"usual for the preset {name}", "Llama 1 and 3, GPT-2", "established")
        return {"preset": name}, vocab, f"the preset {name}", {"tokenizer.vocab": answer}
    try:
        design = design_shape(float(match[1]) * SCALES[match[2].lower()], context)
    except UserError as error:
        raise UserError(f"--model {text}: {error}") from None
    shape = design.shape
    section = {key: getattr(shape, key) for key in ("width", "layers", "heads", "kv_heads", "head_dim", "ffn", "tied")}
    section["rope"] = {"theta": shape.rope.theta}
    reason = f"{human_count(shape.parameters)} parameters for a requested size of {name}"
    return section, shape.vocab, reason, design.answers


def fixed_degrees(spec: RunSpec) -> FixedDegrees:
    """The parts of a layout that the spec sets: degrees, micro-batch, recomputation and pipeline stages."""
    parallel, memory = spec.parallel, spec.memory
    settings = {key: getattr(parallel, key) for key in DEGREES if key in parallel.model_fields_set}
    degrees = {key: int(degree) for key, degree in settings.items() if degree != "auto"}
    stages = None
    if "pipeline" in parallel.model_fields_set:
        stages = parallel.pipeline.stages if parallel.pipeline.schedule in ("interleaved", "zero_bubble") else 1
    mode = memory.activations if memory.activations in ("none", "selective", "full") else None
    rows = None if spec.budget.micro_batch == "auto" else int(spec.budget.micro_batch)
    return FixedDegrees(**degrees, micro_rows=rows, activations=mode, stages=stages)  # type: ignore[arg-type]


def depends_on_data(spec: RunSpec) -> bool:
    """Whether the length of the run follows from the size of its data."""
    by_rows = (
        spec.objective in ("sft", "classify", *ANSWER_OBJECTIVES, *RL_OBJECTIVES)
        and spec.budget.steps is None
        and spec.budget.tokens == "auto"
    )
    return by_rows or spec.budget.epochs is not None


def log_estimate(request: PlanRequest, plan: Plan) -> None:
    """Adds the estimated size of the data to the plan."""
    if request.sources:
        tokens, documents = (sum(getattr(s, key) for s in request.sources.values()) for key in ("tokens", "documents"))
        rows = f" in {human_count(documents)} rows" if documents else ""
        reason = "by the sizes of its files, about 4 bytes a token; the run counts exactly"
        plan.add(DATA_SIZE, f"{human_count(tokens)} tokens{rows}", reason, "rule", EMPIRICAL)


def spec_tokens(spec: RunSpec, context: int) -> int | None:
    """The length of the run in tokens; None if the spec leaves it open."""
    budget = spec.budget
    if budget.epochs is not None:
        raise UserError("budget.epochs: a plan reads no data: write --tokens, such as --tokens 20B")
    if budget.steps is None:
        return None if budget.tokens == "auto" else budget.tokens
    if spec.objective in RL_OBJECTIVES:
        return budget.steps * spec.rl.step_prompts * spec.rl.samples * context
    if budget.batch == "auto":
        raise UserError("budget.steps: a plan needs the length in tokens: write budget.batch too, or --tokens")
    return budget.steps * max(1, round(budget.batch / context)) * context


@dataclass(frozen=True)
class BudgetLimits:
    budget_usd: float | None
    deadline_s: float
    default_deadline: bool = False  # the user gave no deadline

    def __str__(self) -> str:
        money = [f"${self.budget_usd:,.0f}"] if self.budget_usd else []
        return " and ".join([*money, in_days(self.deadline_s)])


def in_days(seconds: float) -> str:
    return f"{seconds / DAY:,.3g} days" if seconds >= 2 * DAY else human_time(seconds)


def parse_money(text: str) -> float:
    """`50000usd`, `$50k`, `1.5M` -> dollars."""
    match = MONEY.fullmatch(text.strip())
    if not match:
        raise UserError(f"--budget {text}: write dollars above 0, such as 50000usd or 50k")
    scale = {"k": 1e3, "m": 1e6, "b": 1e9}.get((match[2] or "").lower(), 1.0)
    usd = float(match[1].replace(",", "").replace("_", "")) * scale
    if usd <= 0:
        raise UserError(f"--budget {text}: write dollars above 0, such as 500usd")
    return usd


def parse_limits(budget: str | None, deadline: str | None) -> BudgetLimits:
    usd = parse_money(budget) if budget is not None else None
    if deadline is None:
        return BudgetLimits(usd, DEFAULT_DEADLINE_S, default_deadline=True)
    try:
        seconds = parse_duration(deadline)
    except ValueError as error:
        raise UserError(f"--deadline {deadline}: {error}") from None
    if seconds <= 0:
        raise UserError(f"--deadline {deadline}: write a time above 0, such as 30d")
    return BudgetLimits(usd, seconds)


@dataclass(frozen=True)
class InterviewAnswers:
    """Text as the command-line options have it."""

    model: str | None = None
    tokens: str | None = None
    gpus: str | None = None
    budget: str | None = None
    deadline: str | None = None


def ask_missing(answers: InterviewAnswers, prompt: Prompt, log: Callable[[str], None]) -> InterviewAnswers:
    """Ask for what is missing. Each question has a default; an invalid answer is logged and asked for again."""

    def check_tokens(text: str) -> object:
        return text == "auto" or parse_count_option("tokens", text)

    def ask(question: str, default: str, check: Callable[[str], object]) -> str:
        for _ in range(TRIES):
            text = prompt(question, default).strip() or default
            try:
                check(text)
            except UserError as error:
                log(str(error))
            else:
                return text
        raise UserError(f"{question}: no valid answer in {TRIES} tries: write it as an option instead")

    model, tokens, gpus = answers.model, answers.tokens, answers.gpus
    budget, deadline = answers.budget, answers.deadline
    if model is None:
        model = ask("Size of the model (such as 1B, 7B, llama-7b)", "7B", request_from_options)
    if tokens is None:
        text = ask("Tokens to train on (auto: compute-optimal)", "auto", check_tokens)
        tokens = None if text == "auto" else text
    if gpus is None and budget is None and deadline is None:
        question = "GPUs (such as 8xA100-80GB; any: let the budget decide)"
        gpus = ask(question, "8xH100", lambda text: text == "any" or parse_cluster(text))
        if gpus == "any":
            gpus = None
            budget = ask("Budget in dollars", "50k", lambda text: parse_limits(text, None))
            deadline = ask("Deadline", "30d", lambda text: parse_limits(None, text))
    return InterviewAnswers(model, tokens, gpus, budget, deadline)
