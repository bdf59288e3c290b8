"""Decides what a spec leaves `auto`. Each function decides one group of settings and records its reason in the plan.

Learning rate, batch and warm-up follow recipe/pretraining.py, as in `bessemer plan`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from bessemer.errors import UserError
from bessemer.plan.cost_model.memory import Passes, decide_micro_batch
from bessemer.plan.decision import BASES, EMPIRICAL, Plan, RecipeAnswer
from bessemer.plan.hardware import Machine
from bessemer.plan.mixtures import SourceSize, decide_mixtures, sources_used
from bessemer.plan.recipe.adapters import adapter_rate, decide_adapter
from bessemer.plan.recipe.fine_tuning import (
    SFT_SMALLEST,
    SFT_STEPS,
    Tuning,
    classify,
    dpo,
    grpo,
    ppo,
    reward,
    sft,
    sft_batch_rows,
)
from bessemer.plan.recipe.pretraining import (
    LIMITS_LR,
    batch_tokens,
    learning_rate,
    muon_rate,
    rate_for_batch,
    warmup_steps,
)
from bessemer.plan.schedule import ScheduleSketch, steps_for, tokens_after
from bessemer.plan.search.layout import ONE_PROCESS, Layout
from bessemer.spec.mixture import Mixture
from bessemer.spec.model import model_shape
from bessemer.spec.preference import ANSWER_OBJECTIVES, PREFERENCES
from bessemer.spec.quantity import human_count, human_time, span_steps
from bessemer.spec.rl import RL_OBJECTIVES
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

EVALUATIONS_PER_RUN = 20
SAVES_PER_RUN = 20
SAVE_EVERY_S = 600.0
LOOK_EVERY_STEPS, LOOK_EVERY_S = 50, 15.0
COPY_EVERY_STEPS, COPY_LEAST_STEPS = 32, 16
REWARM = "Ibrahim et al. 2024: a lower peak forgets less"
LION, LION_SHARE = "Chen et al. 2023: a third to a tenth of AdamW's", 0.2
HALF = ("bf16", "fp8", "fp8_rowwise")
CHINCHILLA = "Chinchilla 2022, approach 1"
# Schedules that rise by themselves.
WARMUP_SHARES = {"one_cycle": (0.3, "the rise of one_cycle: 30 % of the steps"),
                 "cyclical": (0.0, "cyclical begins at the floor")}  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """How often something happens: every so many steps or seconds, whichever comes first."""

    steps: int | None
    seconds: float | None


@dataclass(frozen=True)
class TrainPlan:
    """The settings of the training loop, all decided."""

    context: int
    batch_rows: tuple[tuple[int, int], ...]  # (from_step, sequences)
    micro_rows: int
    activations: str | float  # recomputation: none, selective, full, or the share of activations that is saved
    total_steps: int
    peak_lr: float
    warmup_steps: int
    precision: str
    weights: str
    compile: str  # off, block or chain
    evaluate: Interval
    evaluate_tokens: int
    save: Interval
    look: Interval
    copy: Interval
    mixtures: tuple[tuple[int, Mixture], ...]  # (start position in sequences, mixture)
    adapter: tuple[int, float] | None = None  # rank and alpha

    @property
    def compiled(self) -> bool:
        return self.compile != "off"

    def to_json(self) -> str:
        values = asdict(self)
        if self.adapter is None:  # as in earlier versions
            del values["adapter"]
        return json.dumps(values, indent=1)

    @staticmethod
    def from_json(text: str) -> TrainPlan:
        data = json.loads(text)
        if data.get("adapter"):
            data["adapter"] = tuple(data["adapter"])
        data["batch_rows"] = tuple((start, rows) for start, rows in data["batch_rows"])
        for key in ("evaluate", "save", "look", "copy"):
            data[key] = Interval(**data[key])
        data["mixtures"] = tuple(
            (start, Mixture(tuple(m["names"]), tuple(m["counts"]), m["block"])) for start, m in data["mixtures"]
        )
        return TrainPlan(**data)


def vocab_limit(width: int) -> int:
    """The largest vocabulary that `auto` chooses for a model of that width."""
    return 4096 if width < 256 else 65_536


def decide_vocab(spec: RunSpec, corpus_bytes: int, plan: Plan) -> int:
    """Vocabulary size of a tokenizer that is trained for the run."""
    width = model_shape(spec.model, vocab=0).width
    vocab = 512
    while vocab < 65_536 and corpus_bytes > vocab * 16_000:
        vocab *= 2
    reason = f"{human_count(corpus_bytes)} bytes of text: about 16,000 bytes for each token to learn from"
    if vocab > (limit := vocab_limit(width)):
        vocab, reason = limit, f"a width of {width} would spend most of its parameters on a larger embedding"
    return int(plan.choose("tokenizer.vocab", spec.tokenizer.vocab, (vocab, reason, "rule"), EMPIRICAL))


def decide_context(spec: RunSpec, shape: ModelShape, plan: Plan) -> int:
    parameters = shape.parameters
    context = 256 if parameters < 20e6 else 1024 if parameters < 500e6 else 4096
    decided = (context, f"usual for a model of {human_count(parameters)} parameters", "rule")
    if shape.max_positions and context > shape.max_positions:
        decided = (shape.max_positions, "the most positions that the model has", "model")
    return int(plan.choose("data.context", spec.data.context, decided, EMPIRICAL if decided[2] == "rule" else ""))


def faster_precision(rates: dict[str, float]) -> str:
    """bf16 if it trains at least 1.1 times as fast as fp32; for less the rounding is not worth it."""
    return "bf16" if rates.get("bf16", 0.0) > 1.1 * rates["fp32"] else "fp32"


def decide_precision(spec: RunSpec, machine: Machine, plan: Plan, previous: Plan | None = None) -> str:
    """bf16 if it is measured to be faster on this device, else fp32. A resumed run keeps its first decision."""
    if spec.precision != "auto":
        return str(plan.add_requested("precision", spec.precision))
    if spec.memory.kept != "fp32":
        return str(plan.add("precision", "bf16", f"memory.weights {spec.memory.kept} keeps weights in it", "rule"))
    if precision := plan.keep("precision", spec.precision, previous):
        return str(precision)
    if machine.training:
        value = faster_precision(machine.training)
        rates = " and ".join(f"{key} {rate:,.0f}" for key, rate in machine.training.items())
        reason = f"two layers of this shape train at {rates} tokens/s here, in the comparison least in favour of bf16"
        return str(plan.add("precision", value, reason, "measured"))
    fp32, bf16 = machine.matmul["fp32"], machine.matmul.get("bf16", 0.0)
    value = "bf16" if bf16 > 1.3 * fp32 else "fp32"
    reason = f"matmul here: bf16 {bf16 / 1e9:,.1f} and fp32 {fp32 / 1e9:,.1f} GFLOP/s, {machine.source}"
    return str(plan.add("precision", value, reason, "measured"))


def decide_weights(
    spec: RunSpec, shape: ModelShape, machine: Machine, precision: str, plan: Plan, previous: Plan | None = None
) -> str:
    """The format of the weights. A resumed run keeps the format of its checkpoints."""
    key = "memory.weights"
    # Routers of experts, state-space models and modules of other libraries need fp32 weights.
    dense = not (shape.wrapped or shape.moe or shape.mamba or shape.decoder_layers)
    if spec.memory.weights != "auto":
        if spec.memory.weights != "fp32" and not dense:
            kinds = "experts, state spaces, encoder-decoders and other libraries' models"
            raise UserError(f"{key}: {kinds} keep fp32 weights: remove {spec.memory.weights}, or write fp32")
        return str(plan.add_requested(key, spec.memory.weights))
    if previous is not None:
        return str(plan.keep(key, "auto", previous) or "fp32")
    splits = spec.parallel.engine == "torch" and spec.optimizer.name in ("adamw", "muon")
    splits &= not any(group.betas for group in spec.optimizer.groups.values())  # which the split step does not have
    if machine.device != "cuda" or precision not in HALF or not splits or not dense:
        return "fp32"
    saved = ", 14 bytes a parameter instead of 18" if spec.optimizer.name == "adamw" else ""
    reason = f"fp32 split into bf16 and 16 low bits: as exact, no casts{saved}"
    return str(plan.add(key, "kahan", reason, "rule", "established"))


def with_weights(spec: RunSpec, weights: str) -> RunSpec:
    """The spec with the decided format of its weights."""
    return spec.model_copy(update={"memory": spec.memory.model_copy(update={"weights": weights})})


def decide_compile(spec: RunSpec, shape: ModelShape, machine: Machine, plan: Plan, layout: Layout = ONE_PROCESS) -> str:
    """Whether and how blocks are compiled."""
    if spec.compile != "auto":
        return str(plan.add_requested("compile", spec.compile))
    gathered = spec.parallel.engine == "deepspeed" and spec.parallel.deepspeed.zero == 3  # by hooks, layer by layer
    if machine.device != "cuda" or shape.wrapped or gathered:
        return "off"
    mode = "chain" if layout.size == 1 and spec.parallel.engine != "deepspeed" else "block"
    reason = "fuses memory-bound work; compiling the full model at once was slower"
    plan.add("compile", mode, reason, "rule", EMPIRICAL)
    return mode


def _batch_rows(key: str, batch: int, context: int) -> int:
    """Sequences in a batch of `batch` tokens."""
    if batch < context:
        raise UserError(
            f"{key}: {batch} tokens are fewer than one sequence of {context}: write at least {context}, "
            f"or data.context: {batch}"
        )
    return round(batch / context)


def decide_batch(
    spec: RunSpec, shape: ModelShape, context: int, tokens: int, plan: Plan, previous: Plan | None = None,
    document_tokens: float = 0.0,
) -> int:  # fmt: skip
    """Sequences per batch. `document_tokens` is the mean length of a document with its share of padding."""
    key = "budget.batch"
    batch = plan.keep(key, spec.budget.batch, previous)
    if batch is None:
        if spec.objective == "classify":
            recipe = classify(shape.parameters, is_continued(spec))
            rows = recipe.value.settings["batch_rows"]
            batch = plan.choose(key, spec.budget.batch, (rows * context, f"{rows} rows", recipe.source), recipe.basis)
        elif spec.objective == "sft":
            length, recipe = document_tokens or context, sft(shape.parameters)
            conversations = sft_batch_rows(tokens / length)
            reason = (
                f"{conversations} conversations of {length:,.0f} tokens: at most {recipe.value.settings['batch_rows']}"
            )
            reason += f", fewer if the run would have less than {SFT_STEPS} steps"
            value = max(1, round(conversations * length / context)) * context
            batch = plan.choose(key, spec.budget.batch, (value, reason, recipe.source), recipe.basis)
        elif spec.objective in RL_OBJECTIVES:
            rows = spec.rl.step_prompts * spec.rl.samples
            reason = f"{spec.rl.step_prompts} prompts x {spec.rl.samples} answers; several share a row"
            batch = plan.add(key, rows * context, reason, "asked")
        elif spec.objective in ANSWER_OBJECTIVES:
            recipe = fine_tuning(spec, shape)
            most = recipe.value.settings["batch_rows"]
            rows = min(most, sft_batch_rows(tokens / context))
            kind = "answers" if spec.objective == "kto" else "pairs"
            reason = f"{rows} {kind}: at most {most}"
            reason += f", fewer if the run would have less than {SFT_STEPS} steps"
            batch = plan.choose(key, spec.budget.batch, (rows * context, reason, recipe.source), recipe.basis)
        else:
            answer = batch_tokens(shape.parameters, tokens)
            decided = (max(4, round(answer.value / context)) * context, answer.reason, answer.source)
            batch = plan.choose(key, spec.budget.batch, decided, answer.basis)
    rows = _batch_rows(key, int(batch), context)
    if rows * context != batch:
        plan.add(key, rows * context, f"{batch:,} rounded to {rows} whole sequences of {context}", "asked")
    return rows


def decide_tokens(spec: RunSpec, shape: ModelShape, corpus_tokens: int, plan: Plan) -> int | None:
    """Length of the run in tokens; None if the spec gives it in steps."""
    budget = spec.budget
    if budget.steps is not None:
        plan.add_requested("budget.steps", budget.steps)
        return None
    if budget.epochs is not None:
        reason = f"{budget.epochs:g} passes over {corpus_tokens:,} training tokens"
        return int(plan.add("budget.tokens", max(1, int(budget.epochs * corpus_tokens)), reason, "asked"))
    if spec.objective in RL_OBJECTIVES and budget.tokens == "auto":
        reason = "one pass over the prompts; budget.steps or epochs sets another length"
        return int(plan.add("budget.tokens", corpus_tokens, reason, "rule", "open question"))
    if spec.objective in ("classify", "sft", *ANSWER_OBJECTIVES):
        recipe = fine_tuning(spec, shape)
        epochs = recipe.value.settings["epochs"]
        passes = (epochs * corpus_tokens, f"{epochs} passes over the rows: {recipe.reason}", recipe.source)
        return int(plan.choose("budget.tokens", budget.tokens, passes, recipe.basis))
    reason = f"20 tokens for each of {human_count(shape.parameters)} parameters"
    decided = (20 * shape.parameters, reason, CHINCHILLA)
    return int(plan.choose("budget.tokens", budget.tokens, decided, "established"))


def decide_lr(
    spec: RunSpec, shape: ModelShape, tokens: int, batch: int, plan: Plan, previous: Plan | None = None
) -> float:
    """The peak learning rate for a batch of `batch` tokens. Trained weights get a third of the rate for random weights:
    a higher rate adapts faster and forgets more."""
    key, name = "optimizer.lr", spec.optimizer.name
    previous_lr = plan.keep(key, spec.optimizer.lr, previous)
    if previous_lr is not None:
        return float(previous_lr)
    continued = is_continued(spec)
    if spec.objective == "classify" and continued and name in ("adamw", "adam"):
        recipe = classify(shape.parameters, trained=True)
        rate = (recipe.value.settings["learning_rate"], "usual for a new head on trained weights", recipe.source)
        return float(plan.choose(key, spec.optimizer.lr, adapter_rate(spec, *rate), recipe.basis))
    large = shape.parameters >= SFT_SMALLEST
    released = spec.objective in PREFERENCES or (spec.objective in ("sft", "reward") and large)
    if spec.objective in RL_OBJECTIVES and large and name in ("adamw", "adam"):
        recipe = ppo() if spec.objective == "ppo" else grpo(shape.parameters)
        rate = (recipe.value.settings["learning_rate"], "usual for answers sampled from the model", recipe.source)
        return float(plan.choose(key, spec.optimizer.lr, adapter_rate(spec, *rate), recipe.basis))
    if released and continued and name in ("adamw", "adam"):
        recipe = fine_tuning(spec, shape)
        rate = (recipe.value.settings["learning_rate"], "of released models, by size", recipe.source)
        return float(plan.choose(key, spec.optimizer.lr, adapter_rate(spec, *rate), recipe.basis))
    if name == "muon" and not continued:
        answer = muon_rate(shape.parameters, spec.optimizer.muon.scale)
        rate = (answer.value, answer.reason, answer.source)
        return float(plan.choose(key, spec.optimizer.lr, adapter_rate(spec, *rate), answer.basis))
    # The laws are not valid for the few tokens of a continued run.
    tokens = max(tokens, 20 * shape.parameters) if continued else tokens
    answer, usual = learning_rate(shape.parameters, tokens), batch_tokens(shape.parameters, tokens).value
    value, reasons, sources, basis = answer.value, [answer.reason], [answer.source], answer.basis
    if batch < 0.9 * usual:
        smaller = rate_for_batch(value, usual, batch)
        value, basis = smaller.value, max(basis, smaller.basis, key=BASES.index)
        reasons.append(smaller.reason)
        sources.append(smaller.source)
    for applies, share, reason, source in (
        (name == "lion", LION_SHARE, "a fifth of that for Lion, whose updates have full size", LION),
        (continued, 1 / 3, "a third of that for trained weights", REWARM),
    ):
        if applies:
            value *= share
            reasons.append(reason)
            sources.append(source)
    decided = (float(f"{max(LIMITS_LR[0], value):.2g}"), "; ".join(reasons), "; ".join(sources))
    return float(plan.choose(key, spec.optimizer.lr, adapter_rate(spec, *decided), basis))


def fine_tuning(spec: RunSpec, shape: ModelShape | None) -> RecipeAnswer[Tuning]:
    """The settings of the objective of fine-tuning, for a shape if it is known."""
    parameters = shape.parameters if shape else 1e9
    if spec.objective == "classify":
        return classify(parameters, is_continued(spec))
    return {"sft": sft, "dpo": dpo, "kto": dpo, "reward": reward}[spec.objective](parameters)


def is_continued(spec: RunSpec) -> bool:
    """Whether the run starts from trained weights."""
    return spec.start_from is not None or spec.model.hf is not None


def decide_warmup(spec: RunSpec, total_steps: int, step_tokens: int, plan: Plan) -> int:
    setting = spec.schedule.warmup
    if setting != "auto":
        steps = span_steps(setting, total_steps, step_tokens)
        steps = int(plan.add("schedule.warmup", steps, f"{setting} in steps", "asked"))
        if steps >= total_steps:
            raise UserError(f"schedule.warmup: {steps:,} steps are the whole run of {total_steps:,}: write 2%")
        return steps
    if spec.schedule.kind in WARMUP_SHARES:
        share, reason = WARMUP_SHARES[spec.schedule.kind]
        return int(plan.add("schedule.warmup", round(share * total_steps), reason, "rule"))
    if spec.objective in ("sft", *ANSWER_OBJECTIVES):
        recipe = fine_tuning(spec, None)
        share = recipe.value.settings["warmup"]
        steps = max(1, round(share * total_steps))
        return int(plan.add("schedule.warmup", steps, f"{share:.0%} of the steps", recipe.source, recipe.basis))
    answer = warmup_steps(total_steps)
    return int(plan.add("schedule.warmup", answer.value, answer.reason, answer.source, answer.basis))


def decide_interval(
    key: str, setting: int | str, total_steps: int, per_run: int, seconds: float | None, plan: Plan
) -> Interval:
    """`auto` is `per_run` times per run, and at least every `seconds` if given."""
    if isinstance(setting, int):
        plan.add_requested(key, f"{setting} steps")
        return Interval(setting, None)
    if setting != "auto":
        plan.add_requested(key, setting)
        return Interval(None, float(setting.split()[0]))
    steps = max(1, -(-total_steps // per_run))
    limit = f" or {human_time(seconds)}, whichever is sooner" if seconds else ""
    plan.add(key, f"{steps} steps{limit}", f"{per_run} times in the run", "rule", "open question")
    return Interval(steps, seconds)


def decide_guard(spec: RunSpec, plan: Plan) -> tuple[Interval, Interval]:
    """How often the guard measures layer statistics, and how often it snapshots the state in memory."""
    look, copy = spec.guard.look_every, spec.guard.copy_every
    if look == "auto":
        # 26 ms at 18M and 35 ms at 1B parameters on an H200: the limits keep it near 0.2 % of the time.
        reason = "costs about a forward pass of two rows"
        every = f"{LOOK_EVERY_STEPS} steps, at most every {LOOK_EVERY_S:.0f} s"
        plan.add("guard.look_every", every, reason, "rule", EMPIRICAL)
    if copy == "auto":
        reason = "later steps confirm the older of two snapshots"
        plan.add("guard.copy_every", f"{COPY_EVERY_STEPS} steps", reason, "rule", EMPIRICAL)
    elif isinstance(copy, int) and copy < COPY_LEAST_STEPS:
        raise UserError(
            f"guard.copy_every: {copy} steps leave no time to confirm a snapshot: write {COPY_LEAST_STEPS} or more"
        )
    intervals = [Interval(LOOK_EVERY_STEPS, LOOK_EVERY_S), Interval(COPY_EVERY_STEPS, None)]
    for i, (key, setting) in enumerate((("guard.look_every", look), ("guard.copy_every", copy))):
        if setting != "auto":
            intervals[i] = decide_interval(key, setting, 0, 1, None, plan)
    return intervals[0], intervals[1]


def decide_training(
    spec: RunSpec, shape: ModelShape, context: int, machine: Machine, sources: Mapping[str, SourceSize],
    held_out_tokens: int, plan: Plan, previous: Plan | None = None, layout: Layout = ONE_PROCESS,
) -> TrainPlan:  # fmt: skip
    """All settings of the training loop, once the data is counted. `previous` is the plan of a resumed run."""
    precision = decide_precision(spec, machine, plan, previous)
    weights = "fp32"  # the default of sharded weights: bf16 and fp32 are not sharded together
    if (layout.size == 1 and not spec.parallel.shard.alone) or spec.memory.weights != "auto":
        weights = decide_weights(spec, shape, machine, precision, plan, previous)
    compile = decide_compile(spec, shape, machine, plan, layout)
    train_tokens = sum(sources[name].tokens for name in sources_used(spec))
    budget_tokens = decide_tokens(spec, shape, train_tokens, plan)
    estimate = budget_tokens if budget_tokens is not None else 20 * shape.parameters
    documents = sum(sources[name].documents for name in sources_used(spec))
    rows = decide_batch(spec, shape, context, estimate, plan, previous, train_tokens / documents if documents else 0.0)
    phases: tuple[tuple[int, int], ...] = ((0, rows),)
    for i, change in enumerate(spec.budget.batch_changes):
        size = _batch_rows(f"budget.batch_changes.{i}.batch", change.batch, context)
        phases = (*phases, (change.from_step, size))
    if budget_tokens is None:
        assert spec.budget.steps is not None
        total_steps = spec.budget.steps
        tokens = tokens_after(phases, total_steps) * context
    else:
        total_steps, tokens = steps_for(phases, -(-budget_tokens // context)), budget_tokens
    reason = f"{human_count(tokens)} tokens in batches of {rows * context:,}"
    plan.add("steps", total_steps, reason, "counted")
    mixtures = decide_mixtures(spec, context, sources, tokens, plan, previous)
    smallest = -(-min(size for start, size in phases if start < total_steps) // layout.dp)
    smallest = max(1, smallest // layout.pp)  # a pipeline needs a micro-batch per stage
    dense = compile != "off" and not (shape.moe or shape.mamba)
    passes = Passes(context // layout.cp, 1, precision, "none", dense, machine.device, shards=layout.held)
    passes = decide_micro_batch(with_weights(spec, weights), shape, passes, smallest, machine, plan, previous)
    adapter = decide_adapter(spec, shape, min(tokens, train_tokens), plan, previous)
    peak_lr = decide_lr(spec, shape, tokens, rows * context, plan, previous)
    warmup = decide_warmup(spec, total_steps, rows * context, plan)
    every = spec.evaluate.every
    evaluate = decide_interval("evaluate.every", every, total_steps, EVALUATIONS_PER_RUN, None, plan)
    evaluate_tokens = decide_evaluation(spec, context, tokens, held_out_tokens, plan, previous)
    every = spec.checkpoint.every
    save = decide_interval("checkpoint.every", every, total_steps, SAVES_PER_RUN, SAVE_EVERY_S, plan)
    look, copy = decide_guard(spec, plan)
    reason = f"{human_count(tokens)} of {human_count(train_tokens)} training tokens"
    plan.add("epochs", round(tokens / max(1, train_tokens), 3), reason, "counted")
    return TrainPlan(
        context=context, batch_rows=phases, micro_rows=passes.rows, activations=passes.activations,
        total_steps=total_steps, peak_lr=peak_lr, warmup_steps=warmup, precision=precision, weights=weights,
        compile=compile, evaluate=evaluate, evaluate_tokens=evaluate_tokens, save=save, look=look, copy=copy,
        mixtures=mixtures, adapter=adapter,
    )  # fmt: skip


def decide_evaluation(
    spec: RunSpec, context: int, tokens: int, held_out_tokens: int, plan: Plan, previous: Plan | None = None
) -> int:
    """Held-out tokens of one evaluation. A resumed run keeps them, so that its losses stay comparable."""
    previous_tokens = plan.keep("evaluate.tokens", spec.evaluate.tokens, previous)
    if previous_tokens is not None:
        return int(previous_tokens)
    # A forward pass is a third of a training step: 15 % of the tokens between two evaluations are 5 % of the time.
    wanted = max(8 * context, int(0.15 * tokens / EVALUATIONS_PER_RUN))
    reason = "evaluations take about 5 % of the time"
    if wanted > held_out_tokens:
        wanted, reason = held_out_tokens, f"the full held-out part: {reason} or less"
    return int(plan.choose("evaluate.tokens", spec.evaluate.tokens, (wanted, reason, "rule"), "open question"))


def sketch_run(spec: RunSpec) -> tuple[ScheduleSketch, list[str]]:
    """The length, rate and warm-up of a run as far as the spec alone decides them, and what was assumed for the rest.
    For a plot of the schedule before any data is counted."""
    budget, context, notes = spec.budget, spec.data.context, []
    context = context if isinstance(context, int) else 1
    batch = budget.batch if isinstance(budget.batch, int) else None
    rows = max(1, (batch or 1) // context)
    changes = [(change.from_step, max(1, change.batch // context)) for change in budget.batch_changes]
    phases = ((0, rows), *(changes if batch else ()))
    steps = budget.steps
    if steps is None and batch and isinstance(budget.tokens, int):
        steps = steps_for(phases, -(-budget.tokens // context))
    if steps is None:
        steps = 1000
        notes.append("steps: assumed 1,000, since the spec leaves the length or the batch to the plan")
    peak = spec.optimizer.lr
    if not isinstance(peak, float):
        peak = 1.0
        notes.append("learning rate: as a share of the peak, which the plan decides")
    warmup = decide_warmup(spec, steps, rows * context, Plan())
    return ScheduleSketch(peak, warmup, steps, phases, context), notes
