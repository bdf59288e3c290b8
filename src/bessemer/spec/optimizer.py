"""The optimizer and memory sections: hyper-parameters, and how weights, moments and activations are stored.

Each memory key trades speed or exactness for memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from bessemer.spec.adapter import NF4_BYTES
from bessemer.spec.quantity import AutoNumber, Share, SpecSection, StepCount, section, setting
from bessemer.spec.schedule import SegmentSpec

LOW_MEMORY_OPTIMIZERS = ("adamw", "adam", "lion")  # optimizers with Bessemer's own low-memory step
BLOCK = 256  # elements of an 8-bit moment that share a scale
# Moments per parameter. Adafactor stores a row and a column per matrix. Muon has one for matrices, and two for the
# embedding and the head, which AdamW updates.
# SM3 stores sums of rows and columns besides its momentum. Schedule-Free stores the average that is evaluated and the
# point that moves, AdEMAMix a second mean, MARS the last gradient.
# SOAP has two moments; its bases depend on the shapes of the matrices (plan/cost_model/memory.py).
MOMENTS = {
    "adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adamax": 2, "adagrad": 1, "lion": 1, "muon": 1, "lamb": 2,
    "lars": 1, "sm3": 1, "schedule_free": 3, "soap": 2, "ademamix": 3, "mars": 3,
    "sophia": 2,
}  # fmt: skip
SOAP_LARGEST = 10_000  # a longer side of a matrix is not rotated, as in the paper's code
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "8bit": 1 + 4 / BLOCK}


class MemorySpec(SpecSection):
    """How device memory is saved. By default nothing is traded for it; `activations: auto` recomputes if needed."""

    activations: Literal["auto", "none", "selective", "full"] | Share = setting(
        "auto",
        "what the backward pass recomputes: none, selective (the cheapest operations for their memory), full (whole "
        "layers), or the share of activations to keep, 0 to 1; auto recomputes as little as fits",
        "selective",
    )
    offload_activations: bool = setting(False, "offload activations to host memory between forward and backward", True)
    weights: Literal["auto", "fp32", "kahan", "stochastic"] = setting(
        "auto",
        "fp32: master weights, cast to bf16 for each pass; kahan: bf16 plus the rounding remainder, as exact as fp32 "
        "and without casts; stochastic: bf16 with stochastic rounding of updates; auto is kahan on a GPU for adamw "
        "and muon with bf16 or fp8, else fp32",
        "stochastic",
    )
    moments: Literal["fp32", "bf16", "8bit"] = setting(
        "fp32", "precision of the moments of adamw, adam and lion: fp32, bf16 or 8bit", "8bit"
    )
    offload_optimizer: bool = setting(
        False, "offload moments, and the remainders of kahan, to host memory; each update transfers them", True
    )
    update: Literal["after", "in_backward"] = setting(
        "after",
        "when weights are updated: after the backward pass, or each weight as soon as its gradient is known, which "
        "saves the memory of gradients but disables clipping and the check of a step before its update",
        "in_backward",
    )

    @property
    def lean(self) -> bool:
        """Whether the step is Bessemer's own low-memory step instead of torch's."""
        return self.offload_optimizer or (self.kept, self.moments, self.update) != ("fp32", "fp32", "after")

    @property
    def kept(self) -> str:
        """How weights are stored, with `auto` as fp32."""
        return "fp32" if self.weights == "auto" else self.weights


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes per parameter between forward and update, on average over those that train and those that do not. Vectors,
    which stay fp32, are too few to count."""

    weights: float
    gradients: float
    moments: float  # on the device, with the remainders of kahan
    working: float  # a copy of the weights in the precision of the passes
    host: float
    trained: float = 1.0  # share of the parameters; the others have weights only
    quantized: float = 0.0  # share of the parameters that are held in NF4

    def accumulated(self, several: bool) -> float:
        """Gradients, which accumulate in fp32 over several micro-batches."""
        return 4.0 * self.trained if several and self.gradients else self.gradients

    @property
    def held(self) -> float:
        """Bytes of the weights, of which some are quantized."""
        return (1 - self.quantized) * self.weights + self.quantized * NF4_BYTES

    @property
    def device(self) -> float:
        return self.held + self.gradients + self.moments + self.working


