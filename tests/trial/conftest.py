"""A tiny job that is really trained, on data with a structure to learn, and causes of trouble staged in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bessemer.data.store.token_store import TokenStore
from bessemer.data.store.writer import StoreWriter
from bessemer.data.stream.batches import BatchStream
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.data.stream.rows import sequence_count
from bessemer.guard.judge import Judge
from bessemer.model.transformer import build_model
from bessemer.optim.choose import make_optimizer
from bessemer.optim.guarded import clip_divisor
from bessemer.plan.schedule import Schedule
from bessemer.spec.guard import GuardSpec
from bessemer.spec.mixture import quantise
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.compile import compute_in
from bessemer.train.engine import Engine
from bessemer.train.job import DataFeed, Guard, Job, Recorder
from bessemer.train.objective import Pretrain
from bessemer.trial.case import EarlierState, NormalRange, StepScene

VOCAB, CONTEXT, ROWS, SCENE_AT, DOCUMENTS = 64, 32, 8, 60, 400


def chain_text(rng: np.random.Generator, length: int) -> np.ndarray:
    """Each token has three likely successors: a model gets from ln 63 to about 1.5 in 60 steps."""
    out = [int(rng.integers(1, VOCAB))]
    for jump in rng.choice([1, 7, 11], length - 2, p=[0.7, 0.2, 0.1]).tolist():
        out.append((out[-1] * 5 + jump) % (VOCAB - 1) + 1)
    return np.array([*out, 0])


def make_stream(folder: Path, seed: int, change: Callable[[int, np.ndarray], np.ndarray] | None = None) -> BatchStream:
    """`change` may give a document other tokens, as many as it had, so that nothing else moves."""
    rng = np.random.default_rng(seed)
    with StoreWriter(folder, VOCAB, "tokenizer") as writer:
        for row in range(DOCUMENTS):
            tokens = chain_text(rng, int(rng.integers(20, 90)))
            tokens = change(row, tokens) if change else tokens
            writer.add(tokens, "a.jsonl", row, row, 3 * len(tokens))
    store = TokenStore(folder)
    order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": sequence_count(store.tokens, CONTEXT)}, seed)
    return BatchStream({"a": store}, order, CONTEXT, StepPositions([BatchPhase(0, ROWS)]))


def make_job(
    stream: BatchStream, seed: int, precision="fp32", peak=1e-2, warmup=10, optimizer=None, device="cpu"
) -> Job:
    spec = OptimizerSpec(**(optimizer or {}))
    shape = ModelShape(vocab=VOCAB, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=64)
    device = torch.device(device)
    model = build_model(shape, device, seed)
    optimizer = make_optimizer(model.named_parameters(), spec)
    plan = SimpleNamespace(precision=precision, micro_rows=4)
    return Job(
        Engine(
            SimpleNamespace(optimizer=spec),
            plan,
            device,
            model,
            Pretrain(False),
            optimizer,
            Schedule(peak, warmup, 200),
        ),
        DataFeed(stream, None, str),
        Guard(Judge(GuardSpec(), device), None, None, None),
        Recorder(None, None, 1, 1.0),
        saver=None,
    )


def normal_of(records: list[dict]) -> NormalRange:
    """As the guard has it: medians of the newer half, robust scales around a line, with its floors."""
    kept = [record for record in records if not record["veto"]][-32:]
    losses = np.array([record["loss"] for record in kept])
    norms = np.log([record["grad_norm"] for record in kept])
    half = len(kept) // 2
    old, centre, middle = (np.median(losses[:half]), float(np.median(losses[half:])), float(np.median(norms[half:])))
    line = centre + (centre - old) / half * (np.arange(len(kept)) - 1.5 * half)
    scale = max(1.4826 * float(np.median(np.abs(losses - line))), 0.02 * centre)
    spread = max(1.4826 * float(np.median(np.abs(norms - middle))), 0.25)
    return NormalRange(centre, scale, math.exp(middle), spread, 8.0, 10.0)


def outlier(normal: NormalRange, loss: float, norm: float) -> bool:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return True
    grad_z = (math.log(max(norm, 1e-30)) - math.log(normal.grad_norm)) / normal.grad_scale
    return (loss - normal.loss) / normal.loss_scale > normal.loss_sigma or grad_z > normal.grad_sigma


@dataclass
class Faults:
    """What happens on the way. `before` is called before a step's pass, `gradients` between backward and judge."""

    before: dict[int, Callable] = field(default_factory=dict)
    gradients: dict[int, Callable] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)  # factors
    guarded: bool = True
    normal_until: int | None = None  # what is normal is known from the steps before this one


def attempt(job, step: int, faults: Faults) -> tuple[list, float, torch.Tensor]:
    """The batches of a step, its loss and its gradient norm; the gradients are left for the update."""
    if step in faults.before:
        faults.before[step](job)
    batches = job.data.stream.micro_batches(step, job.plan.micro_rows)
    count, loss = job.data.stream.step_count(step), torch.zeros((), device=job.engine.device)
    for batch in batches:
        engine = job.engine
        with compute_in(job.plan.precision, engine.device):
            terms = engine.objective.loss(engine.model, engine.objective.feed(batch, engine.device), count)
        terms.loss.backward()
        loss += terms.nll
    if step in faults.gradients:
        faults.gradients[step](job)
    return batches, float(loss), job.engine.optimizer.grad_norm()


