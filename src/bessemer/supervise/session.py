"""From a spec to a finished run: prepare the data, decide the plan, build the job, run the loop, tell the outcome."""

from __future__ import annotations

import json
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import xxhash

from bessemer.checkpoint.manifest import Damaged, Manifest, read_manifest
from bessemer.checkpoint.shelf import Shelf
from bessemer.data.own_stream import NOT_REPLAYABLE, ForwardStream
from bessemer.data.steps import Segment, Steps
from bessemer.data.stream import BatchStream
from bessemer.errors import UserError
from bessemer.guard.judge import Judge
from bessemer.model.transformer import build
from bessemer.observe.view import RunView
from bessemer.optim.guarded import GuardedAdamW
from bessemer.optim.schedule import Schedule
from bessemer.plan.decide import TrainPlan, decide_context, decide_training
from bessemer.plan.decision import Plan
from bessemer.plan.machine import Machine
from bessemer.run.directory import Run, RunWriter
from bessemer.spec.load import dump_spec, load_spec
from bessemer.spec.quantity import human_count
from bessemer.spec.resolve import model_shape
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.supervise.data import Data, open_data
from bessemer.supervise.feed import build_stream, explain, held_out_rows, make_rows, sizes
from bessemer.train.device import measure, pick_device
from bessemer.train.evaluate import Evaluator, HeldOut
from bessemer.train.job import Interrupt, Job, Outcome, Progress
from bessemer.train.loop import train_loop
from bessemer.train.objective import CausalLM
from bessemer.train.saver import CheckpointSaver, package_versions
from bessemer.train.speed import training_rate

FORMER_SPEC = "spec.yaml"


def spec_fingerprint(spec: RunSpec) -> str:
    return str(xxhash.xxh3_128(dump_spec(spec).encode()).hexdigest())


def run_folder(spec: RunSpec) -> Path:
    return Path(spec.runs) / spec.name