def optimizer_bytes(
    optimizer: OptimizerSpec, memory: MemorySpec, precision: str = "bf16", trained: float = 1.0
) -> ParameterBytes:
    """Bytes per parameter on the device and on the host; `trained` is the share that trains (`spec/trained.py`). Not
    counted: activations, the gradients of one layer during an update in backward, and about 1 GB of transfer buffers
    with offloading."""
    count = 2 if optimizer.external else MOMENTS.get(optimizer.name, 0)
    if optimizer.name in ("sgd", "rmsprop"):
        count = (optimizer.name == "rmsprop") + bool(optimizer.settings()["momentum"])
    state = (count * MOMENT_BYTES[memory.moments] + (2.0 if memory.kept == "kahan" else 0.0)) * trained
    weights = 4.0 if memory.kept == "fp32" else 2.0
    # Sophia holds the gradients of a step while it takes those of sampled labels.
    copies = weights * (bool(optimizer.sam) + bool(optimizer.lookahead) + (optimizer.name == "sophia")) * trained
    gradients = 0.0 if memory.update == "in_backward" else weights * trained
    working = 2.0 if weights == 4.0 and precision not in ("fp32", "tf32") else 0.0
    on_host = state if memory.offload_optimizer else 0.0
    return ParameterBytes(weights, gradients, state - on_host + copies, working, on_host, trained)


def memory_problems(optimizer: OptimizerSpec, memory: MemorySpec, precision: str) -> Iterator[tuple[str, str]]:
    """Keys of the memory section that conflict with the rest of the spec, each with the fix."""
    if memory.lean and optimizer.name not in LOW_MEMORY_OPTIMIZERS:
        exact = ("fp32", "kahan") if optimizer.name == "muon" else ("fp32",)
        set_keys = {"weights": memory.kept not in exact, "moments": memory.moments != "fp32",
                 "offload_optimizer": memory.offload_optimizer, "update": memory.update != "after"}  # fmt: skip
        for key in (key for key, is_set in set_keys.items() if is_set):
            yield (
                key,
                f"{optimizer.name} has its own state: remove this, or write optimizer.name: "
                f"{', '.join(LOW_MEMORY_OPTIMIZERS)}",
            )
    if memory.kept != "fp32" and precision not in ("auto", "bf16", "fp8", "fp8_rowwise"):
        yield "weights", f"{memory.kept} stores weights in bf16, but precision is {precision}: write precision: bf16"
    if memory.update == "in_backward" and precision == "fp16":
        yield "update", "fp16 detects an overflow only after backward: write precision: bf16"
    if memory.update == "in_backward" and optimizer.veto != "auto":
        yield "update", f"an update in backward cannot be withheld: remove optimizer.veto ({optimizer.veto}), or this"


Beta = Annotated[float, Field(ge=0, lt=1)]
# Settings of each optimizer with their defaults. Weight decay defaults to 0 where it is not decoupled from the gradient
# (L2). Lion's is larger because its learning rate is smaller, as its authors advise.
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
    "lamb": {"betas": [0.9, 0.999], "eps": 1e-6, "weight_decay": 0.01},
    "lars": {"momentum": 0.9, "trust": 1e-3, "weight_decay": 1e-4},
    "sm3": {"momentum": 0.9, "eps": 1e-30, "weight_decay": 0.0},
    "schedule_free": {"betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1},
    "soap": {"betas": [0.95, 0.95], "eps": 1e-8, "interval": 10, "weight_decay": 0.01},
    "ademamix": {
        "betas": [0.9, 0.999], "beta3": 0.9999, "slow_share": 5.0, "slow_warmup": 10_000, "eps": 1e-8,
        "weight_decay": 0.1,
    },
    "mars": {"betas": [0.95, 0.99], "gamma": 0.025, "eps": 1e-8, "weight_decay": 0.01},
    "sophia": {"betas": [0.96, 0.99], "gamma": 0.05, "eps": 1e-12, "interval": 10, "weight_decay": 0.2},
}  # fmt: skip
# Steps that take the verdict on the device: torch's fused kernels, and Bessemer's own.
FUSED = ("adamw", "adam", "sgd", "adagrad", "adafactor", "muon", "lamb", "lars", "sm3", "schedule_free", "ademamix",
         "mars", "sophia")  # fmt: skip


