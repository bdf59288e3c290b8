"""The rules behind `auto`. Each function decides one group of settings and writes its reasons into the plan.

Learning rate and batch follow the compute laws of DeepSeek LLM (2024): lr = 0.3118 C^-0.125, batch = 0.2920 C^0.3271
tokens, C the run's FLOPs. They were fitted between 1e17 and 2e19 and hold well below that on the small models measured
here; the learning rate is bounded to [1e-5, 1e-2].
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from bessemer.errors import UserError
from bessemer.plan.decision import Plan
from bessemer.plan.machine import Machine
from bessemer.spec.mixture import Mixture, quantise
from bessemer.spec.quantity import human_count, human_time, span_steps
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

EVALUATIONS_PER_RUN = 20
SAVES_PER_RUN = 20
SAVE_EVERY_S = 600.0
DEEPSEEK = "DeepSeek LLM 2024, scaling of hyperparameters"


@dataclass(frozen=True)
class Interval:
    """How often something happens: by steps, by seconds, or whichever comes first."""

    steps: int | None
    seconds: float | None


@dataclass(frozen=True)
class TrainPlan:
    """The numbers that the loop needs, all decided."""

    context: int
    batch_rows: tuple[tuple[int, int], ...]  # (from_step, sequences)
    micro_rows: int
    total_steps: int
    peak_lr: float
    warmup_steps: int
    precision: str
    evaluate: Interval
    evaluate_tokens: int
    save: Interval
    mixtures: tuple[tuple[int, Mixture], ...]  # (start position in sequences, mixture)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> TrainPlan:
        data = json.loads(text)
        data["batch_rows"] = tuple((start, rows) for start, rows in data["batch_rows"])
        data["evaluate"], data["save"] = Interval(**data["evaluate"]), Interval(**data["save"])
        data["mixtures"] = tuple(
            (start, Mixture(tuple(m["names"]), tuple(m["counts"]), m["block"])) for start, m in data["mixtures"]
        )
        return TrainPlan(**data)


def decide_vocab(spec: RunSpec, corpus_bytes: int, plan: Plan) -> int:
    """Vocabulary of a tokenizer that is to be trained."""
    width = spec.model.width or 0
    vocab = 512
    while vocab < 65_536 and corpus_bytes > vocab * 16_000:
        vocab *= 2
    reason = f"{human_count(corpus_bytes)} bytes of text: about 16,000 bytes for each token to learn from"
    if width and width < 256 and vocab > 4096:
        vocab, reason = 4096, f"a width of {width} would spend most of its parameters on a larger embedding"
    return int(plan.choose("tokenizer.vocab", spec.tokenizer.vocab, (vocab, reason, "rule")))


def decide_context(spec: RunSpec, parameters: int, plan: Plan) -> int:
    context = 256 if parameters < 20e6 else 1024 if parameters < 500e6 else 4096
    decided = (context, f"usual for a model of {human_count(parameters)} parameters", "rule")
    return int(plan.choose("data.context", spec.data.context, decided))


def decide_precision(spec: RunSpec, machine: Machine, plan: Plan, previous: Plan | None = None) -> str:
    """bf16 where it is measured to be faster on this device, else fp32. A resumed run keeps what was measured first."""
    if spec.precision != "auto":
        return str(plan.asked("precision", spec.precision))
    if previous is not None and "precision" in previous.decisions:
        plan.decisions["precision"] = previous.decisions["precision"]
        return str(previous.value("precision"))
    if machine.training:
        value = "bf16" if machine.training["bf16"] > 1.1 * machine.training["fp32"] else "fp32"
        rates = " and ".join(f"{key} {rate:,.0f}" for key, rate in machine.training.items())
        return str(plan.add("precision", value, f"two layers of this shape train at {rates} tokens/s here", "measured"))
    fp32, bf16 = machine.matmul["fp32"], machine.matmul.get("bf16", 0.0)
    value = "bf16" if bf16 > 1.3 * fp32 else "fp32"
    reason = f"matmul here: bf16 {bf16 / 1e9:,.1f} and fp32 {fp32 / 1e9:,.1f} GFLOP/s"
    return str(plan.add("precision", value, reason, "measured"))


def decide_mixtures(spec: RunSpec, context: int, plan: Plan) -> tuple[tuple[int, Mixture], ...]:
    """Weights to integer counts per block, with the shares that are really given."""
    first = {name: source.weight for name, source in spec.data.sources.items() if source.weight > 0}
    phases = [(0, first)]
    for phase in spec.data.phases:
        phases.append((phase.start // context, {n: w for n, w in phase.weights.items() if w > 0}))
    mixtures = []
    for start, weights in phases:
        mixture = quantise(weights)
        shares = {name: f"{count}/{mixture.block}" for name, count in zip(mixture.names, mixture.counts, strict=True)}
        worst = max(abs(count / mixture.block * sum(weights.values()) / weights[name] - 1) for name, count in zip(mixture.names, mixture.counts, strict=True))
        plan.add(f"data.mixture@{start * context}", shares, f"sequences per block; shares within {worst:.2%} of the weights asked", "rule")
        mixtures.append((start, mixture))
    return tuple(mixtures)


def decide_batch(spec: RunSpec, shape: ModelShape, context: int, tokens: int, plan: Plan) -> int:
    compute = shape.flops_per_token(context) * tokens
    law = 0.2920 * compute**0.3271
    rows = max(4, min(round(law / context), max(4, tokens // context // 100)))
    decided = (rows * context, f"{compute:.2g} FLOPs in all ask for about {human_count(law)} tokens", DEEPSEEK)
    batch = int(plan.choose("budget.batch", spec.budget.batch, decided))
    rows = max(1, round(batch / context))
    if rows * context != batch:
        plan.add("budget.batch", rows * context, f"{batch:,} rounded to {rows} whole sequences of {context}", "asked")
    return rows


def decide_tokens(spec: RunSpec, shape: ModelShape, corpus_tokens: int, plan: Plan) -> int | None:
    """Length of the run in tokens; None when it is given in steps."""
    budget = spec.budget
    if budget.steps is not None:
        plan.asked("budget.steps", budget.steps)
        return None
    if budget.epochs is not None:
        reason = f"{budget.epochs:g} passes over {corpus_tokens:,} training tokens"
        return int(plan.add("budget.tokens", int(budget.epochs * corpus_tokens), reason, "asked"))
    tokens = 20 * shape.parameters
    decided = (tokens, f"20 tokens for each of {human_count(shape.parameters)} parameters", "Chinchilla 2022, approach 1")
    return int(plan.choose("budget.tokens", budget.tokens, decided))


def decide_micro_rows(
    spec: RunSpec, shape: ModelShape, context: int, rows: int, machine: Machine, plan: Plan, previous: Plan | None = None
) -> int:
    """Sequences in one forward pass: what fits in a third of the device's memory, and divides the batch."""
    key = "budget.micro_batch"
    if previous is not None and spec.budget.micro_batch == "auto" and key in previous.decisions:
        kept = int(previous.value(key))
        if kept <= rows:  # another split of the batch would change the last digits of a resumed run
            plan.decisions[key] = previous.decisions[key]
            return kept
    layer = 34 * shape.width + 4 * shape.ffn
    per_token = 4 * (shape.layers * layer // 4 + 3 * shape.vocab)
    budget = machine.memory_bytes / 3 - 16 * shape.parameters
    fits = max(1, int(budget / (per_token * context)))
    cap = max(1, 16_384 // context) if machine.device == "cpu" else fits
    best = max(n for n in range(1, min(rows, fits, cap) + 1) if rows % n == 0)
    reason = f"about {human_count(per_token * context * best)} bytes of activations, and it divides the batch of {rows}"
    chosen = int(plan.choose(key, spec.budget.micro_batch, (best, reason, "estimate")))
    if chosen > rows:
        raise UserError(f"budget.micro_batch: {chosen} sequences exceed the batch of {rows}: write {rows} or less")
    return chosen


def decide_lr(spec: RunSpec, shape: ModelShape, context: int, tokens: int, plan: Plan) -> float:
    compute = shape.flops_per_token(context) * tokens
    lr = min(1e-2, max(1e-5, 0.3118 * compute**-0.125))
    decided = (float(f"{lr:.2g}"), f"for {compute:.2g} FLOPs", DEEPSEEK)
    return float(plan.choose("optimizer.lr", spec.optimizer.lr, decided))


def decide_warmup(spec: RunSpec, total_steps: int, step_tokens: int, plan: Plan) -> int:
    written = spec.schedule.warmup
    if written != "auto":
        steps = span_steps(written, total_steps, step_tokens)
        steps = int(plan.add("schedule.warmup", steps, f"{written} in steps", "asked"))
        if steps >= total_steps:
            raise UserError(f"schedule.warmup: {steps} steps of warm-up leave nothing of a run of {total_steps}: write 2%")
        return steps
    steps = min(max(1, round(0.02 * total_steps)), 2000)
    return int(plan.add("schedule.warmup", steps, "2 % of the run, at most 2,000 steps", "rule"))


def decide_interval(key: str, written: int | str, total_steps: int, per_run: int, seconds: float | None, plan: Plan) -> Interval:
    if isinstance(written, int):
        plan.asked(key, f"{written} steps")
        return Interval(written, None)
    if written != "auto":
        plan.asked(key, written)
        return Interval(None, float(written.split()[0]))
    steps = max(1, -(-total_steps // per_run))
    limit = f" or {human_time(seconds)}, whichever is sooner" if seconds else ""
    plan.add(key, f"{steps} steps{limit}", f"{per_run} times in the run", "rule")
    return Interval(steps, seconds)


def decide_training(
    spec: RunSpec, shape: ModelShape, context: int, machine: Machine, train_tokens: int, held_out_tokens: int,
    plan: Plan, previous: Plan | None = None,
) -> TrainPlan:
    """Everything the loop needs, for data that is already counted. `previous` is the plan of the run that is resumed."""
    precision = decide_precision(spec, machine, plan, previous)
    mixtures = decide_mixtures(spec, context, plan)
    tokens = decide_tokens(spec, shape, train_tokens, plan)
    estimate = tokens if tokens is not None else 20 * shape.parameters
    rows = decide_batch(spec, shape, context, estimate, plan)
    phases = [(0, rows)]
    for change in spec.budget.batch_changes:
        phases.append((change.from_step, max(1, round(change.batch / context))))
    if tokens is None:
        assert spec.budget.steps is not None
        total_steps = spec.budget.steps
        tokens = tokens_after(tuple(phases), total_steps) * context
    else:
        total_steps = steps_for(tuple(phases), -(-tokens // context))
    plan.add("steps", total_steps, f"{human_count(tokens)} tokens in batches of {rows * context:,}", "counted")
    micro_rows = decide_micro_rows(spec, shape, context, rows, machine, plan, previous)
    peak_lr = decide_lr(spec, shape, context, tokens, plan)
    warmup = decide_warmup(spec, total_steps, rows * context, plan)
    evaluate = decide_interval("evaluate.every", spec.evaluate.every, total_steps, EVALUATIONS_PER_RUN, None, plan)
    # A forward pass is a third of a training step, so 15 % of the tokens between two evaluations is 5 % of the time.
    wanted = max(8 * context, min(held_out_tokens, int(0.15 * tokens / EVALUATIONS_PER_RUN)))
    decided = (wanted, "evaluations take about 5 % of the time, on at most the held-out part", "rule")
    evaluate_tokens = int(plan.choose("evaluate.tokens", spec.evaluate.tokens, decided))
    save = decide_interval("checkpoint.every", spec.checkpoint.every, total_steps, SAVES_PER_RUN, SAVE_EVERY_S, plan)
    epochs = tokens / max(1, train_tokens)
    plan.add("epochs", round(epochs, 3), f"{human_count(tokens)} of {human_count(train_tokens)} training tokens", "counted")
    return TrainPlan(
        context, tuple(phases), micro_rows, total_steps, peak_lr, warmup, precision,
        evaluate, evaluate_tokens, save, mixtures,
    )


def tokens_after(phases: tuple[tuple[int, int], ...], steps: int) -> int:
    """Sequences read by the first `steps` steps."""
    total = 0
    for i, (start, rows) in enumerate(phases):
        end = phases[i + 1][0] if i + 1 < len(phases) else steps
        total += max(0, min(end, steps) - start) * rows
    return total


def steps_for(phases: tuple[tuple[int, int], ...], sequences: int) -> int:
    """Steps needed to read that many sequences."""
    done = 0
    for i, (start, rows) in enumerate(phases):
        room = (phases[i + 1][0] - start) * rows if i + 1 < len(phases) else None
        if room is None or done + room >= sequences:
            return max(1, start + -(-(sequences - done) // rows))
        done += room
    raise AssertionError("unreachable: the last phase has no end")