def take_step(job, step: int, faults: Faults, records: list[dict]) -> None:
    _, loss, norm = attempt(job, step, faults)
    lr = job.engine.schedule.lr(step) * faults.rates.get(step, 1.0)
    veto = faults.guarded and step > 30 and outlier(normal_of(records), loss, float(norm))
    job.engine.optimizer.step(
        lr, torch.tensor(float(veto), device=job.engine.device), clip_divisor(norm, job.spec.optimizer.clip)
    )
    reason = "loss outlier" if veto else None
    records.append({"step": step, "lr": lr, "veto": reason, "loss": loss, "grad_norm": float(norm)})


class HealthyRun:
    """A run without faults, trained as far as needed: the state before each step, and the records."""

    def __init__(self, stream: BatchStream, seed: int, guarded: bool, settings: dict) -> None:
        self.job, self.faults = make_job(stream, seed, **settings), Faults(guarded=guarded)
        self.states: list[dict[str, torch.Tensor]] = []
        self.records: list[dict] = []

    def state(self, step: int) -> dict[str, torch.Tensor]:
        while len(self.states) <= step:
            if self.states:
                take_step(self.job, len(self.states) - 1, self.faults, self.records)
            self.states.append({name: tensor.clone() for name, tensor in self.job.engine.state().items()})
        return self.states[step]


def run_to(job, last: int, faults: Faults, copies, healthy: HealthyRun | None) -> tuple[StepScene, list[EarlierState]]:
    """Train up to step `last`, which is judged and not updated. Before the first fault the steps are `healthy`'s."""
    start = min([last, *faults.before, *faults.gradients, *faults.rates]) if healthy else 0
    earlier: list[EarlierState] = []
    records: list[dict] = []
    if healthy:
        load_state(job, healthy.state(start))
        records = [dict(record) for record in healthy.records[:start]]
        earlier = [memory_copy(job, step, healthy.state(step)) for step in copies if step < start]
    for step in range(start, last):
        if step in copies:
            earlier.append(memory_copy(job, step, job.engine.state()))
        take_step(job, step, faults, records)
    batches, loss, norm = attempt(job, last, faults)
    job.engine.model.zero_grad(set_to_none=True)
    lr = job.engine.schedule.lr(last) * faults.rates.get(last, 1.0)
    normal = normal_of(records[: faults.normal_until])
    return StepScene(last, "loss outlier", lr, loss, float(norm), normal, batches, records), earlier


@torch.no_grad()
def load_state(job, values: dict[str, torch.Tensor]) -> None:
    state = job.engine.state()
    for name, tensor in values.items():
        state[name].copy_(tensor)


def memory_copy(job, step: int, values: dict[str, torch.Tensor]) -> EarlierState:
    copies = {name: tensor.clone() for name, tensor in values.items()}
    return EarlierState(step, "memory", lambda: load_state(job, copies))


@pytest.fixture(scope="session")
def healthy_run(tmp_path_factory) -> Callable[..., HealthyRun]:
    """Runs without faults, each trained once for all tests; changed data is told apart by its name."""
    runs: dict[str, HealthyRun] = {}

    def find(seed: int, guarded: bool, settings: dict, change: Callable | None, data: str) -> HealthyRun:
        key = repr((seed, guarded, sorted(settings.items()), data))
        if key not in runs:
            stream = make_stream(tmp_path_factory.mktemp("healthy") / "store", seed, change)
            runs[key] = HealthyRun(stream, seed, guarded, settings)
        return runs[key]

    return find


@pytest.fixture
def stage(tmp_path, healthy_run):
    """A job trained up to the scene, the scene and the copies; a new one for each call. Faults are keywords. Where a
    change of the data has a name (`data`), the steps before the faults are trained once for all that give it."""
    made = []

    def make(seed=0, change=None, transforms=(), copies=(30, 45), last=SCENE_AT, faults=None, data="", **settings):
        faults = Faults(**(faults or {}))
        shared = not transforms and (change is None or data)
        healthy = healthy_run(seed, faults.guarded, settings, change, data) if shared else None
        stream = healthy.job.data.stream if healthy else make_stream(tmp_path / f"store{len(made)}", seed, change)
        if transforms:
            stream = BatchStream(stream.sources, stream.order, CONTEXT, stream.steps, transforms=transforms)
        made.append(make_job(stream, seed, **settings))
        return (made[-1], *run_to(made[-1], last, faults, copies, healthy))

    return make


@pytest.fixture
def documents_at(tmp_path):
    """The documents of a step, those with most tokens first, before anything is changed."""

    def find(seed: int, step: int = SCENE_AT):
        return make_stream(tmp_path / f"look{seed}-{step}", seed).origins(step)

    return find
