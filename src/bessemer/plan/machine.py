"""What the planner knows of the machine: facts measured elsewhere, and the table of published peaks."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sheet:
    """A device's data sheet: dense FLOP/s in bf16 and fp8, and bytes a second of its memory. None: it has no such
    units, or variants of one name differ."""

    bf16: float
    fp8: float | None = None
    memory: float | None = None

    @property
    def tf32(self) -> float:
        return self.bf16 / 2  # on every device here that has it


# In TFLOP/s and GB/s, without sparsity; matched as words of the device's name, the first that fits: the special before
# the general. V100 and T4 have no bf16 units, theirs are fp16. MI250 and MI250X are of one of the card's two dies: each
# is a device of its own to torch. fp8 of GeForce is with fp32 accumulation.
SHEETS: tuple[tuple[str, float, float | None, float | None], ...] = (
    ("GB200", 2500, 5000, 8000), ("B200", 2250, 4500, 8000), ("GH200", 989, 1979, None),
    ("H200 NVL", 835, 1671, 4800), ("H200", 989, 1979, 4800),
    ("H100 PCIe", 756, 1513, 2000), ("H100 NVL", 835, 1671, 3900), ("H100", 989, 1979, 3350),
    ("H800", 989, 1979, None), ("H20", 148, 296, 4000),
    ("A100-SXM4-80GB", 312, None, 2039), ("A100 80GB PCIe", 312, None, 1935), ("A100-SXM4-40GB", 312, None, 1555),
    ("A100-PCIE-40GB", 312, None, 1555), ("A100", 312, None, None),
    ("A800", 312, None, None), ("A40", 150, None, 696), ("A30", 165, None, 933),
    ("A10G", 70, None, 600), ("A10", 125, None, 600),
    ("L40S", 362, 733, 864), ("L40", 181, 362, 864), ("L4", 121, 242, 300),
    ("RTX 6000 Ada", 364, 728, 960), ("A6000", 155, None, 768),
    ("RTX 5090", 209, 419, 1792), ("RTX 4090", 165, 330, 1008), ("RTX 3090", 71, None, 936),
    ("V100", 125, None, 900), ("T4", 65, None, None),
    ("MI325X", 1307, 2615, 6000), ("MI300X", 1307, 2615, 5300), ("MI250X", 191.5, None, 1600),
    ("MI250", 181, None, 1600),
)  # fmt: skip


def data_sheet(name: str) -> Sheet | None:
    """Of the device of that name, or None when it is not in the table."""
    for key, bf16, fp8, memory in SHEETS:
        if re.search(rf"\b{key}\b", name, re.I):
            return Sheet(bf16 * 1e12, fp8 and fp8 * 1e12, memory and memory * 1e9)
    return None


def published_peak(name: str) -> float | None:
    """Dense bf16 FLOP/s of that device, or None when it is not in the table."""
    return sheet.bf16 if (sheet := data_sheet(name)) else None


@dataclass(frozen=True)
class Machine:
    """One device as measured at start, or by `bessemer bench` before. `matmul` maps precision to measured FLOP/s."""

    device: str
    name: str
    memory_bytes: int
    threads: int
    matmul: dict[str, float] = field(default_factory=dict)
    training: dict[str, float] = field(
        default_factory=dict
    )  # precision -> tokens/s of a short stack of the run's shape
    source: str = "measured at start"

    def peak(self, precision: str) -> tuple[float, str]:
        """FLOP/s that utilisation is counted against, and where the number is from. That of fp8 is counted against
        bf16, as in every published table but a few: a faster precision should show as a higher utilisation."""
        counted = "bf16" if precision.startswith("fp8") else precision
        sheet = data_sheet(self.name) if self.device == "cuda" else None
        if sheet and counted in ("bf16", "fp16"):
            return sheet.bf16, f"data sheet of {self.name}"
        if sheet and counted == "tf32":
            return sheet.tf32, f"data sheet of {self.name}"
        # A device without bf16 has no rate for it, and fp16 is as fast where both are.
        measured = next(
            key for key in (counted, "bf16" if counted == "fp16" else "fp32", "fp32") if self.matmul.get(key)
        )
        return self.matmul[measured], f"{measured} matmul of this machine, {self.source}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
