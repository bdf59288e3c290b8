"""What is learnt from a row of tokens: the objectives of pre-training, the loss over them, and dropout."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from bessemer.spec.part import Part, ShortPart

Probability = Annotated[float, Field(ge=0, lt=1)]
# What each objective takes, and the value where none is written.
SETTINGS: dict[str, dict[str, float]] = {
    "causal": {},
    "masked": {"rate": 0.15, "mask": 0.8, "random": 0.1},
    "denoise": {"rate": 0.15, "span": 3.0},
    "prefix": {},
    "infill": {"rate": 0.5, "suffix_first": 0.5},
}
TOKENS = {"masked": ["<mask>"], "infill": ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]}


class ObjectiveSpec(ShortPart):
    """What is learnt from a row. `causal` is short for `{kind: causal}`. Of several objectives, each row has one,
    chosen by a hash of its position; a key that the kind does not have is refused.
    """

    kind: Literal["causal", "masked", "denoise", "prefix", "infill"] = Field(
        "causal",
        description="causal (the next token), masked (BERT), denoise (T5: spans behind sentinels), prefix (prefix-LM) "
        "or infill (fill-in-the-middle)",
        examples=["causal"],
    )
    share: float = Field(
        1.0, gt=0, le=1e9, description="share of the rows, relative to other objectives", examples=[0.5]
    )
    sources: list[str] = Field(
        [],
        description="only rows of these sources; a named source has no objectives but those that name it",
        examples=[["code"]],
    )
    rate: float | None = Field(
        None,
        gt=0,
        le=1,
        description="masked, denoise: share of tokens to restore (0.15); infill: share of documents rearranged (0.5)",
        examples=[0.15],
    )
    mask: float | None = Field(
        None, ge=0, le=1, description="masked: share of these that the mask token hides (0.8)", examples=[0.8]
    )
    random: float | None = Field(
        None, ge=0, le=1, description="masked: share of these replaced at random (0.1); the rest stay", examples=[0.1]
    )
    span: float | None = Field(None, ge=1, le=1e6, description="denoise: mean tokens in a span (3)", examples=[3.0])
    suffix_first: float | None = Field(
        None, ge=0, le=1, description="infill: share of the rearranged with the suffix first (0.5)", examples=[0.5]
    )
    tokens: list[str] = Field(
        [],
        description="special tokens to use: masked: <mask>; infill: <fim_prefix>, <fim_middle>, <fim_suffix>; denoise: "
        "<extra_id_0>, <extra_id_1> and so on, as many as a row has spans",
        examples=[["[MASK]"]],
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_its_kind(self) -> ObjectiveSpec:
        for key in ("rate", "mask", "random", "span", "suffix_first"):
            if getattr(self, key) is not None and key not in SETTINGS[self.kind]:
                owners = " and ".join(kind for kind, keys in SETTINGS.items() if key in keys)
                raise ValueError(f"{key} belongs to {owners}: remove it, or write kind: {owners.split()[0]}")
        settings = self.settings()
        if self.kind in ("masked", "denoise") and settings["rate"] >= 1:
            raise ValueError(f"rate {settings['rate']:g} leaves nothing to go by: write less than 1, such as 0.15")
        if self.kind == "masked" and settings["mask"] + settings["random"] > 1 + 1e-9:
            total = settings["mask"] + settings["random"]
            raise ValueError(f"mask and random add up to {total:g}: lower them to 1 or less")
        wanted = len(TOKENS.get(self.kind, []))
        if self.tokens and self.kind != "denoise" and len(self.tokens) != wanted:
            names = ", ".join(TOKENS.get(self.kind, [])) or "none"
            raise ValueError(f"{self.kind} uses {wanted} tokens ({names}), not {len(self.tokens)}: write as many")
        if len(set(self.tokens)) < len(self.tokens):
            raise ValueError(f"tokens names one twice: {', '.join(self.tokens)}; write different ones")
        return self

    def settings(self) -> dict[str, float]:
        """The parameters of the kind, as written or as its paper has them."""
        written = {key: getattr(self, key) for key in SETTINGS[self.kind]}
        return {key: SETTINGS[self.kind][key] if value is None else value for key, value in written.items()}

    def special_tokens(self, context: int) -> list[str]:
        """The names that the tokenizer must have; a document of denoise can be as long as the context."""
        if self.kind == "denoise" and not self.tokens:
            return [f"<extra_id_{k}>" for k in range(spans_of(context, **self.settings())[1])]
        return self.tokens or TOKENS.get(self.kind, [])


def spans_of(length: int, rate: float, span: float) -> tuple[int, int]:
    """(tokens in spans, spans) of a text of at least 2 tokens, by the rule of T5's random_spans_noise_mask."""
    noise = min(max(round(length * rate), 1), length - 1)
    return noise, min(max(round(noise / span), 1), length - noise)


class LossSpec(Part):
    """What is added to the cross-entropy that is minimised; the loss that is shown and judged stays plain."""

    smoothing: Probability = Field(0.0, description="label smoothing", examples=[0.1])
    focal: float = Field(0.0, ge=0, le=100, description="focal loss: times (1 - p) to this power", examples=[2.0])
    z: float = Field(0.0, ge=0, le=1e3, description="z-loss: this times the squared log of the sum", examples=[1e-4])


class DropoutSpec(Part):
    """Chance of each value to be zeroed in training; drawn from the seed and the step, so it replays."""

    embedding: Probability = Field(0.0, description="of the embeddings", examples=[0.1])
    attention: Probability = Field(0.0, description="of the attention weights", examples=[0.1])
    residual: Probability = Field(0.0, description="of what each branch adds to the residual stream", examples=[0.1])