class MuonSpec(SpecSection):
    """How Muon makes an update of its momentum (`optimizer.name: muon`)."""

    orthogonalize: Literal["keller", "polar_express", "exact"] = setting(
        "keller",
        "coefficients of the Newton-Schulz iteration: keller (5 steps), polar_express (5 steps, more precise) or exact "
        "(12 steps)",
        "polar_express",
    )
    precision: Literal["auto", "bf16", "fp32", "fp64"] = setting(
        "auto", "precision of the iteration; auto is bf16 on a GPU, else that of the weights", "fp32"
    )
    scale: Literal["rms", "spectral"] = setting(
        "rms",
        "size of an update: rms suits learning rates of AdamW, spectral (near 0.02) keeps its best rate over widths",
        "spectral",
    )
    cautious: bool = setting(False, "decay only weights that the update makes smaller", True)


GROUP_KINDS = ("embedding", "head", "vectors", "matrices")


class GroupSpec(SpecSection):
    """Parameters with their own settings (`optimizer.groups`). What is left out is the optimizer's."""

    lr_factor: float = setting(1.0, "learning rate as a factor on the schedule's", 0.3, gt=0, le=1e6)
    weight_decay: float | None = setting(None, "weight decay, of vectors too", 0.0, ge=0, le=100)
    betas: list[Beta] | None = setting(None, "decay rates of the two moments", [0.8, 0.95], min_length=2, max_length=2)
    train_from: StepCount | None = setting(None, "first step that trains these parameters: frozen before", 1000)
    train_until: StepCount | None = setting(None, "first step that no longer trains them", 5000)
    segments: list[SegmentSpec] = setting(
        [],
        "changes of the factor, which starts at 1: as schedule.segments, with a length in steps",
        [{"from_step": 1000, "to": "10%", "length": 500}],
    )
    decay_segments: list[SegmentSpec] = setting(
        [],
        "changes of the weight decay as a factor, which starts at 1: as segments",
        [{"from_step": 1000, "to": "0%", "length": 500}],
    )


class LookaheadSpec(SpecSection):
    """Lookahead around the optimizer (`optimizer.lookahead`)."""

    every: int = setting(5, "accepted updates between two moves of the slow weights", 5, ge=1, le=1_000_000)
    share: float = setting(0.5, "how far they move towards the fast ones", 0.5, gt=0, le=1)


