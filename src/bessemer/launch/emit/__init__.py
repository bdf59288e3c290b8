"""Emits a run for another framework: `emit` turns a spec into config files, a start command and notes.

Nothing is dropped silently: a spec key that the framework cannot express becomes a note in NOTES.md, and a comment in
the emitted files where their format allows comments. The run is planned as `bessemer train` plans it, data and
tokenizer included, but no network is built. The shared files (spec, settings, data, model, tokenizer) have the names
of a run folder, so that the rest of Bessemer can open them.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.plan.decide import TrainPlan
from bessemer.plan.decision import Plan
from bessemer.plan.schedule import Schedule, run_schedule
from bessemer.session.start import complete_spec, dry_run
from bessemer.spec.load import dump_spec
from bessemer.spec.schedule import ScheduleSpec
from bessemer.spec.schema import ParallelSpec, RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import pick_device

FRAMEWORKS = ("accelerate", "deepspeed", "megatron", "torchtitan")


@dataclass(frozen=True)
class EmittedFiles:
    """Files by name relative to their folder, the command that starts the run, and what differs from Bessemer."""

    files: dict[str, str]
    command: str
    notes: list[str]


def emit(framework: str, spec: RunSpec, folder: str | Path = "", processes: int | None = None) -> EmittedFiles:
    """Return the files of a run for one framework, meant for `folder` (default: `NAME-FRAMEWORK`).

    Prepares the data if that has not been done, as training would, and decides every `auto`. `processes` replaces the
    spec's number of data-parallel replicas. Writes nothing to `folder`; see `write_files`.
    """
    if framework not in FRAMEWORKS:
        raise UserError(f"--emit {framework}: write one of {', '.join(FRAMEWORKS)}")
    return render(framework, resolve(spec, Path(folder or f"{spec.name}-{framework}"), processes))


def render(framework: str, run: RunToEmit) -> EmittedFiles:
    """Return the files of a resolved run. Cheap: nothing is planned or read."""
    from bessemer.launch.emit import accelerate_deepspeed, megatron, torchtitan

    writers: dict[str, Callable[[RunToEmit, KeyCoverage], EmittedFiles]] = {
        "accelerate": accelerate_deepspeed.emit_accelerate, "deepspeed": accelerate_deepspeed.emit_deepspeed,
        "megatron": megatron.emit_megatron, "torchtitan": torchtitan.emit_torchtitan,
    }  # fmt: skip
    emitted = writers[framework](run, KeyCoverage(run.spec, framework))
    lines = "".join(f"- {note}\n" for note in emitted.notes)
    notes = f"# {run.spec.name} for {framework}\n\n```\n{emitted.command}\n```\n\nWhat is different there:\n\n{lines}"
    return EmittedFiles(run.shared_files() | emitted.files | {"NOTES.md": notes}, emitted.command, emitted.notes)


def write_files(emitted: EmittedFiles, folder: str | Path) -> list[Path]:
    """Write the files, replacing those of an earlier call. Refuses a folder with initial weights of another spec."""
    folder = Path(folder)
    model, spec = folder / "model", folder / "spec.yaml"
    if model.exists() and (not spec.exists() or spec.read_text(encoding="utf-8") != emitted.files["spec.yaml"]):
        raise UserError(f"{model}: holds the initial weights of another spec: delete it, or choose another folder")
    paths = [folder / name for name in emitted.files]
    for path, text in zip(paths, emitted.files.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return paths


def read_script(name: str) -> str:
    """The text of a training script in emit/scripts/."""
    return files("bessemer.launch.emit").joinpath("scripts", name).read_text(encoding="utf-8")


def comment_lines(notes: Iterable[str]) -> str:
    """The notes as comments for the end of a file whose comments begin with a hash."""
    return "\n# What is different from the run in Bessemer:\n" + "".join(f"# - {note}\n" for note in notes)


def weights_command(folder: Path) -> str:
    """The command that writes the initial weights; it runs before the framework starts."""
    return f"python -m bessemer.launch.emit.feed {folder}"


# What is lost with a key that a framework cannot express. The longest matching prefix is used.
LOSSES = {
    "budget.batch_changes": "the batch keeps its first size",
    "budget.stop": "the run ends with its last step",
    "checkpoint": "saves follow the framework's own rules",
    "data": "the framework reads data its own way",
    "data.clean": "the text was curated when it was prepared; raw files are not",
    "data.mix": "sources are not mixed by Bessemer's counts",
    "data.phases": "the mixture never changes",
    "dropout": "there is no dropout",
    "evaluate": "held-out data is not evaluated",
    "guard": "no step is judged before its update, and none is vetoed, rolled back or replayed",
    "loss": "the plain cross-entropy is minimised",
    "loss_scale": "the framework scales fp16 losses itself",
    "memory": "the framework stores weights and moments its own way",
    "model": "the framework's network has no such part: IT IS ANOTHER MODEL",
    "model.init": "learning rates are not scaled by width (muP)",
    "objective": "only next-token prediction is trained",
    "classify": "only next-token prediction is trained",
    "observe": "the framework prints its own progress",
    "optimizer": "the framework's optimizer has no such setting",
    "optimizer.ema": "weights are not averaged",
    "optimizer.freeze": "all parameters are trained",
    "optimizer.layer_decay": "all layers have one learning rate",
    "optimizer.veto": "no update is withheld",
    "parallel": "the framework has no such layout",
    "tasks": "only next-token prediction is trained",
}
# True of every framework, whatever the spec says.
COMMON_NOTES = (
    "guard: the framework has no guard: a bad step is not withheld, rolled back, replayed or reported",
    "provenance: batches cannot be traced back to files and rows, and past steps cannot be replayed",
    "checkpoint: no manifest is verified; checkpoints have the framework's own format",
)
IGNORED_KEYS = {"name", "runs", "lints.silence"}  # only say where Bessemer's own files go, and what it prints
DEFAULT_SHAPE = ModelShape(0, 0, 0, 0, 0, 0, 0)


def changed_keys(spec: RunSpec) -> dict[str, Any]:
    """Every key that differs from its default, by its dotted name."""
    changed: dict[str, Any] = {}

    def visit(value: Any, default: Any, key: str) -> None:
        if isinstance(value, BaseModel):
            blank = default if isinstance(default, BaseModel) else None
            for name, field in type(value).model_fields.items():
                usual = getattr(blank, name) if blank else field.get_default(call_default_factory=True)
                visit(getattr(value, name), usual, f"{key}.{name}" if key else name)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                visit(item, None, f"{key}.{name}")
        elif value != default:
            changed[key] = value

    visit(spec, None, "")
    return {key: value for key, value in changed.items() if key not in IGNORED_KEYS}


class KeyCoverage:
    """Which keys of a spec a framework's files express, and what is different. Keys not mentioned become notes."""

    def __init__(self, spec: RunSpec, framework: str) -> None:
        self.framework, self.changed = framework, changed_keys(spec)
        self._covered: list[str] = []
        self._notes: dict[str, str] = {}

    def cover(self, *keys: str) -> None:
        """The files express these keys and all below them; `*` stands for any name."""
        self._covered += keys

    def note(self, key: str, difference: str) -> None:
        """Something that the user must know, whether the spec sets the key or not."""
        self._notes[key] = f"{self._notes[key]}; {difference}" if key in self._notes else difference

    def cover_schedule(self, schedule: ScheduleSpec) -> None:
        """Cover warm-up, floor and kind; a kind that only Bessemer has is replaced."""
        self.cover("schedule.warmup", "schedule.floor")
        if schedule.kind == schedule.portable_kind:
            self.cover("schedule.kind")
        else:
            difference = f"{schedule.kind} has no counterpart in {self.framework}: {schedule.portable_kind} replaces it"
            self.note("schedule.kind", difference)

    def cover_shape(self, shape: ModelShape, supported: Iterable[str]) -> None:
        """Cover the model, except for those of its properties that the framework's network does not support."""
        self.cover("model")
        for field in fields(ModelShape):
            value = getattr(shape, field.name)
            unusual = value != getattr(DEFAULT_SHAPE, field.name) and field.name != "wrapped_parameters"
            if field.name not in supported and unusual:
                self.note(f"model.{field.name}", f"{_short_yaml(value)} has no counterpart: {LOSSES['model']}")

    def notes(self) -> list[str]:
        """One line each: what is always different, what was noted, and what has no counterpart."""
        rest = {
            key: f"{_short_yaml(value)} has no counterpart in {self.framework}: {_loss_of(key)}"
            for key, value in self.changed.items()
            if key not in self._notes and not self._is_covered(key)
        }
        return [*COMMON_NOTES, *(f"{key}: {note}" for key, note in (self._notes | rest).items())]

    def _is_covered(self, key: str) -> bool:
        return any(fnmatchcase(key, covered) or fnmatchcase(key, f"{covered}.*") for covered in self._covered)


