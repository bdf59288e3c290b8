"""What `emit` gives back, and small helpers of the writers.

The account of a spec: every key that was set away from its default is either written for a framework or noted.

A writer says which keys its files carry and what is different there; what it says nothing of becomes a note by itself.

A run decided but not started: what the writers of other frameworks' files go by, and the files they all share.

The plan is made as `bessemer train` makes it, data and tokenizer included; no network is built. The shared files are
those of a run's folder, so that the rest of Bessemer opens them: spec, settings, data, model, tokenizer.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping
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
from bessemer.optim.schedule import Schedule
from bessemer.plan.decide import TrainPlan
from bessemer.plan.decision import Plan
from bessemer.session.dry_run import decide
from bessemer.session.start import completed
from bessemer.spec.load import dump_spec
from bessemer.spec.parallel import ParallelSpec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import pick_device


@dataclass(frozen=True)
class EmittedFiles:
    """Files by name, relative to the folder they are meant for; the line that starts the run; what is different."""

    files: dict[str, str]
    command: str
    notes: list[str]


def write_files(emitted: EmittedFiles, folder: str | Path) -> list[Path]:
    """Write them. What a former call wrote is replaced; a folder with weights of another run is refused."""
    folder = Path(folder)
    model, spec = folder / "model", folder / "spec.yaml"
    if model.exists() and (not spec.exists() or spec.read_text(encoding="utf-8") != emitted.files["spec.yaml"]):
        raise UserError(f"{model}: holds the first weights of another spec: delete it, or name another folder")
    written = []
    for name, text in emitted.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def script(name: str) -> str:
    """One of the training scripts, word for word."""
    return files("bessemer.launch.emit").joinpath("scripts", name).read_text(encoding="utf-8")


def comments(notes: Iterable[str]) -> str:
    """Notes for the end of a file whose comments begin with a hash."""
    return "\n# What is different from the run in Bessemer:\n" + "".join(f"# - {note}\n" for note in notes)


def first_weights(folder: Path) -> str:
    """The command that makes the folder with the first weights, before the framework is started."""
    return f"python -m bessemer.launch.emit.initial {folder}"


# What is lost with a key that a framework has nothing for. The longest beginning that fits is taken.
LOST = {
    "budget.batch_changes": "the batch keeps its first size",
    "budget.stop": "the run ends with its last step",
    "checkpoint": "saves follow the framework's own rules",
    "data": "the framework reads data its own way",
    "data.clean": "the text was curated when it was prepared; raw files are not",
    "data.mix": "sources are not mixed by our counts",
    "data.phases": "the mixture stays as it begins",
    "dropout": "nothing is dropped",
    "evaluate": "held-out data is not evaluated",
    "guard": "no step is judged before its update, none is vetoed, rolled back or tried",
    "loss": "the plain cross-entropy is minimised",
    "loss_scale": "the framework scales fp16 by itself",
    "memory": "the framework keeps weights and moments its own way",
    "model": "the network there has no such part: IT IS ANOTHER MODEL",
    "model.init": "learning rates are not scaled by width (muP)",
    "observe": "shown as the framework shows it",
    "optimizer": "the optimizer there has no such setting",
    "optimizer.ema": "weights are not averaged",
    "optimizer.freeze": "everything trains",
    "optimizer.layer_decay": "all layers have one learning rate",
    "optimizer.veto": "no update is withheld",
    "parallel": "not laid out so",
    "tasks": "only the next token is learnt",
}
# True of every framework, whatever the spec says.
ALWAYS = (
    "guard: Bessemer's judge is not there: a bad step is not withheld, rolled back, tried or reported",
    "provenance: batches are not traced back to files and rows, and past steps do not replay",
    "checkpoint: no manifest is verified; saves are the framework's own",
)
NO_TRACE = {"name", "runs", "lints.silence"}  # say where our own files lie, and what we are not to say
DEFAULT = ModelShape(0, 0, 0, 0, 0, 0, 0)


def written_keys(spec: RunSpec) -> dict[str, Any]:
    """Every key that differs from its default, by its dotted name."""
    found: dict[str, Any] = {}

    def walk(value: Any, default: Any, key: str) -> None:
        if isinstance(value, BaseModel):
            blank = default if isinstance(default, BaseModel) else None
            for name, field in type(value).model_fields.items():
                usual = getattr(blank, name) if blank else field.get_default(call_default_factory=True)
                walk(getattr(value, name), usual, f"{key}.{name}" if key else name)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                walk(item, None, f"{key}.{name}")
        elif value != default:
            found[key] = value

    walk(spec, None, "")
    return {key: value for key, value in found.items() if key not in NO_TRACE}


class KeyLedger:
    """What a framework's files say of a spec, and what they do not."""

    def __init__(self, spec: RunSpec, framework: str) -> None:
        self.framework, self.written = framework, written_keys(spec)
        self._covered: list[str] = []
        self._noted: dict[str, str] = {}

    def covers(self, *keys: str) -> None:
        """The files carry these keys, and all below them; `*` stands for any name."""
        self._covered += keys

    def differs(self, key: str, how: str) -> None:
        """Something that a user must know, whether the key was written or not."""
        self._noted[key] = f"{self._noted[key]}; {how}" if key in self._noted else how

    def shape(self, shape: ModelShape, holds: Iterable[str]) -> None:
        """Cover the model, but for those of its properties that the framework's network does not hold."""
        self.covers("model")
        for field in fields(ModelShape):
            value = getattr(shape, field.name)
            if field.name not in holds and value != getattr(DEFAULT, field.name) and field.name != "wrapped_parameters":
                self.differs(f"model.{field.name}", f"{_short(value)} has no counterpart: {LOST['model']}")

    def notes(self) -> list[str]:
        """One line each: what is always so, what differs, and what has no counterpart."""
        left = {
            key: f"{_short(value)} has no counterpart in {self.framework}: {_lost(key)}"
            for key, value in self.written.items()
            if key not in self._noted and not self._is_covered(key)
        }
        return [*ALWAYS, *(f"{key}: {how}" for key, how in (self._noted | left).items())]

    def _is_covered(self, key: str) -> bool:
        return any(fnmatchcase(key, known) or fnmatchcase(key, f"{known}.*") for known in self._covered)