class OptimizerSpec(SpecSection):
    """The optimizer. Defaults depend on the optimizer: betas are [0.9, 0.95], for adamax [0.9, 0.999], for lion
    [0.9, 0.99]; the other keys list theirs. Keys that the optimizer does not have are errors.
    """

    name: Literal[
        "adamw", "adam", "sgd", "adagrad", "rmsprop", "nadam", "radam", "adamax", "lion", "adafactor", "muon", "lamb",
        "lars", "sm3", "schedule_free", "soap", "ademamix", "mars", "sophia"
    ] | Annotated[str, Field(pattern=r"^pytorch_optimizer\.[A-Za-z]\w*$")] = setting(
        "adamw",
        "adamw, adam, sgd, adagrad, rmsprop, nadam, radam, adamax, lion, adafactor, lamb, lars, sm3, schedule_free, "
        "soap, ademamix, mars, sophia, or muon (hidden matrices; AdamW updates the rest at the same learning rate); or "
        "a class of the package pytorch-optimizer, such as pytorch_optimizer.Prodigy",
        "adamw",
    )  # fmt: skip
    lr: AutoNumber = setting("auto", "peak learning rate", 3e-4)
    betas: list[Beta] | None = setting(None, "decay rates of the two moments", [0.9, 0.95], min_length=2, max_length=2)
    eps: float | None = setting(
        None,
        "epsilon (1e-8; adagrad 1e-10, lamb 1e-6, sm3 1e-30, sophia 1e-12); lion, lars and adafactor have none",
        1e-8,
        gt=0,
        le=1,
    )
    momentum: Beta | None = setting(None, "momentum of sgd, lars and sm3 (0.9), rmsprop (0) and muon (0.95)", 0.9)
    nesterov: bool | None = setting(None, "Nesterov momentum of sgd (false) and muon (true)", True)
    alpha: Beta | None = setting(None, "decay of the squared gradients in rmsprop (0.99)", 0.99)
    trust: float | None = setting(None, "length of a step of lars as a share of the weight's norm (1e-3)", 1e-3, gt=0)
    interval: int | None = setting(
        None, "steps between two refreshes of soap's eigenbases or sophia's curvature (10)", 10, ge=1
    )
    beta3: float | None = setting(None, "decay rate of ademamix's slow mean (0.9999)", 0.999, gt=0, lt=1)
    slow_share: float | None = setting(None, "weight of ademamix's slow mean, alpha in the paper (5)", 8.0, ge=0)
    slow_warmup: int | None = setting(
        None, "steps in which ademamix's slow mean gains its weight and length (10000); the paper's is the run", 5000,
        ge=1,
    )  # fmt: skip
    gamma: float | None = setting(
        None, "strength of mars's gradient correction (0.025); share of the curvature that sophia divides by (0.05)",
        0.05, ge=0, le=1,
    )  # fmt: skip
    arguments: dict[str, Any] = setting(
        {}, "arguments of a class of pytorch-optimizer, besides lr and weight_decay", {"betas": [0.9, 0.99]}
    )
    muon: MuonSpec = section(MuonSpec, "with name: muon: how updates are made")
    weight_decay: float | None = setting(
        None,
        "weight decay of matrices: decoupled in adamw, nadam, radam, muon, schedule_free, ademamix (0.1), lamb, "
        "soap, mars (0.01), sophia (0.2), "
        "lion (0.5), adafactor and sm3 (0); added to the gradient in the others (0, lars 1e-4)",
        0.1,
        ge=0,
        le=100,
    )
    clip: float = setting(1.0, "gradient clipping: largest norm", 1.0, gt=0, le=1e12)
    clipping: Literal["norm", "parameter", "value", "agc", "zclip", "adagc"] = setting(
        "norm",
        "what clip limits: the global norm, the norm of each parameter, or each value; agc limits rows to 1 % of their "
        "weights' norm; zclip and adagc learn limits for the global norm or each parameter, below clip",
        "zclip",
    )
    centralize: bool = setting(False, "subtract the mean of each row from the gradients of matrices", True)
    noise: float | None = setting(
        None, "noise on gradients: its standard deviation at the first step, which falls as step^-0.55", 0.01, gt=0
    )
    freeze: list[str] = setting(
        [],
        "parameters that are not trained: names, layers (also ranges) or globs of names",
        ["embedding", "blocks.0-11", "*.ffn.*"],
    )
    groups: dict[str, GroupSpec] = setting(
        {},
        "settings by group: embedding, head, vectors, matrices, or patterns as in freeze; the first match counts",
        {"embedding": {"lr_factor": 0.3}},
    )
    layer_decay: float | None = setting(
        None,
        "layer-wise decay: learning rate of each layer as a factor of the layer above; the head has the full rate",
        0.9,
        gt=0,
        le=1,
    )
    veto: Literal["auto", "fused", "host", "select"] = setting(
        "auto",
        "how a vetoed update is skipped: in the fused kernel (fused), by a read on the host before it (host), or by "
        "copying weights and moments and selecting afterwards (select); auto is fused if such a kernel exists, else "
        "host",
        "host",
    )
    sam: float | None = setting(
        None, "SAM: take each gradient at weights moved this far uphill; a second pass per step", 0.05, gt=0, le=100
    )
    sam_adaptive: bool = setting(
        False, "ASAM: move each weight in proportion to its size; write a larger sam, such as 0.5", True
    )
    lookahead: LookaheadSpec | None = setting(
        None, "Lookahead: pull the weights back towards slow ones; with radam it is Ranger", {"every": 5}
    )
    ema: float | None = setting(
        None, "moving average of the weights with this decay, for evaluation", 0.999, gt=0, lt=1
    )

    @property
    def external(self) -> bool:
        """Whether it is a class of another package."""
        return "." in self.name

    @property
    def plain_clipping(self) -> bool:
        """Whether gradients are only divided by a number."""
        return self.clipping == "norm" and not self.centralize and self.noise is None

    @property
    def averages(self) -> bool:
        """Whether an average of the weights is evaluated and exported instead of them."""
        return self.ema is not None or self.name == "schedule_free"

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters of the chosen optimizer, with their defaults filled in."""
        if self.external:
            return {**self.arguments, "weight_decay": self.weight_decay or 0.0}
        return {
            key: default if (value := getattr(self, key)) is None else value
            for key, default in SETTINGS[self.name].items()
        }

    def unused(self) -> list[str]:
        """Hyper-parameters that are set but that the chosen optimizer does not have."""
        known = dict.fromkeys(key for settings in SETTINGS.values() for key in settings)
        own = ["weight_decay"] if self.external else SETTINGS[self.name]
        return [key for key in known if key not in own and getattr(self, key) is not None]
