"""How documents become the rows of a batch: order, packing, padding and noise."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from bessemer.spec.part import Part


class PaddingSpec(Part):
    """Used with `packing: pad`, where every row is one document."""

    to: Literal["longest", "context"] = Field(
        "longest", description="pad to the longest row of the micro-batch, or to the context", examples=["longest"]
    )
    multiple_of: int = Field(8, ge=1, le=65536, description="round the padded length up to a multiple", examples=[8])
    side: Literal["right", "left"] = Field("right", description="where the padding goes", examples=["right"])
    long: Literal["split", "truncate"] = Field(
        "split",
        description="a document longer than the context: split into several rows, or truncate to one",
        examples=["truncate"],
    )
    buckets: int = Field(1, ge=1, le=65536, description="group documents by length into so many buckets", examples=[8])


class CurriculumSpec(Part):
    """The order inside an epoch: shuffled, or by a measure of the documents."""

    by: Literal["none", "length", "label"] = Field("none", description="none, length or label", examples=["length"])
    label: str | None = Field(None, description="the label that a step gave, such as quality", examples=["quality"])
    descending: bool = Field(False, description="largest first", examples=[False])
    groups: int = Field(
        8, ge=1, le=65536, description="documents are shuffled inside so many groups of rising measure", examples=[8]
    )

    @model_validator(mode="after")
    def _named(self) -> CurriculumSpec:
        if self.by == "label" and not self.label:
            raise ValueError("by: label needs the label to go by: write label: quality, or by: length")
        return self


class NoiseSpec(Part):
    """Noise on the inputs, the targets staying true; drawn from the seed and the position, so it replays.

    Shares are of all tokens but the first of each document, and together below 1.
    """

    mask_spans: float = Field(0.0, ge=0, lt=1, description="share of tokens in masked spans", examples=[0.15])
    span_length: float = Field(3.0, ge=1, le=1e6, description="mean length of a masked span", examples=[3.0])
    mask: list[str] = Field(
        [],
        description="special token that stands for a masked span; several are used in turn, as sentinels",
        examples=[["<mask>"]],
    )
    replace: float = Field(0.0, ge=0, lt=1, description="share of tokens replaced by random ones", examples=[0.05])
    delete: float = Field(0.0, ge=0, lt=1, description="share of tokens deleted with their targets", examples=[0.05])

    @model_validator(mode="after")
    def _something_stays(self) -> NoiseSpec:
        total = self.mask_spans + self.replace + self.delete
        if total >= 1:
            raise ValueError(f"mask_spans, replace and delete add up to {total:g}: lower them to less than 1")
        return self