def _lost(key: str) -> str:
    known = [start for start in LOST if key == start or key.startswith(f"{start}.")]
    return LOST[max(known, key=len)] if known else "left out"


def _short(value: Any) -> str:
    if isinstance(value, list):
        value = [item.model_dump(exclude_defaults=True) if isinstance(item, BaseModel) else item for item in value]
    elif not isinstance(value, (str, int, float, bool, type(None))):
        return str(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    return text if len(text) <= 120 else f"{text[:117]}..."


@dataclass(frozen=True)
class Batches:
    """How the sequences of a step fall to the ranks: `rows` = `micro` x `accumulate` x data-parallel ranks."""

    rows: int
    micro: int
    accumulate: int


@dataclass(frozen=True)
class ResolvedRun:
    """A spec with everything decided. `folder` is where the files will stand."""

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
        """Data-parallel ranks."""
        return self.replicas * self.degree("dp_shard")

    @property
    def world(self) -> int:
        return self.ranks * self.degree("tp") * self.degree("cp") * self.degree("pp")

    def degree(self, name: str) -> int:
        return _degree(self.spec.parallel, name)

    def batches(self) -> Batches:
        """Whole micro-batches on every rank, which other frameworks insist on; ours pads."""
        rows, ranks = self.plan.batch_rows[0][1], self.ranks
        if rows % ranks:
            near = max(1, round(rows / ranks)) * ranks * self.plan.context
            raise UserError(
                f"budget.batch: {rows} sequences cannot be dealt evenly to {ranks} data-parallel ranks: write "
                f"budget.batch: {near}"
            )
        share = rows // ranks
        micro = max(size for size in range(1, min(self.plan.micro_rows, share) + 1) if share % size == 0)
        return Batches(rows, micro, share // micro)

    @property
    def schedule(self) -> Schedule:
        asked = self.spec.schedule
        return Schedule(
            self.plan.peak_lr, self.plan.warmup_steps, self.plan.total_steps, asked.kind, asked.floor
        )  # fmt: skip

    def save_steps(self) -> int:
        """Steps between saves, where the plan counts in seconds a twentieth of the run."""
        return self.plan.save.steps or max(1, self.plan.total_steps // 20)

    def one_batch_size(self) -> dict[str, str]:
        """The settings for frameworks whose batch never changes: our stream must not change it either."""
        return {"settings.json": replace(self.plan, batch_rows=self.plan.batch_rows[:1]).to_json()}

    def shared_files(self) -> dict[str, str]:
        """What `bessemer.launch.emit.feed` and `initial` read."""
        about = {"shape": self.shape.to_dict(), "eos": self.tokenizer.eos}
        return {
            "spec.yaml": dump_spec(self.spec),
            "plan.json": self.decisions.to_json(),
            "settings.json": self.plan.to_json(),
            "data.json": json.dumps({"folder": str(self.data)}),
            "model.json": json.dumps(about, indent=1),
            "tokenizer.json": _text(self.tokenizer),
        }


def resolve(spec: RunSpec, folder: Path, processes: int | None = None) -> ResolvedRun:
    """Prepare the data if need be, and decide. `processes` replaces the spec's data-parallel replicas by as many as
    fill so many processes."""
    spec = completed(spec)
    elsewhere = spec.parallel.device == "cuda" and not torch.cuda.is_available()
    if elsewhere and spec.precision == "auto":  # what is measured here says nothing about a GPU
        spec = spec.model_copy(update={"precision": "bf16"})
    device = torch.device("cpu") if elsewhere else pick_device(spec.parallel)
    found = decide(spec, device)
    data = found.data
    stores = {name: paths for name in found.rows if (paths := sorted(data.folder.glob(f"{name}.train*.idx")))}
    return ResolvedRun(
        spec, found.training, found.plan, found.shape, data.tokenizer, data.folder,
        {name: [path.with_suffix("") for path in paths] for name, paths in stores.items()},
        "cuda" if elsewhere else device.type, folder, _replicas(spec.parallel, processes),
    )  # fmt: skip


def _text(tokenizer: Tokenizer) -> str:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder) / "tokenizer.json")
        return (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")


def _degree(parallel: ParallelSpec, name: str) -> int:
    """A degree of the spec; what it leaves open is one."""
    written = getattr(parallel, name)
    return written if isinstance(written, int) else 1


def _replicas(parallel: ParallelSpec, processes: int | None) -> int:
    """Data-parallel replicas: the spec's, or as many as fill so many processes."""
    if processes is None:
        return _degree(parallel, "dp_replicate")
    each = math.prod(_degree(parallel, name) for name in ("dp_shard", "tp", "cp", "pp"))
    if processes < 1 or processes % each:
        raise UserError(f"{processes} processes: parallel asks for {each} of them each time: write a multiple of that")
    return processes // each
