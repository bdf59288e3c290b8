"""The steps that `clean` lists may name, and how an entry of such a list is read.

How documents become the rows of a batch: order, packing, padding and noise.

What is read, how it is curated, tokenized and mixed.
"""

from __future__ import annotations

import difflib
import functools
import operator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from bessemer.spec.curate import dedup, text
from bessemer.spec.curate import dedup as privacy
from bessemer.spec.curate import scores as score
from bessemer.spec.curate import text as sift
from bessemer.spec.curate.step import StepSpec
from bessemer.spec.quantity import AutoContext, AutoVocab, Bytes, Count, Paths, Share, ShortSection, SpecSection, shown

STEPS: dict[str, type[StepSpec]] = {
    spec.step: spec
    for module in (text, sift, score, privacy, dedup)
    for spec in vars(module).values()
    if isinstance(spec, type) and issubclass(spec, StepSpec) and spec.step
}


def _name(value: Any) -> str | None:
    if isinstance(value, StepSpec):
        return value.step
    if isinstance(value, dict) and len(value) == 1:
        return str(next(iter(value)))
    return value if isinstance(value, str) else None


def _known(value: Any) -> Any:
    name = _name(value)
    if name is None:
        raise ValueError(
            f"expected a step's name, or its name and settings such as length: {{min_chars: 100}}; got {shown(value)}"
        )
    if name not in STEPS:
        near = difflib.get_close_matches(name, STEPS, n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"no step {shown(name)}{meant} (there are {', '.join(STEPS)})")
    return value


def _union() -> Any:
    """Every step's section, told apart by the name."""
    return functools.reduce(operator.or_, [Annotated[spec, Tag(name)] for name, spec in STEPS.items()])


if TYPE_CHECKING:  # a type checker sees what all steps have in common
    CleanStep = StepSpec
else:
    CleanStep = Annotated[_union(), Discriminator(_name), BeforeValidator(_known)]


class PaddingSpec(SpecSection):
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


class CurriculumSpec(SpecSection):
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


class NoiseSpec(SpecSection):
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


Format = Literal[
    "text", "source", "jsonl", "csv", "parquet", "arrow", "hf", "webdataset", "mds", "tfrecord", "warc", "html"
]
Domain = Literal["web", "code", "math", "science", "books", "reference", "dialogue", "news", "multilingual", "other"]
Weight = Annotated[float, Field(ge=0, le=1e9)]


class TokenizerSpec(SpecSection):
    """Trained on the run's own data unless a tokenizer is given."""

    path: str | None = Field(
        None,
        min_length=1,
        description="a tokenizer.json, a SentencePiece .model or a tiktoken file to load",
        examples=["tokenizer.json"],
    )
    kind: Literal["bpe", "unigram", "wordpiece", "char"] = Field(
        "bpe", description="what to train: bpe, unigram, wordpiece or char", examples=["bpe"]
    )
    vocab: AutoVocab = Field("auto", description="tokens to train", examples=["8K"])
    eos: str | None = Field(None, min_length=1, description="the end-of-document token", examples=["</s>"])
    special: list[str] = Field(
        [], description="tokens with an id of their own, never split", examples=[["<|user|>", "<|assistant|>"]]
    )
    chat: str = Field(
        "chatml", description="layout of conversations: chatml, llama3, plain or a Jinja file", examples=["chatml"]
    )
    learn: Literal["all", "last"] = Field(
        "all", description="turns of the assistant that are learnt from", examples=["last"]
    )
    pattern: str | None = Field(
        None, description="for tiktoken files of other names: cl100k, o200k, gpt2 or a regex", examples=["cl100k"]
    )
    sample: Bytes = Field(64_000_000, description="text to train the tokenizer on, at most", examples=["64MB"])


class SourceSpec(ShortSection):
    """A named body of text. `name: PATH` is short for `name: {path: PATH}`."""

    path: Paths = Field(
        [], description="files, folders, globs or URLs (s3://, gs://, az://, https://)", examples=["data/*.jsonl.gz"]
    )
    format: Literal["auto", Format] = Field(
        "auto", description="auto, or one of " + ", ".join(get_args(Format)), examples=["jsonl"]
    )
    text_field: str = Field("text", description="the field or column that holds the text", examples=["text"])
    id_field: str | None = Field(None, description="the field that holds the document's own id", examples=["id"])
    url_field: str | None = Field(None, description="the field that holds its URL, for URL steps", examples=["url"])
    messages_field: str | None = Field(
        None, description="the field that holds a conversation, instead of text_field", examples=["messages"]
    )
    include: Paths = Field([], description="file patterns inside folders", examples=["*.py"])
    exclude: Paths = Field([], description="file patterns to leave out of folders", examples=["tests/*"])
    storage: dict[str, Any] = Field(
        {}, description="options of the remote file system; secrets go in the environment", examples=[{"anon": True}]
    )
    clean: list[CleanStep] = Field(
        [], description="steps for this source alone, before those of data.clean", examples=[["whitespace"]]
    )
    weight: Weight = Field(1.0, description="share in the mixture, relative to the others", examples=[1.0])
    domain: Domain | None = Field(
        None, description="what it holds, for mix: auto; found from its name if not given", examples=["code"]
    )
    max_epochs: float | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="passes over this source at most; its share then goes to the others",
        examples=[4.0],
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, (str, list)) else value


