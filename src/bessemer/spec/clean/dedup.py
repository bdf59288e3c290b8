"""Settings of the steps for deduplication and decontamination."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from bessemer.spec.clean.step import StepSpec
from bessemer.spec.part import Paths, ShortPart
from bessemer.spec.quantity import Share

Keep = Literal["first", "longest"]
Unit = Literal["word", "char"]
MINHASH_PRESETS: dict[str, tuple[Unit, int, int, int]] = {  # unit, ngram, bands, rows
    "fineweb": ("word", 5, 14, 8),
    "curator": ("char", 24, 20, 13),
}
TRACKING = ["utm_*", "fbclid", "gclid", "dclid", "msclkid", "yclid", "igshid", "mc_cid", "mc_eid", "_ga"]


def _keep() -> Any:
    return Field("first", description="of duplicates, the first or the longest stays", examples=["longest"])


def _left() -> Any:
    return Field(
        100, ge=0, description="a document goes when cutting leaves it fewer characters", examples=[200]
    )


class DedupUrlSpec(StepSpec):
    """Of documents from one address, one stays. Documents without a URL stay."""

    step: ClassVar[str] = "dedup_url"
    keep: Keep = _keep()
    tracking: list[str] = Field(
        TRACKING,
        description="query parameters that are no part of the address; * at the end is any ending",
        examples=[["utm_*", "fbclid"]],
    )
    ignore_query: bool = Field(False, description="the whole query is no part of it", examples=[True])


class DedupExactSpec(StepSpec):
    """Of documents with the same text, one stays."""

    step: ClassVar[str] = "dedup_exact"
    keep: Keep = _keep()
    ignore_case: bool = Field(False, description="upper and lower case are the same", examples=[True])
    ignore_whitespace: bool = Field(
        True, description="any white space is one space; none at the ends", examples=[True]
    )
    ignore_punctuation: bool = Field(
        False, description="punctuation and symbols do not count", examples=[True]
    )


class DedupMinhashSpec(StepSpec):
    """Of near-duplicates, one stays: MinHash signatures, and buckets that similar documents share (LSH).

    Two documents whose n-grams overlap by s (Jaccard) are found with probability 1 - (1 - s^rows)^bands.
    """

    step: ClassVar[str] = "dedup_minhash"
    preset: Literal["fineweb", "curator", "none"] = Field(
        "fineweb",
        description="fineweb: 5 words, 14 x 8; curator: 24 characters, 20 x 13; none: all given here",
        examples=["curator"],
    )
    unit: Unit | None = Field(None, description="n-grams of words or of characters", examples=["word"])
    ngram: int | None = Field(None, ge=1, le=256, description="units in an n-gram", examples=[5])
    bands: int | None = Field(None, ge=1, le=512, description="buckets for each document", examples=[14])
    rows: int | None = Field(None, ge=1, le=512, description="hashes that make a bucket", examples=[8])
    seed: int = Field(1, ge=0, lt=2**32, description="of the hash functions", examples=[1])
    verify: float | None = Field(
        None,
        gt=0,
        le=1,
        description="least overlap, estimated from all hashes, for a bucket's documents to be duplicates",
        examples=[0.7],
    )
    keep: Keep = _keep()

    @model_validator(mode="after")
    def _complete(self) -> DedupMinhashSpec:
        missing = [key for key in ("unit", "ngram", "bands", "rows") if getattr(self, key) is None]
        if self.preset == "none" and missing:
            raise ValueError(f"preset none needs {', '.join(missing)} as well")
        return self

    @property
    def numbers(self) -> tuple[Unit, int, int, int]:
        """Unit, ngram, bands and rows: what is written here, and the preset for the rest."""
        unit, ngram, bands, rows = MINHASH_PRESETS.get(self.preset, ("word", 0, 0, 0))
        return self.unit or unit, self.ngram or ngram, self.bands or bands, self.rows or rows


class DedupSimhashSpec(StepSpec):
    """Of documents whose 64-bit SimHash differs in few bits, one stays."""

    step: ClassVar[str] = "dedup_simhash"
    unit: Unit = Field("word", description="n-grams of words or of characters", examples=["word"])
    ngram: int = Field(
        3, ge=1, le=256, description="units in an n-gram; each counts as often as it occurs", examples=[3]
    )
    distance: int = Field(
        3, ge=0, le=7, description="bits that may differ; all pairs within it are found", examples=[3]
    )
    keep: Keep = _keep()


class DedupParagraphsSpec(StepSpec):
    """Paragraphs that stood in the corpus before are cut out."""

    step: ClassVar[str] = "dedup_paragraphs"
    unit: Literal["paragraph", "line"] = Field(
        "paragraph", description="paragraph (parted by empty lines) or line", examples=["line"]
    )
    min_chars: int = Field(50, ge=1, description="shorter ones are left alone", examples=[50])
    min_count: int = Field(2, ge=2, description="how often one must occur to be cut", examples=[3])
    ignore_case: bool = Field(True, description="upper and lower case are the same", examples=[True])
    ignore_whitespace: bool = Field(
        True, description="any white space is one space; none at the ends", examples=[True]
    )
    ignore_punctuation: bool = Field(
        False, description="punctuation and symbols do not count", examples=[True]
    )
    min_left_chars: int = _left()


class DedupSubstringsSpec(StepSpec):
    """Passages that stood in the corpus before, byte for byte, are cut out, wherever they begin.

    The published threshold is 50 tokens; with some 4 bytes a token, 200 bytes.
    """

    step: ClassVar[str] = "dedup_substrings"
    min_bytes: int = Field(
        200, ge=2, le=16384, description="bytes of UTF-8 that make a repeat", examples=[200]
    )
    min_left_chars: int = _left()


class EvaluationSetSpec(ShortPart):
    """An evaluation set: JSONL (an item a line) or text files (an item a line). `PATH` is short for `{path: PATH}`."""

    path: Paths = Field(description="files, folders or globs", examples=["evals/arc/*.jsonl"])
    fields: list[str] = Field(
        [],
        description="JSON fields that make an item, in order; all strings in it if not given",
        examples=[["question", "answer"]],
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, (str, list)) else value


class DecontaminateSpec(StepSpec):
    """Documents that hold text of an evaluation set go, or lose it, or are only reported."""

    step: ClassVar[str] = "decontaminate"
    sets: dict[str, EvaluationSetSpec] = Field(
        min_length=1, description="evaluation sets by name", examples=[{"arc": "evals/arc.jsonl"}]
    )
    ngram: int = Field(
        13,
        ge=2,
        le=64,
        description="words that must match: 13 as for GPT-3, 12 as for FineWeb",
        examples=[12],
    )
    action: Literal["drop", "cut", "report"] = Field(
        "drop", description="drop the document, cut what matches, or only report", examples=["cut"]
    )
    max_matches: int = Field(0, ge=0, description="matching n-grams that a document may have", examples=[2])
    max_share: Share = Field(
        0.0, description="share of a document's words that may match, too", examples=["1%"]
    )
    max_items: int | None = Field(
        None,
        ge=1,
        description="n-grams in more evaluation items than this are boilerplate and do not count",
        examples=[10],
    )
    margin_chars: int = Field(
        0, ge=0, description="what else is cut on both sides; 200 for GPT-3", examples=[200]
    )
    min_left_chars: int = _left()


STEPS: tuple[type[StepSpec], ...] = (
    DedupUrlSpec,
    DedupExactSpec,
    DedupMinhashSpec,
    DedupSimhashSpec,
    DedupParagraphsSpec,
    DedupSubstringsSpec,
    DecontaminateSpec,
)