def _loss_of(key: str) -> str:
    prefixes = [prefix for prefix in LOSSES if key == prefix or key.startswith(f"{prefix}.")]
    return LOSSES[max(prefixes, key=len)] if prefixes else "left out"


def _short_yaml(value: Any) -> str:
    if isinstance(value, list):
        value = [item.model_dump(exclude_defaults=True) if isinstance(item, BaseModel) else item for item in value]
    elif not isinstance(value, (str, int, float, bool, type(None))):
        return str(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= 120 else f"{text[:117]}..."


@dataclass(frozen=True)
class BatchSizes:
    """How the rows of a step are divided: `rows` = `micro` x `accumulate` x data-parallel ranks."""

    rows: int
    micro: int
    accumulate: int


@dataclass(frozen=True)
class RunToEmit:
    """A spec with everything decided. `folder` is where the emitted files will be written."""

    spec: RunSpec
    plan: TrainPlan
    decisions: Plan
    shape: ModelShape
    tokenizer: Tokenizer
    data: Path
    stores: dict[str, list[Path]]  # prefixes of each source's token files
    device: str
    folder: Path
    replicas: int

    @property
    def ranks(self) -> int:
        """The number of data-parallel ranks."""
        return self.replicas * self.degree("dp_shard")

    @property
    def world(self) -> int:
        return self.ranks * self.degree("tp") * self.degree("cp") * self.degree("pp")

    def degree(self, name: str) -> int:
        return _degree(self.spec.parallel, name)

    def batch_sizes(self) -> BatchSizes:
        """Equal micro-batches on every rank, which other frameworks require; Bessemer pads instead."""
        rows, ranks = self.plan.batch_rows[0][1], self.ranks
        if rows % ranks:
            nearest = max(1, round(rows / ranks)) * ranks * self.plan.context
            raise UserError(
                f"budget.batch: {rows} sequences cannot be divided evenly among {ranks} data-parallel ranks: write "
                f"budget.batch: {nearest}"
            )
        share = rows // ranks
        micro = max(size for size in range(1, min(self.plan.micro_rows, share) + 1) if share % size == 0)
        return BatchSizes(rows, micro, share // micro)

    @property
    def schedule(self) -> Schedule:
        return run_schedule(self.spec.schedule, self.plan)

    def save_steps(self) -> int:
        """Steps between saves; a twentieth of the run where the plan counts in seconds."""
        return self.plan.save.steps or max(1, self.plan.total_steps // 20)

    def constant_batch_file(self) -> dict[str, str]:
        """settings.json for frameworks whose batch size never changes: Bessemer's stream must not change it either."""
        return {"settings.json": replace(self.plan, batch_rows=self.plan.batch_rows[:1]).to_json()}

    def shared_files(self) -> dict[str, str]:
        """The files that `bessemer.launch.emit.feed` reads."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save(Path(folder) / "tokenizer.json")
            tokenizer = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")
        return {
            "spec.yaml": dump_spec(self.spec),
            "plan.json": self.decisions.to_json(),
            "settings.json": self.plan.to_json(),
            "data.json": json.dumps({"folder": str(self.data)}),
            "model.json": json.dumps({"shape": self.shape.to_dict(), "eos": self.tokenizer.eos}, indent=1),
            "tokenizer.json": tokenizer,
        }


def resolve(spec: RunSpec, folder: Path, processes: int | None = None) -> RunToEmit:
    """Prepare the data if needed and decide every `auto`. `processes` replaces the spec's data-parallel replicas by as
    many as fill that number of processes."""
    spec = complete_spec(spec)
    has_no_gpu = spec.parallel.device == "cuda" and not torch.cuda.is_available()
    if has_no_gpu and spec.precision == "auto":  # what is measured here says nothing about a GPU
        spec = spec.model_copy(update={"precision": "bf16"})
    device = torch.device("cpu") if has_no_gpu else pick_device(spec.parallel)
    decided = dry_run(spec, device)
    data = decided.data
    stores = {
        name: [path.with_suffix("") for path in paths]
        for name in decided.rows
        if (paths := sorted(data.folder.glob(f"{name}.train*.idx")))
    }
    return RunToEmit(
        spec, decided.training, decided.plan, decided.shape, data.tokenizer, data.folder, stores,
        "cuda" if has_no_gpu else device.type, folder, _count_replicas(spec.parallel, processes),
    )  # fmt: skip


def _degree(parallel: ParallelSpec, name: str) -> int:
    """A parallel degree of the spec; `auto` counts as 1."""
    degree = getattr(parallel, name)
    return degree if isinstance(degree, int) else 1


def _count_replicas(parallel: ParallelSpec, processes: int | None) -> int:
    if processes is None:
        return _degree(parallel, "dp_replicate")
    per_replica = math.prod(_degree(parallel, name) for name in ("dp_shard", "tp", "cp", "pp"))
    if processes < 1 or processes % per_replica:
        raise UserError(
            f"{processes} processes: one replica takes {per_replica} (dp_shard x tp x cp x pp): write a multiple of it"
        )
    return processes // per_replica