class StoreSpec(ShortSection):
    """Data that `bessemer data publish` uploaded. `store: URL` is short for `store: {url: URL}`."""

    url: str = Field(description="where it was published (s3://, gs://, az://, ...)", examples=["s3://bucket/corpus"])
    storage: dict[str, Any] = Field(
        {}, description="options of the remote file system; secrets go in the environment", examples=[{"anon": True}]
    )
    cache: Bytes | None = Field(
        None, description="disk space for downloaded shards; without it, room for all of them", examples=["50GB"]
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        scheme, mark, rest = value.partition("://")
        if not (scheme and mark and rest.strip("/")):
            raise ValueError("a URL such as s3://bucket/corpus or file:///mnt/corpus")
        if "@" in rest.partition("/")[0]:
            raise ValueError("the address holds a password; set it in the environment")
        return value


class MixPhase(SpecSection):
    """From a position of the stream on, another mixture."""

    start: Count = Field(description="tokens of the stream before this phase", examples=["10M tokens"])
    weights: dict[str, Weight] = Field(
        description="weight of each source; others are left out", examples=[{"web": 0.7}]
    )


class DataSpec(SpecSection):
    """What is read, how it is curated and mixed, and the length of a training sequence."""

    sources: dict[str, SourceSpec] = Field(description="named sources", examples=[{"code": "src/"}])
    store: StoreSpec | None = Field(
        None,
        description="published data to train from instead of the sources' files; sources then need no path",
        examples=["s3://bucket/corpus"],
    )
    clean: list[CleanStep] = Field(
        [],
        description="curation steps for all sources together, in order",
        examples=[["whitespace", {"length": {"min_chars": 100}}]],
    )
    bad_rows: Share = Field(
        0.01, description="share of rows that may be unreadable before the job fails", examples=["1%"]
    )
    part: Bytes = Field(64 << 20, description="bytes of files that a worker takes at a time", examples=["64MiB"])
    mix: Literal["weights", "auto"] = Field(
        "weights", description="weights: as the sources say; auto: target shares by domain", examples=["auto"]
    )
    phases: list[MixPhase] = Field(
        [], description="mixtures that begin later in the run", examples=[[{"start": "10M", "weights": {"code": 1}}]]
    )
    context: AutoContext = Field("auto", description="tokens in a training sequence", examples=[2048])
    packing: Literal["concat", "best_fit", "pad"] = Field(
        "concat", description="concat, best_fit (whole documents where they fit) or pad", examples=["best_fit"]
    )
    padding: PaddingSpec = Field(default_factory=PaddingSpec, description="rows of one document each")
    curriculum: CurriculumSpec = Field(default_factory=CurriculumSpec, description="order inside an epoch")
    noise: NoiseSpec = Field(default_factory=NoiseSpec, description="noise on the inputs")
    validation: Share = Field(0.01, description="share of documents held out, chosen by hash", examples=["1%"])
    exclude: Paths = Field(
        [],
        description="exclusion lists: documents that trials of other runs convicted, which then weigh nothing",
        examples=[["runs/a/exclusions.jsonl"]],
    )
    cross_documents: bool = Field(False, description="let attention cross document boundaries", examples=[False])

    @model_validator(mode="before")
    @classmethod
    def _former_runs(cls, value: Any) -> Any:
        """The spec.yaml of earlier runs contains `tokenize: ahead`; all data is tokenized ahead now."""
        if isinstance(value, dict) and value.get("tokenize") == "ahead":
            return {key: setting for key, setting in value.items() if key != "tokenize"}
        return value

    @field_validator("sources")
    @classmethod
    def _some(cls, value: dict[str, SourceSpec]) -> dict[str, SourceSpec]:
        if not value:
            raise ValueError("name at least one source, such as code: src/")
        return value
