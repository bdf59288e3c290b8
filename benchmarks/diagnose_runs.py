"""Tiny real training runs with planted faults, for benchmarks/diagnose.py.

A character model of some thousand parameters learns Python source. Faults change its data, loss, optimizer or loop,
never the numbers afterwards. Each run gives its records; `diagnose_formats` writes them.
"""

from __future__ import annotations

import copy
import math
import random
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT = 16
WINDOW = 6
VOCABULARY = 98  # printable ASCII, newline, one for the rest
VALIDATION_ROWS = 128
Record = dict[str, float]


@dataclass
class TinyRun:
    """What a run wrote, and what is wrong with it: the causes that count as right, none for a healthy run."""

    kind: str
    right: tuple[str, ...]
    records: list[Record]
    settings: dict[str, Any]
    restarts: list[int] = field(default_factory=list)
    total: int = 0


@dataclass
class Plan:
    """The settings of a run; a fault changes them or hooks into the loop."""

    seed: int
    steps: int = 300
    lr: float = 3e-3
    warmup: int = 15
    schedule: str = "cosine"
    schedule_steps: int = 0  # 0: as many as steps
    rows: int = 16
    accumulation: int = 1
    width: int = 32
    layers: int = 1
    clip: float = 1.0
    evaluate_every: int = 25
    precision: str = "fp32"
    characters: int = 400_000  # of training text
    loss_factor: float = 1.0
    restart_at: int = 0
    lose: tuple[str, ...] = ()  # at the restart: optimizer, schedule, position
    on_batch: Callable[[int, Tensor], Tensor] | None = None
    on_loss: Callable[[int, Tensor, Tensor], Tensor] | None = None
    on_model: Callable[[int, nn.Module], None] | None = None
    rate_factor: Callable[[int], float] | None = None
    wait_s: Callable[[int], float] | None = None
    stall_s: Callable[[int], float] | None = None
    order: Callable[[int, int], list[int]] | None = None
    on_validation: Callable[[int, Tensor], Tensor] | None = None
    memory: Callable[[int], None] | None = None
    frozen: bool = False
    half_weights: bool = False
    skip_nonfinite: bool = False
    labels: str = "next"
    scaled_fp16: bool = False


class TinyModel(nn.Module):
    """A causal language model of the last six characters (Bengio et al. 2003): embeddings, one or two hidden layers."""

    def __init__(self, width: int, layers: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 12)
        self.mix = nn.Linear(12 * WINDOW, 2 * width)
        self.hidden = nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(layers - 1))
        self.head = nn.Linear(2 * width, vocabulary, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x_BT: Tensor) -> Tensor:
        window = F.pad(x_BT, (WINDOW - 1, 0)).unfold(1, WINDOW, 1)
        h = F.gelu(self.mix(self.embedding(window).flatten(2)))
        for layer in self.hidden:
            h = h + F.gelu(layer(h))
        return self.head(h)


