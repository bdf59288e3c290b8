"""What a machine does at most: the numbers of `bessemer bench`, kept for each user and each kind of machine.

The planner and the profiler count from them; `train/ceilings.py` measures them.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

from bessemer.errors import UserError
from bessemer.plan.machine import data_sheet
from bessemer.run.directory import write_whole

HEADER = f"{'what':<22} {'size':<20} {'rate':>16} {'sheet':>5}  note"


@dataclass(frozen=True)
class Reading:
    """One rate. `key` says of what: matmul_bf16, attention_forward_64, attention_both_64, copy, to_device_pinned,
    disk_write, all_reduce and so on; sizes and kernels share one."""

    key: str
    size: str
    rate: float | None  # None: not measured, and `note` says why
    unit: str  # FLOP/s or B/s
    note: str = ""


@dataclass(frozen=True)
class Ceilings:
    device: str
    name: str
    count: int  # GPUs; on a CPU its threads
    date: str
    versions: dict[str, str]
    readings: tuple[Reading, ...] = ()

    @property
    def source(self) -> str:
        return f"measured on {self.date[:10]} by bessemer bench"

    def best(self) -> dict[str, float]:
        """The highest rate of each key: the roofline."""
        ranked = sorted((reading.rate, reading.key) for reading in self.readings if reading.rate is not None)
        return {key: rate for rate, key in ranked}

    def matmul(self) -> dict[str, float]:
        """Precision -> FLOP/s."""
        return {key.removeprefix("matmul_"): rate for key, rate in self.best().items() if key.startswith("matmul_")}

    def line(self, reading: Reading) -> str:
        """One row of the printed table, with the share of what the data sheet promises."""
        scale, prefix = next((pair for pair in ((1e12, "T"), (1e9, "G")) if (reading.rate or 0) >= pair[0]), (1e6, "M"))
        rate = "-" if reading.rate is None else f"{reading.rate / scale:,.4g} {prefix}{reading.unit}"
        peak = self._promised(reading.key)
        share = f"{reading.rate / peak:.0%}" if reading.rate and peak else ""
        return f"{reading.key.replace('_', ' '):<22} {reading.size:<20} {rate:>16} {share:>5}  {reading.note}".rstrip()

    def _promised(self, key: str) -> float | None:
        sheet = data_sheet(self.name) if self.device == "cuda" else None
        if sheet is None:
            return None
        known = {"matmul_fp8": sheet.fp8, "matmul_tf32": sheet.tf32, "copy": sheet.memory}
        like_bf16 = key in ("matmul_bf16", "matmul_fp16") or key.startswith("attention")
        return sheet.bf16 if like_bf16 else known.get(key)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Ceilings:
        data = json.loads(text)
        return Ceilings(**data | {"readings": tuple(Reading(**reading) for reading in data["readings"])})


def ceilings_path(name: str, count: int, torch_version: str) -> Path:
    """Machines of one kind share a file: a cluster with one home folder is measured once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "bessemer/machines" / (re.sub(r"[^\w.+-]+", "-", f"{name} x{count} torch {torch_version}") + ".json")


def store_ceilings(ceilings: Ceilings, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, ceilings.to_json())
    except OSError as fault:
        fix = "set XDG_CACHE_HOME to a folder of yours, or use --no-save"
        raise UserError(f"{path}: cannot be written ({fault.strerror}): {fix}") from fault


def load_ceilings(path: Path) -> Ceilings | None:
    """None where nothing was measured. A damaged file is told of and passed over: a run must start without it."""
    try:
        return Ceilings.from_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as fault:
        warnings.warn(f"{path}: not readable ({fault}): run bessemer bench again", stacklevel=2)
        return None