def differences(old: Any, new: Any, key: str = "") -> dict[str, list[Any]]:
    """Changed leaves of two specs: key -> [before, after]."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, list[Any]] = {}
        for name in sorted(set(old) | set(new)):
            found |= differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        return found
    return {} if old == new else {key: [old, new]}


def summary(shape: ModelShape, plan: TrainPlan) -> str:
    """The plan in one line."""
    rows = plan.batch_rows[0][1]
    return (
        f"{human_count(shape.parameters)} parameters, vocabulary {shape.vocab:,}, {plan.total_steps:,} steps of "
        f"{rows} x {plan.context} tokens, peak lr {plan.peak_lr:g}, {plan.precision}"
    )


class Session:
    """One start of a run, in one process."""

    def __init__(
        self, spec: RunSpec, view: RunView | None = None, datasets: Mapping[str, Any] | None = None
    ) -> None:
        self.spec, self.datasets = spec, dict(datasets or {})
        self.view = view or RunView()
        self.interrupt = Interrupt()

    def train(self) -> Outcome:
        """Start or continue the run. Every way out but a kill leaves its word in the events."""
        with RunWriter(run_folder(self.spec)) as run, self.view.following(run):
            try:
                outcome = self._train(run)
            except UserError as error:
                run.event("refused", reason=str(error).splitlines()[0])  # the run stands as it stood
                raise
            except KeyboardInterrupt:
                run.event("interrupted", reason="Ctrl-C, at once; the last checkpoint stands")
                raise
            except Exception as error:
                self.view.log(traceback.format_exc())
                run.event(
                    "failed",
                    reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                )
                raise
            run.event(outcome.kind, step=outcome.step, reason=outcome.reason)
            self.view.outcome(outcome.kind, outcome.reason, outcome.step, run)
            return outcome

    def _train(self, run: RunWriter) -> Outcome:
        former = self._former_spec(run)
        # A run with nothing saved starts over, and is planned anew.
        resuming = Shelf(run.checkpoints).committed() and (run.folder / "plan.json").exists()
        previous = Plan.from_json((run.folder / "plan.json").read_text()) if resuming else None
        device = pick_device(self.spec.parallel)
        if self.spec.parallel.threads != "auto":
            torch.set_num_threads(self.spec.parallel.threads)
        machine = measure(device)
        plan = Plan()
        plan.add("parallel.device", device.type, f"{machine.name}, {machine.threads} threads", "found")
        prepared, shape, context = self._prepare(plan)
        if previous is None:
            machine = self._measure_precision(machine, shape, context, device)
        rows = make_rows(self.spec, prepared, context, plan, previous)
        held_out = held_out_rows(prepared, rows, context)
        training = decide_training(
            self.spec, shape, context, machine,
            sizes(self.spec, rows, prepared, context), sum(held.tokens for held in held_out.values()), plan, previous,
        )  # fmt: skip
        explain(self.spec, rows, training, plan)
        stream = build_stream(self.spec, prepared, rows, training, [Segment(0, 0)])
        job = self._job(run, held_out, shape, training, machine, device, stream)
        restored = self._restore(job, former)
        run.write_file(FORMER_SPEC, dump_spec(self.spec))
        run.write_file("plan.json", plan.to_json())
        run.write_file("settings.json", training.to_json())
        run.write_file("data.json", json.dumps({"folder": str(prepared.folder)}))
        run.write_file(
            "model.json", json.dumps({"shape": asdict(shape), "eos": prepared.tokenizer.eos}, indent=1)
        )
        prepared.tokenizer.save(run.folder / "tokenizer.json")
        if run.lock.taken_from:
            owner = run.lock.taken_from
            job.event("lock_taken", reason=f"process {owner.pid} on {owner.host} died without its last word")
        if former and (
            changed := differences(former.model_dump(mode="json"), self.spec.model_dump(mode="json"))
        ):
            job.event("spec_changed", changes=changed, versions=package_versions())
        job.event(
            "started", step=job.start_step, total_steps=training.total_steps, parameters=shape.parameters,
            device=device.type, resumed_from=restored, versions=package_versions(), machine=machine.to_json(),
        )  # fmt: skip
        if isinstance(stream, ForwardStream):
            job.event("not_replayable", reason=NOT_REPLAYABLE)
        if not job.optimizer.fused:
            reason = f"fused AdamW fails its probe on {device.type}: the verdict is read on the host before each step"
            job.event("optimizer_fallback", reason=reason)
        self.view.planned(plan.rows(), summary(shape, training))
        if job.start_step >= training.total_steps:
            return Outcome(
                "finished", "the budget was spent already; raise budget.tokens to train on", job.start_step
            )
        with self._signals():
            return train_loop(job)

    def _former_spec(self, run: RunWriter) -> RunSpec | None:
        path = run.folder / FORMER_SPEC
        return load_spec(path) if path.exists() else None

    def _measure_precision(
        self, machine: Machine, shape: ModelShape, context: int, device: torch.device
    ) -> Machine:
        """On a CPU a fast bf16 product does not yet make a fast step: train two layers both ways before choosing."""
        promising = machine.matmul["bf16"] > 1.3 * machine.matmul["fp32"]
        if device.type != "cpu" or self.spec.precision != "auto" or not promising:
            return machine
        short, rows = replace(shape, layers=min(2, shape.layers)), max(1, 1024 // context)
        rates = {
            key: training_rate(short, context, rows, key, device, budget_s=0.3) for key in ("fp32", "bf16")
        }
        return replace(machine, training=rates)

    def _prepare(self, plan: Plan) -> tuple[Data, ModelShape, int]:
        spec = self.spec
        prepared = open_data(spec, plan, self.view.progress, self.datasets)
        shape = model_shape(spec.model, prepared.tokenizer.vocab_size)
        return prepared, shape, decide_context(spec, shape.parameters, plan)

    def _job(
        self,
        run: RunWriter,
        held_out: dict[str, HeldOut],
        shape: ModelShape,
        plan: TrainPlan,
        machine: Machine,
        device: torch.device,
        stream: BatchStream | ForwardStream,
    ) -> Job:
        spec = self.spec
        model = build(shape, device, spec.seed)
        optimizer = spec.optimizer
        return Job(
            spec=spec, plan=plan, device=device, model=model, objective=CausalLM(spec.data.cross_documents),
            optimizer=GuardedAdamW(
                model.named_parameters(), (optimizer.betas[0], optimizer.betas[1]), optimizer.eps,
                optimizer.weight_decay,
            ),
            schedule=Schedule(
                plan.peak_lr, plan.warmup_steps, plan.total_steps, spec.schedule.kind, spec.schedule.floor
            ),
            # Apple's backend has no median that skips NaN: there the judge sits on the CPU, at the price of a sync.
            judge=Judge(spec.guard, torch.device("cpu") if device.type == "mps" else device),
            stream=stream,
            evaluator=Evaluator(
                held_out, plan.context, plan.evaluate_tokens, plan.micro_rows, plan.precision, device
            ),
            run=run, view=self.view, saver=CheckpointSaver(Shelf(run.checkpoints), spec_fingerprint(spec)),
            flops_per_token=shape.flops_per_token(plan.context), peak_flops=machine.peak(plan.precision)[0],
            interrupt=self.interrupt,
        )  # fmt: skip

    def _restore(self, job: Job, former: RunSpec | None) -> str | None:
        """Load the newest checkpoint that verifies; damaged ones are passed over with an event."""
        shelf = Shelf(job.run.checkpoints)
        if swept := shelf.sweep():
            job.event(
                "swept", checkpoints=swept, reason=f"{len(swept)} saves that never finished were removed"
            )
        folders = list(shelf.newest_first())
        for folder in folders:
            state = job.state()
            if former and former.guard.window != self.spec.guard.window:  # another window starts empty
                state = {name: tensor for name, tensor in state.items() if not name.startswith("guard.")}
            try:
                self._refuse_other_data(job, read_manifest(folder), folder)
                manifest = shelf.load(folder, state)
            except Damaged as error:
                job.event("checkpoint_passed_over", checkpoint=folder.name, reason=str(error))
                continue
            self._accept_state(job, state, manifest)
            job.run.cut_after(manifest.step)
            return folder.name
        if folders:
            raise UserError(
                f"{job.run.checkpoints}: none of {len(folders)} checkpoints verifies; to start over, delete the run"
            )
        job.run.cut_after(0)
        return None

    def _accept_state(self, job: Job, state: dict[str, torch.Tensor], manifest: Manifest) -> None:
        if guard := {
            name.removeprefix("guard."): tensor for name, tensor in state.items() if name.startswith("guard.")
        }:
            job.judge.load(guard)
        job.stream = job.stream.replace(
            Steps(job.stream.steps.batch_phases, [Segment.from_json(s) for s in manifest.segments])
        )
        if isinstance(job.stream, ForwardStream):
            job.stream.resume(manifest.step, manifest.stream_state)
        job.progress = Progress(**manifest.progress)
        job.start_step = manifest.step
        here = {
            "threads": torch.get_num_threads(),
            "device": job.device.type,
            "torch": package_versions()["torch"],
        }
        there = {"threads": manifest.threads, "device": manifest.device, "torch": manifest.versions["torch"]}
        if here != there:
            changed = ", ".join(
                f"{key} {there[key]} -> {here[key]}" for key in here if here[key] != there[key]
            )
            job.event(
                "digits_may_differ",
                reason=f"{changed}: the losses go on, their last digits may differ from an unbroken run's",
            )

    def _refuse_other_data(self, job: Job, manifest: Manifest, folder: Path) -> None:
        """Positions must mean the same tokens, and past steps must have read the same positions."""
        if manifest.stream_fingerprint != job.stream.fingerprint:
            changed = differences(manifest.stream, json.loads(json.dumps(job.stream.identity)))
            what = "; ".join(f"{key} was {old}, is {new}" for key, (old, new) in changed.items())
            raise UserError(
                f"{folder}: was trained on another data stream ({what}): its positions mean other tokens now. "
                "Put these back, or give the run another name"
            )
        past = [entry for entry in manifest.batch_rows if entry[0] < manifest.step]
        now = [[p.from_step, p.rows] for p in job.stream.steps.batch_phases if p.from_step < manifest.step]
        if past != now:
            was, asked = (rows[-1][1] * job.plan.context for rows in (past, now))
            raise UserError(
                f"{folder}: its {manifest.step:,} steps had batches of {was:,} tokens, the spec says {asked:,}: "
                "to change the size from here on, write budget.batch_changes: "
                f"[{{from_step: {manifest.step}, batch: {asked}}}]"
            )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM finish the step; a second Ctrl-C leaves at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, _: object) -> None:
            if self.interrupt.signal and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.interrupt.signal = signal.Signals(number).name
            self.view.say("finishing the step and saving; press Ctrl-C again to leave at once")

        former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)


def train(spec: RunSpec, view: RunView | None = None, datasets: Mapping[str, Any] | None = None) -> Outcome:
    """Start a run, or continue it where it stopped.

    `datasets` are your own, by the names of sources whose path is `python`: map-style ones (`len`, `[i]`) are as
    replayable as files, iterables only go forward. An item is a text, token ids, or a mapping with tokens and a mask.
    """
    return Session(spec, view, datasets).train()


def existing_run(folder: str | Path) -> tuple[Run, RunSpec]:
    """A run with the spec it was last started with."""
    run = Run.existing(folder)
    return run, load_spec(run.folder / FORMER_SPEC)