@cache
def text_ids() -> Tensor:
    """Python source as character ids."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text(errors="ignore") for path in sorted(stdlib.glob("*.py"))[:60])[:1_200_000]
    return torch.tensor([ord(c) - 31 if 31 < ord(c) < 127 else 96 if c == "\n" else 97 for c in text])


def rows_of(ids: Tensor, starts: list[int]) -> Tensor:
    return ids[torch.tensor(starts)[:, None] + torch.arange(CONTEXT + 1)]


def rate_at(plan: Plan, step: int) -> float:
    """The schedule: warm-up, then constant, linear or cosine to zero."""
    total = plan.schedule_steps or plan.steps
    if step < plan.warmup:
        return plan.lr * (step + 1) / plan.warmup
    share = min(1.0, (step - plan.warmup) / max(1, total - plan.warmup))
    factor = {"constant": 1.0, "linear": 1 - share, "cosine": 0.5 + 0.5 * math.cos(math.pi * share)}[plan.schedule]
    return plan.lr * factor


def train(plan: Plan) -> list[Record]:
    """Runs the loop of a plan: AdamW, clipping, accumulation, evaluations."""
    torch.manual_seed(plan.seed)
    draw = random.Random(plan.seed)
    ids = text_ids()
    training, held_out = ids[: plan.characters], ids[-60_000:]
    model: nn.Module = TinyModel(plan.width, plan.layers)
    if plan.half_weights:
        model.bfloat16()
    trained = copy.deepcopy(model) if plan.frozen else model
    optimizer = make_optimizer(trained)
    validation = rows_of(held_out, [draw.randrange(len(held_out) - CONTEXT - 1) for _ in range(VALIDATION_ROWS)])
    scale, skipped, offset, records = 2.0**14, 0, 0, []
    starts = list(range(0, len(training) - CONTEXT - 1, CONTEXT))
    per_step = plan.rows * plan.accumulation
    order = list(starts)
    position = 0
    draw.shuffle(order)
    for step in range(plan.steps):
        began = time.perf_counter()
        if plan.restart_at and step == plan.restart_at:
            optimizer = make_optimizer(trained) if "optimizer" in plan.lose else optimizer
            offset = step if "schedule" in plan.lose else 0
            if "position" in plan.lose:
                position = 0
        if plan.on_model:
            plan.on_model(step, model)
        rate = rate_at(plan, step - offset) * (plan.rate_factor(step) if plan.rate_factor else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        waiting = time.perf_counter()
        if plan.wait_s:
            time.sleep(plan.wait_s(step))
        if plan.order:
            chosen = plan.order(step, per_step)
        else:
            if position + per_step > len(order):
                draw.shuffle(order)
                position = 0
            chosen = order[position : position + per_step]
            position += per_step
        batch = rows_of(training, chosen)
        batch = plan.on_batch(step, batch) if plan.on_batch else batch
        waited = time.perf_counter() - waiting
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part in batch.chunk(plan.accumulation):
            loss = loss_of(plan, model, part, step)
            total += float(loss.detach())
            (loss * (scale if plan.scaled_fp16 else 1.0)).backward()
        record: Record = {"step": step + 1, "loss": total, "lr": rate, "data_wait_s": waited}
        parameters = [p for p in model.parameters() if p.grad is not None]
        if plan.scaled_fp16:
            # As a GradScaler with fp16 gradients does: what overflows half precision is not applied.
            overflow = any(not bool(p.grad.half().isfinite().all()) for p in parameters)
            for p in parameters:
                p.grad.div_(scale)
            record["loss_scale"] = scale
            scale = max(scale / 2, 2.0**-10) if overflow else scale * (2 if step % 100 == 99 else 1)
            skipped += overflow
            record["skipped_steps"] = skipped
        norm = float(nn.utils.clip_grad_norm_(parameters, plan.clip)) if parameters else 0.0
        record["grad_norm"] = norm
        if not (plan.scaled_fp16 and overflow) and (math.isfinite(norm) or not plan.skip_nonfinite):
            if plan.frozen:
                for p, q in zip(trained.parameters(), model.parameters(), strict=True):
                    p.grad = q.grad
            optimizer.step()
        if plan.stall_s:
            time.sleep(plan.stall_s(step))
        if plan.memory:
            plan.memory(step)
            import psutil

            record["memory_bytes"] = psutil.Process().memory_info().rss
        record["step_s"] = time.perf_counter() - began
        record["epoch"] = (step + 1) * per_step / len(starts)
        if plan.evaluate_every and (step + 1) % plan.evaluate_every == 0:
            rows = plan.on_validation(step, validation) if plan.on_validation else validation
            with torch.no_grad():
                record["validation_loss"] = float(loss_of(plan, model, rows, step, validation=True))
        records.append(record)
    return records


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


def loss_of(plan: Plan, model: nn.Module, rows: Tensor, step: int, validation: bool = False) -> Tensor:
    inputs = rows[:, :-1]
    labels = inputs if plan.labels == "same" else rows[:, 1:]
    if plan.labels == "masked":
        labels = torch.full_like(labels, -100)
    logits = model(inputs)
    if plan.on_loss and not validation:
        return plan.on_loss(step, logits, labels)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
    return loss if validation else loss * plan.loss_factor / plan.accumulation


def settings_of(plan: Plan) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "block_size": CONTEXT, "batch_size": plan.rows, "learning_rate": plan.lr,
        "gradient_accumulation_steps": plan.accumulation, "warmup_steps": plan.warmup, "max_grad_norm": plan.clip,
        "lr_scheduler_type": plan.schedule,
        "dtype": "fp16" if plan.scaled_fp16 else "bfloat16" if plan.half_weights else "float32",
        "n_layer": plan.layers, "n_embd": plan.width,
    }  # fmt: skip


def healthy_plan(draw: random.Random) -> Plan:
    """Settings that people use and that work: each run has its own."""
    layers = draw.choice([1, 1, 2])
    schedule = draw.choice(["cosine", "linear", "constant"])
    steps = draw.choice([160, 200, 280])
    return Plan(
        seed=draw.randrange(10**6), steps=steps, lr=10 ** draw.uniform(-2.8, -2.2), warmup=draw.choice([10, 20, 30]),
        schedule=schedule, rows=draw.choice([16, 24, 32]), accumulation=draw.choice([1, 1, 1, 2, 4]), layers=layers,
        width=draw.choice([16, 24, 32]), clip=draw.choice([0.5, 1.0]), evaluate_every=draw.choice([20, 25, 50]),
    )  # fmt: skip


# --- faults: each takes a healthy plan and a random generator, and returns the causes that count as right


def _spike(plan: Plan, draw: random.Random) -> None:
    steps = {draw.randrange(plan.steps // 3, plan.steps - 20) for _ in range(draw.choice([1, 1, 2, 4]))}
    noise = torch.Generator().manual_seed(plan.seed)
    plan.accumulation = 1

    def corrupt(step: int, batch: Tensor) -> Tensor:
        return torch.randint(0, VOCABULARY, batch.shape, generator=noise) if step in steps else batch

    plan.on_batch = corrupt


def _damage(plan: Plan, draw: random.Random) -> None:
    at, factor = draw.randrange(plan.steps // 3, plan.steps // 2), draw.choice([8.0, 16.0, 32.0])

    def change(step: int, model: nn.Module) -> None:
        if step == at:
            with torch.no_grad():
                model.head.weight.mul_(factor)

    plan.on_model = change


def _nonfinite(plan: Plan, draw: random.Random) -> None:
    at = draw.randrange(plan.steps // 4, plan.steps - 30)

    def divide(step: int, logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        weight = torch.tensor(0.0 if step == at else 1.0)
        return loss * (weight / weight) / plan.accumulation

    plan.on_loss = divide


def _masked_batches(plan: Plan, draw: random.Random) -> None:
    every, plan.skip_nonfinite, plan.accumulation = draw.choice([7, 11, 17]), True, 1

    def some(step: int, logits: Tensor, labels: Tensor) -> Tensor:
        labels = torch.full_like(labels, -100) if step % every == every - 1 else labels
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    plan.on_loss = some


def _ordered(plan: Plan, draw: random.Random) -> None:
    period = draw.choice([12, 16, 24])
    plan.rows, plan.accumulation = 24, 1
    rows = rows_of(text_ids()[: plan.characters], list(range(0, plan.characters - CONTEXT - 1, CONTEXT)))
    spaces = (rows == 1).float().mean(1)
    ranked = torch.argsort(spaces).tolist()  # from dense code to indentation

    def sorted_cycle(step: int, count: int) -> list[int]:
        phase = step % period
        part = ranked[phase * len(ranked) // period : (phase + 1) * len(ranked) // period]
        return [CONTEXT * row for row in random.Random(plan.seed + step).sample(part, count)]

    plan.order = sorted_cycle


def _leak(plan: Plan, draw: random.Random) -> None:
    """Held-out rows are mixed into most training batches from some step on."""
    at = draw.randrange(plan.steps // 4, plan.steps // 2)
    held: list[Tensor] = []
    pick = torch.Generator().manual_seed(plan.seed)

    def remember(step: int, rows: Tensor) -> Tensor:
        held[:] = [rows]
        return rows

    def mix(step: int, batch: Tensor) -> Tensor:
        if held and step >= at:
            batch = batch.clone()
            count = len(batch) // 2
            batch[:count] = held[0][torch.randint(0, len(held[0]), (count,), generator=pick)]
        return batch

    plan.on_validation, plan.on_batch, plan.evaluate_every = remember, mix, 20
    plan.width, plan.layers, plan.rows, plan.lr = 48, 2, 32, 5e-3


def _wrong_start(plan: Plan, draw: random.Random) -> None:
    factor = draw.choice([60.0, 100.0, 200.0])

    def enlarge(step: int, model: nn.Module) -> None:
        if step == 0:
            with torch.no_grad():
                model.head.weight.mul_(factor)

    plan.on_model = enlarge


def _small_data(plan: Plan, draw: random.Random) -> None:
    plan.characters, plan.width, plan.layers = draw.choice([3_000, 5_000, 8_000]), 48, 2
    plan.lr, plan.steps, plan.schedule, plan.evaluate_every, plan.rows = 6e-3, 300, "constant", 20, 48


def _leak_memory(plan: Plan, draw: random.Random) -> None:
    hoard: list[Tensor] = []
    megabytes = draw.choice([2, 4])
    plan.memory = lambda step: hoard.append(torch.ones(megabytes * 2**18))
    plan.steps = 200


def _set(**changes: Any) -> Callable[[Plan, random.Random], None]:
    def apply(plan: Plan, draw: random.Random) -> None:
        for name, value in changes.items():
            setattr(plan, name, value(plan, draw) if callable(value) else value)

    return apply


def _growing_loop(plan: Plan, draw: random.Random) -> None:
    per_step = draw.choice([6e-4, 1e-3])
    plan.steps, plan.stall_s = 120, lambda step: 0.01 + per_step * step


def _slow_loader(plan: Plan, draw: random.Random) -> None:
    wait = draw.choice([0.01, 0.02, 0.03])
    plan.steps, plan.wait_s = 100, lambda step: wait


def _stall(plan: Plan, draw: random.Random) -> None:
    every, seconds = draw.choice([10, 15, 20]), draw.choice([0.2, 0.3])
    plan.steps, plan.stall_s = 120, lambda step: seconds if step % every == every - 1 else 0.0


def _throttle(plan: Plan, draw: random.Random) -> None:
    at, seconds = draw.randrange(40, 60), draw.choice([0.08, 0.12])
    plan.steps, plan.stall_s = 100, lambda step: 0.005 + (seconds if step >= at else 0.0)


def _random_stalls(plan: Plan, draw: random.Random) -> None:
    slow = {draw.randrange(10, 120) for _ in range(12)}
    plan.steps, plan.stall_s = 120, lambda step: 0.25 if step in slow else 0.0


def _rate_jump(plan: Plan, draw: random.Random) -> None:
    at, plan.schedule = draw.randrange(plan.steps // 3, plan.steps // 2), "constant"
    plan.rate_factor = lambda step: 60.0 if step >= at else 1.0


def _large_gradients(plan: Plan, draw: random.Random) -> None:
    """Gradients that are too large for half precision, at an unchanged loss."""
    factor = 10 ** draw.uniform(4.5, 6)

    def enlarge(step: int, logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / plan.accumulation
        return loss + (factor * loss - (factor * loss).detach())

    plan.scaled_fp16, plan.on_loss = True, enlarge


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[Plan, random.Random], None]]] = {
    "rate x50": (("lr_too_high",), _set(lr=lambda p, d: 10 ** d.uniform(-0.6, 0.2), schedule="constant", clip=1e9)),
    "rate / 300": (("lr_too_low",), _set(lr=lambda p, d: 10 ** d.uniform(-5.3, -4.7), schedule="constant")),
    "no warm-up": (("warmup_missing",), _set(warmup=0, lr=lambda p, d: d.uniform(0.1, 0.2), layers=2,
                   schedule="cosine", clip=1e9)),
    "corrupt batches": (("bad_batch",), _spike),
    "damaged weights": (("weights_damaged",), _damage),
    "division by zero": (("nonfinite_input",), _nonfinite),
    "masked labels": (("labels_masked",), _set(labels="masked")),
    "masked batches": (("labels_masked",), _masked_batches),
    "labels not shifted": (("labels_not_shifted",), _set(labels="same", steps=240, lr=1e-2, width=32)),
    "loss summed": (("loss_summed_over_accumulation",), _set(accumulation=lambda p, d: d.choice([2, 4, 8]),
                    loss_factor=lambda p, d: p.accumulation, rows=8)),
    "loss divided twice": (("loss_divided_twice",), _set(accumulation=lambda p, d: d.choice([2, 4, 8]),
                           loss_factor=lambda p, d: 1 / p.accumulation, rows=8)),
    "wrong embeddings": (("initial_loss_above_uniform",), _wrong_start),
    "frozen": (("weights_frozen",), _set(frozen=True)),
    "small data": (("overfitting",), _small_data),
    "held-out rows in training": (("validation_leak",), _leak),
    "sorted data": (("data_ordered",), _ordered),
    "schedule too short": (("schedule_too_short",), _set(schedule=lambda p, d: d.choice(["cosine", "linear"]),
                           schedule_steps=lambda p, d: int(p.steps * d.uniform(0.3, 0.7)))),
    "schedule too long": (("schedule_too_long",), _set(schedule=lambda p, d: d.choice(["cosine", "linear"]),
                          schedule_steps=lambda p, d: int(p.steps * d.uniform(2, 5)))),
    "schedule restarted": (("schedule_restarted",), _set(schedule="cosine", lose=("schedule", "optimizer"),
                           restart_at=lambda p, d: int(p.steps * d.uniform(0.5, 0.7)))),
    "batch of one": (("batch_too_small",), _set(rows=1, accumulation=1, steps=300)),
    "fp16 overflow": (("fp16_overflow",), _large_gradients),
    "bf16 weights": (("bf16_updates_lost",), _set(half_weights=True, schedule="constant",
                     lr=lambda p, d: 10 ** d.uniform(-4.5, -4))),
    "slow loader": (("slow_data",), _slow_loader),
    "periodic stall": (("periodic_stall", "worker_stall"), _stall),
    "growing steps": (("step_time_grows",), _growing_loop),
    "throttled": (("slowed_down",), _throttle),
    "random stalls": (("stragglers",), _random_stalls),
    "memory leak": (("memory_leak",), _leak_memory),
    "rate jump": (("lr_jump", "lr_too_high"), _rate_jump),
}  # fmt: skip


# Metrics without which a fault cannot be told apart.
NEEDS: dict[str, set[str]] = {
    "no warm-up": {"lr"}, "masked labels": {"grad_norm"}, "masked batches": {"grad_norm"}, "loss summed": {"settings"},
    "loss divided twice": {"settings"}, "frozen": {"grad_norm"}, "small data": {"validation_loss"},
    "held-out rows in training": {"validation_loss"}, "labels not shifted": {"validation_loss"},
    "schedule too short": {"lr"}, "schedule too long": {"lr"}, "schedule restarted": {"lr"},
    "fp16 overflow": {"loss_scale"},
    "slow loader": {"data_wait_s"}, "periodic stall": {"step_s"}, "growing steps": {"step_s"}, "throttled": {"step_s"},
    "random stalls": {"step_s"}, "memory leak": {"memory_bytes"}, "rate jump": {"lr"}, "bf16 weights": {"settings"},
    "rate / 300": {"lr"}, "rate x50": {"lr"},
}  # fmt: skip


def make_run(kind: str | None, seed: int) -> TinyRun:
    """A run of a kind of fault, or a healthy one. The same seed gives the same settings."""
    draw = random.Random(f"{kind} {seed}")
    plan = healthy_plan(draw)
    right: tuple[str, ...] = ()
    if kind is not None:
        right, change = FAULTS[kind]
        change(plan, draw)
    records = train(plan)
    restarts = [plan.restart_at] if plan.restart_at else []
    return TinyRun(kind or "healthy", right, records, settings_of(plan), restarts, plan.steps)
