"""What the planner knows of the machine: facts measured elsewhere, and the table of published peaks."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

# Dense bf16 peaks in FLOP/s from the vendors' data sheets, without sparsity; matched as words of the device's name,
# the first that fits: the special before the general. V100 and T4 have no bf16 units, theirs are fp16.
PEAK_BF16: tuple[tuple[str, float], ...] = (
    ("GB200", 2500e12), ("B200", 2250e12), ("GH200", 989e12), ("H200", 989e12),
    ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12), ("H800", 989e12), ("H20", 148e12),
    ("A100", 312e12), ("A800", 312e12), ("A40", 150e12), ("A30", 165e12), ("A10G", 70e12), ("A10", 125e12),
    ("L40S", 362e12), ("L40", 181e12), ("L4", 121e12), ("RTX 6000 Ada", 364e12), ("A6000", 155e12),
    ("RTX 5090", 209e12), ("RTX 4090", 165e12), ("RTX 3090", 71e12), ("V100", 125e12), ("T4", 65e12),
    ("MI325X", 1307e12), ("MI300X", 1307e12), ("MI250X", 383e12), ("MI250", 362e12),
)  # fmt: skip


def published_peak(name: str) -> float | None:
    """Dense bf16 FLOP/s of that device, or None when it is not in the table."""
    return next((peak for key, peak in PEAK_BF16 if re.search(rf"\b{key}\b", name, re.I)), None)


@dataclass(frozen=True)
class Machine:
    """One device as measured at start. `matmul` maps precision to measured FLOP/s."""

    device: str
    name: str
    memory_bytes: int
    threads: int
    matmul: dict[str, float] = field(default_factory=dict)
    training: dict[str, float] = field(
        default_factory=dict
    )  # precision -> tokens/s of a short stack of the run's shape

    def peak(self, precision: str) -> tuple[float, str]:
        """FLOP/s that utilisation is counted against, and where the number is from."""
        published = published_peak(self.name) if self.device == "cuda" and precision == "bf16" else None
        if published:
            return published, f"data sheet of {self.name}"
        measured = precision if self.matmul.get(precision) else "fp32"  # a device without bf16 has no rate for it
        return self.matmul[measured], f"measured {measured} matmul of this machine"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
