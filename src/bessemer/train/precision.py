"""The precision of forward and backward passes; weights and moments stay as they are.

fp16 needs a loss scale besides (`scaling.py`), fp8 converted layers (`fp8.py`), tf32 a setting for the whole run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

FP8 = ("fp8", "fp8_rowwise")
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16} | dict.fromkeys(
    FP8, torch.bfloat16
)


def compute_type(precision: str) -> torch.dtype:
    """The type that layers compute and pass on in; with fp8 only their products are narrower."""
    return TYPES[precision]


def compute_in(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """For a forward pass; its backward pass follows. bf16 has fp32's range and needs no loss scaling, fp16 does.

    Converted fp8 layers compute in fp8 under autocast alone, so inside fp32 they are plain layers again.
    """
    dtype = compute_type(precision)
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


@contextmanager
def use_tf32(precision: str) -> Iterator[None]:
    """For forward and backward passes on an NVIDIA GPU: fp32 products round their factors to TF32 if `precision` is
    tf32 and never otherwise, convolutions too (torch's default there is TF32). Kernels read this when they start, so it
    has to stand around the backward pass as well.

    torch's older switches, not `fp32_precision`: torch.compile still reads the older ones, and torch refuses to answer
    once both kinds were used (2.9 to 2.13). Some versions say once that they will be deprecated.
    """
    warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    rounded = precision == "tf32"
    try:
        torch.set_float32_matmul_precision("high" if rounded else "highest")
        torch.backends.cudnn.allow_tf32 = rounded
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
