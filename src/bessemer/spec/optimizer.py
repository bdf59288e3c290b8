"""The optimizer section: which optimizer, its hyper-parameters, how a verdict reaches it, averaged weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from bessemer.spec.part import Part
from bessemer.spec.quantity import AutoNumber

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


class OptimizerSpec(Part):
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
