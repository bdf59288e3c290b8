"""The dpo and kto sections: how pairs of answers, or single ones with a label, become a loss."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator, model_validator

from bessemer.spec.quantity import SpecSection, setting

PairLossName = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "simpo", "orpo", "exo_pair", "nca_pair", "bco_pair",
    "sppo_hard", "apo_zero", "apo_down", "discopop",
]  # fmt: skip
LOSS_NAMES: tuple[str, ...] = get_args(PairLossName)
WITHOUT_REFERENCE = ("simpo", "orpo")
Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha", "chi_po"]
OF_DIFFERENCE = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")  # have f-divergences
SMOOTHED = ("sigmoid", "robust", "simpo", "exo_pair")  # losses that use smoothing
PREFERENCES = ("dpo", "kto")  # objectives that compare answers
ANSWER_OBJECTIVES = (*PREFERENCES, "reward")  # objectives whose rows are prompts with answers
# Those of the papers; of sigmoid_norm, Tulu 3's.
BETAS = {"sigmoid_norm": 5.0, "simpo": 2.5}
USUAL_BETA, SIMPO_MARGIN = 0.1, 1.375


class DpoSpec(SpecSection):
    """Preference optimisation on pairs (`objective: dpo`)."""

    loss: str = setting(
        "sigmoid", f"{', '.join(LOSS_NAMES)}, or your own function: path/to/file.py:function or module:function", "ipo"
    )
    beta: Annotated[float, Field(gt=0, le=1000)] | Literal["auto"] = setting(
        "auto", "how closely the model is held to the reference (sigmoid: 0.1, sigmoid_norm: 5, simpo: 2.5)", 0.1
    )
    smoothing: float = setting(
        0.0, "assumed share of pairs whose answers are exchanged (sigmoid: conservative DPO)", 0.1, ge=0, lt=0.5
    )
    divergence: Divergence = setting(
        "reverse_kl",
        "f-divergence that holds the model to the reference: reverse_kl (DPO), forward_kl, js, alpha, chi_po",
        "js",
    )
    alpha: float = setting(0.5, "divergence alpha: its alpha; 0 is forward_kl, 1 is reverse_kl", 0.5, ge=-10, le=10)
    margin: float = setting(SIMPO_MARGIN, "simpo: gamma, the margin between the two answers", 1.375, ge=0, le=1000)
    sft: Annotated[float, Field(ge=0, le=1000)] | Literal["auto"] = setting(
        "auto", "weight of the cross-entropy of the chosen answer (orpo: 1 and the prompt too, others: 0)", 0.2
    )

    share_prefix: bool | Literal["auto"] = setting(
        "auto",
        "a pair's prompt is computed once, and both answers continue it; auto: where the model's attention allows it",
        True,
    )
    reference: Literal["auto", "stored", "live"] = setting(
        "auto",
        "log-probabilities of the reference: stored (computed once, kept with the data, no reference in memory) or "
        "live (at every step); auto: stored, but live with an adapter or without files",
        "stored",
    )

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        if value not in LOSS_NAMES and not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", value):
            raise ValueError(f"no loss {value!r}; write {', '.join(LOSS_NAMES)}, or your own as path/to/file.py:name")
        return value

    @model_validator(mode="after")
    def _check_smoothing(self) -> DpoSpec:
        if self.smoothing and self.loss in LOSS_NAMES and self.loss not in SMOOTHED:
            raise ValueError(f"{self.loss} has no smoothing: remove it, or write loss: {' or '.join(SMOOTHED)}")
        if self.loss == "exo_pair" and not self.smoothing:
            raise ValueError("exo_pair needs smoothing above 0, such as 0.001")
        return self

    @model_validator(mode="after")
    def _check_divergence(self) -> DpoSpec:
        if self.divergence != "reverse_kl" and self.loss in LOSS_NAMES and self.loss not in OF_DIFFERENCE:
            fix = f"remove it, or write loss: {', '.join(OF_DIFFERENCE[:-1])} or {OF_DIFFERENCE[-1]}"
            raise ValueError(f"{self.loss} is not a loss of the difference of rewards and has no divergence: {fix}")
        if self.divergence != "alpha" and self.alpha != type(self).model_fields["alpha"].default:
            raise ValueError("alpha is that of divergence: alpha: write it too, or remove alpha")
        return self

    @property
    def beta_value(self) -> float:
        return BETAS.get(self.loss, USUAL_BETA) if self.beta == "auto" else self.beta

    @property
    def sft_weight(self) -> float:
        return float(self.loss == "orpo") if self.sft == "auto" else self.sft

    @property
    def needs_reference(self) -> bool:
        return self.loss not in WITHOUT_REFERENCE


class KtoSpec(SpecSection):
    """Single answers that are desirable or not (`objective: kto`)."""

    loss: Literal["kto", "apo_zero_unpaired"] = setting(
        "kto", "kto, or apo_zero_unpaired (no reference point, for answers better than the model's own)", "kto"
    )
    beta: float = setting(0.1, "how closely the model is held to the reference", 0.1, gt=0, le=1000)
    desirable_weight: float = setting(1.0, "weight of desirable answers in the loss", 1.0, ge=0, le=1000)
    undesirable_weight: float = setting(1.0, "weight of undesirable answers in the loss", 1.33, ge=0, le=1000)

    @property
    def needs_mismatched(self) -> bool:
        """Whether the loss has a reference point, estimated from prompts with the answers of others."""
        return self.loss == "kto"
