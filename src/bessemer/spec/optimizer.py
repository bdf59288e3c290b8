"""The memory section: what is kept where, and what is computed again. Each key trades speed or exactness for room.

The optimizer section: which optimizer, its hyper-parameters, how a verdict reaches it, averaged weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from bessemer.spec.quantity import AutoNumber, Share, SpecSection

LEAN = ("adamw", "adam", "lion")  # optimizers with a step of our own, for few bytes
BLOCK = 256  # elements of a moment that share a scale in 8 bits
# Numbers that each optimizer keeps for a parameter. Adafactor's are a row and a column of a matrix; Muon's matrices
# have one, the embedding and the head, which AdamW updates, two.
MOMENTS = {"adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adamax": 2, "adagrad": 1, "lion": 1, "muon": 1}
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "8bit": 1 + 4 / BLOCK}


class MemorySpec(SpecSection):
    """Room on the device. Nothing is given up as it stands; `activations: auto` pays speed where rows do not fit."""

    activations: Literal["auto", "none", "selective", "full"] | Share = Field(
        "auto",
        description="what the backward pass computes again: none; selective (what costs least for its room); full "
        "(whole layers); or the share of activations to keep, 0 to 1; auto is the least that fits",
        examples=["selective"],
    )
    offload_activations: bool = Field(
        False, description="keep activations in the host's memory between forward and backward", examples=[True]
    )
    weights: Literal["auto", "fp32", "kahan", "stochastic"] = Field(
        "auto",
        description="fp32, which bf16 is rounded from for each pass; kahan: bf16 and what rounding took away, as exact "
        "as fp32 and without casts; or bf16 alone, whose updates are rounded stochastically; auto is kahan on a GPU "
        "for adamw under bf16 and fp8, else fp32",
        examples=["stochastic"],
    )
    moments: Literal["fp32", "bf16", "8bit"] = Field(
        "fp32", description="how adamw, adam and lion keep their moments: fp32, bf16 or 8bit", examples=["8bit"]
    )
    offload_optimizer: bool = Field(
        False,
        description="keep moments, and what kahan keeps, in the host's memory; each update fetches and returns them",
        examples=[True],
    )
    update: Literal["after", "in_backward"] = Field(
        "after",
        description="when weights are updated: after the backward pass, or each once its gradient is known, which "
        "saves the gradients' room and gives up clipping and the judgement of a step before its update",
        examples=["in_backward"],
    )

    @property
    def lean(self) -> bool:
        """Whether the optimizer's step is our own rather than torch's."""
        asked = (self.kept, self.moments, self.update)
        return self.offload_optimizer or asked != ("fp32", "fp32", "after")

    @property
    def kept(self) -> str:
        """How weights are kept, where nobody has decided otherwise."""
        return "fp32" if self.weights == "auto" else self.weights


@dataclass(frozen=True)
class ParameterBytes:
    """What one trained parameter takes between forward and update. Vectors, which stay fp32, are too few to count."""

    weights: float
    gradients: float
    moments: float  # on the device, with what kahan keeps
    working: float  # the weights once more, in the passes' precision
    host: float

    @property
    def device(self) -> float:
        return self.weights + self.gradients + self.moments + self.working


def optimizer_bytes(optimizer: OptimizerSpec, memory: MemorySpec, precision: str = "bf16") -> ParameterBytes:
    """Bytes of a parameter on the device and on the host. What no layout changes: activations, and during an update
    in backward the gradients of one layer; with offload, about 1 GB of room for what is under way."""
    written = optimizer.settings()
    count = MOMENTS.get(optimizer.name, 0)
    if optimizer.name in ("sgd", "rmsprop"):
        count = (optimizer.name == "rmsprop") + bool(written["momentum"])
    state = count * MOMENT_BYTES[memory.moments] + (2.0 if memory.kept == "kahan" else 0.0)
    weights = 4.0 if memory.kept == "fp32" else 2.0
    gradients = 0.0 if memory.update == "in_backward" else weights
    working = 2.0 if weights == 4.0 and precision not in ("fp32", "tf32") else 0.0
    on_host = state if memory.offload_optimizer else 0.0
    return ParameterBytes(weights, gradients, state - on_host, working, on_host)


def memory_faults(optimizer: OptimizerSpec, memory: MemorySpec, precision: str) -> Iterator[tuple[str, str]]:
    """Keys of this section that cannot work with the rest of the spec, each with the fix."""
    own = ", ".join(LEAN)
    if memory.lean and optimizer.name not in LEAN:
        asked = {"weights": memory.kept != "fp32", "moments": memory.moments != "fp32",
                 "offload_optimizer": memory.offload_optimizer, "update": memory.update != "after"}  # fmt: skip
        for key in (key for key, wanted in asked.items() if wanted):
            yield key, f"{optimizer.name} keeps its state its own way: remove this, or write optimizer.name: {own}"
    if memory.kept != "fp32" and precision not in ("auto", "bf16", "fp8", "fp8_rowwise"):
        yield "weights", f"{memory.kept} keeps weights in bf16 and precision is {precision}: write precision: bf16"
    if memory.update == "in_backward" and precision == "fp16":
        yield "update", "fp16 scales the loss, and finds an overflow only after backward: write precision: bf16"
    if memory.update == "in_backward" and optimizer.veto != "auto":
        yield "update", f"nothing can be withheld in backward: remove optimizer.veto ({optimizer.veto}), or this"


Beta = Annotated[float, Field(ge=0, lt=1)]
# What each optimizer takes, and the value where none is written. Decay defaults to 0 where it is not decoupled from the
# gradient (L2), and is larger for Lion by what its learning rate is smaller, as its authors advise.
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    "adam": {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0},
    "adagrad": {"eps": 1e-10, "weight_decay": 0.0},
    "rmsprop": {"alpha": 0.99, "momentum": 0.0, "eps": 1e-8, "weight_decay": 0.0},
    "nadam": {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    "radam": {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    "adamax": {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
    "lion": {"betas": [0.9, 0.99], "weight_decay": 0.5},
    "adafactor": {"weight_decay": 0.0},
    "muon": {"momentum": 0.95, "nesterov": True, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
}
FUSED = ("adamw", "adam", "sgd", "adagrad")  # torch has kernels for these that take the verdict themselves


class OptimizerSpec(SpecSection):
    """The optimizer. What is left out has the value that suits it: betas are [0.9, 0.95], of adamax [0.9, 0.999], of
    lion [0.9, 0.99]; the other keys say theirs. A key that the optimizer does not have is refused.
    """

    name: Literal[
        "adamw", "adam", "sgd", "adagrad", "rmsprop", "nadam", "radam", "adamax", "lion", "adafactor", "muon"
    ] = Field(
        "adamw",
        description="adamw, adam, sgd, adagrad, rmsprop, nadam, radam, adamax, lion, adafactor, or muon (for hidden "
        "matrices, with AdamW for the rest, at the same learning rate)",
        examples=["adamw"],
    )
    lr: AutoNumber = Field("auto", description="peak learning rate", examples=[3e-4])
    betas: list[Beta] | None = Field(
        None, min_length=2, max_length=2, description="decay of the two moments", examples=[[0.9, 0.95]]
    )
    eps: float | None = Field(
        None, gt=0, le=1, description="epsilon; 1e-8, for adagrad 1e-10; lion and adafactor have none", examples=[1e-8]
    )
    momentum: Beta | None = Field(
        None, description="momentum of sgd (0.9), rmsprop (0) and muon (0.95)", examples=[0.9]
    )
    nesterov: bool | None = Field(
        None, description="Nesterov's momentum, of sgd (false) and muon (true)", examples=[True]
    )
    alpha: Beta | None = Field(None, description="decay of the squares in rmsprop; 0.99", examples=[0.99])
    weight_decay: float | None = Field(
        None,
        ge=0,
        le=100,
        description="decay of matrices: decoupled in adamw, nadam, radam, muon (0.1), lion (0.5) and adafactor (0), "
        "added to the gradient in the others (0)",
        examples=[0.1],
    )
    clip: float = Field(1.0, gt=0, le=1e12, description="largest gradient norm", examples=[1.0])
    freeze: list[str] = Field(
        [],
        description="parameters that stay as they are: names, layers (ranges too) or globs of their names",
        examples=[["embedding", "blocks.0-11", "*.ffn.*"]],
    )
    layer_decay: float | None = Field(
        None,
        gt=0,
        le=1,
        description="learning rate of each layer as a factor on that of the layer above it; the head has the full one",
        examples=[0.9],
    )
    veto: Literal["auto", "fused", "host", "select"] = Field(
        "auto",
        description="how a verdict withholds an update: in the fused kernel, by one read on the host before it, or by "
        "copying weights and moments and choosing afterwards; auto is fused where there is such a kernel, else host",
        examples=["host"],
    )
    ema: float | None = Field(
        None, gt=0, lt=1, description="keep an average of the weights with this decay, for evaluation", examples=[0.999]
    )

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters that the chosen optimizer takes, as written or as suits it."""
        written = {key: getattr(self, key) for key in SETTINGS[self.name]}
        return {key: SETTINGS[self.name][key] if value is None else value for key, value in written.items()}

    def unused(self) -> list[str]:
        """Hyper-parameters that are written and that the chosen optimizer does not have."""
        known = dict.fromkeys(key for own in SETTINGS.values() for key in own)
        return [key for key in known if key not in SETTINGS[self.name] and getattr(self, key) is not None]
