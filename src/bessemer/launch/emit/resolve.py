"""A run decided but not started: what the writers of other frameworks' files go by, and the files they all share.

The plan is made as `bessemer train` makes it, data and tokenizer included; no network is built. The shared files are
those of a run's folder, so that the rest of Bessemer opens them: spec, settings, data, model, tokenizer.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bessemer.data.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.optim.schedule import Schedule
from bessemer.plan.decide import TrainPlan
from bessemer.plan.decision import Plan
from bessemer.spec.load import dump_spec
from bessemer.spec.parallel import ParallelSpec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.supervise.dry import decide
from bessemer.supervise.start import completed
from bessemer.train.device import pick_device


@dataclass(frozen=True)
class Batches:
    """How the sequences of a step fall to the ranks: `rows` = `micro` x `accumulate` x data-parallel ranks."""

    rows: int
    micro: int
    accumulate: int


@dataclass(frozen=True)
class Resolved:
    """A spec with everything decided. `folder` is where the files will stand."""

    spec: RunSpec
    plan: TrainPlan
    decisions: Plan
    shape: ModelShape
    tokenizer: Tokenizer
    data: Path
    stores: dict[str, list[Path]]  # prefixes of each source's token files; none where rows are tokenized on the fly
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


def resolve(spec: RunSpec, folder: Path, processes: int | None = None) -> Resolved:
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
    return Resolved(
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
