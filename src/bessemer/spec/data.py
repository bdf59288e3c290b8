"""The data and tokenizer sections: sources, curation steps, mixture, order, packing, padding and noise."""

from __future__ import annotations

import difflib
import functools
import operator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from bessemer.spec import text_steps as text
from bessemer.spec.curate import dedup, scores
from bessemer.spec.quantity import (
    AutoContext,
    AutoVocab,
    Bytes,
    Count,
    Paths,
    Share,
    ShortSection,
    SpecSection,
    check_url,
    format_value,
    section,
    setting,
)
from bessemer.spec.text_steps import StepSpec

STEPS: dict[str, type[StepSpec]] = {
    spec.step: spec
    for module in (text, scores, dedup)
    for spec in vars(module).values()
    if isinstance(spec, type) and issubclass(spec, StepSpec) and spec.step
}


def _step_name(value: Any) -> str | None:
    if isinstance(value, StepSpec):
        return value.step
    if isinstance(value, dict) and len(value) == 1:
        return str(next(iter(value)))
    return value if isinstance(value, str) else None


def _check_step(value: Any) -> Any:
    name = _step_name(value)
    if name is None:
        raise ValueError(
            "expected a step's name, or its name and settings such as length: {min_chars: 100}; "
            f"got {format_value(value)}"
        )
    if name not in STEPS:
        near = difflib.get_close_matches(name, STEPS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"no step {format_value(name)}{hint} (steps are {', '.join(STEPS)})")
    return value


def _step_union() -> Any:
    """The union of all step sections, discriminated by name."""
    return functools.reduce(operator.or_, [Annotated[spec, Tag(name)] for name, spec in STEPS.items()])


if TYPE_CHECKING:  # type checkers see the common base class
    CleanStep = StepSpec
else:
    CleanStep = Annotated[_step_union(), Discriminator(_step_name), BeforeValidator(_check_step)]


class PaddingSpec(SpecSection):
    """Used with `packing: pad`, where every row is one document."""

    to: Literal["longest", "context"] = setting("longest", "pad to the longest row or to the context", "longest")
    multiple_of: int = setting(8, "round the padded length up to a multiple", 8, ge=1, le=65536)
    side: Literal["right", "left"] = setting("right", "side of the padding", "right")
    long: Literal["split", "truncate"] = setting(
        "split", "documents longer than the context: split into several rows, or truncate", "truncate"
    )
    buckets: int = setting(1, "number of buckets of documents by length", 8, ge=1, le=65536)


class CurriculumSpec(SpecSection):
    """The order within an epoch: shuffled, or by a measure of the documents."""

    by: Literal["none", "length", "label"] = setting("none", "none, length or label", "length")
    label: str | None = setting(None, "a label set by a step, such as quality", "quality")
    descending: bool = setting(False, "largest first", False)
    groups: int = setting(8, "groups of rising measure; documents are shuffled within each", 8, ge=1, le=65536)

    @model_validator(mode="after")
    def _named(self) -> CurriculumSpec:
        if self.by == "label" and not self.label:
            raise ValueError("by: label needs a label: write label: quality, or by: length")
        return self


class NoiseSpec(SpecSection):
    """Noise on the inputs; targets are unchanged. Draws depend only on seed and position, so steps can be replayed.

    Shares are of all tokens except the first of each document, and sum to less than 1.
    """

    mask_spans: float = setting(0.0, "share of tokens in masked spans", 0.15, ge=0, lt=1)
    span_length: float = setting(3.0, "mean length of a masked span", 3.0, ge=1, le=1e6)
    mask: list[str] = setting([], "special tokens that replace masked spans, used in turn", ["<mask>"])
    replace: float = setting(0.0, "share of tokens replaced by random ones", 0.05, ge=0, lt=1)
    delete: float = setting(0.0, "share of tokens deleted with their targets", 0.05, ge=0, lt=1)

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
COLUMN_ROLES = (
    "text", "words", "label", "prompt", "completion", "chosen", "rejected", "margin", "answers", "scores", "annotators",
    "turns", "rewards", "instruction", "input", "output", "system", "tools",
)  # fmt: skip
OPTIONAL_ROLES = ("input", "system", "tools", "annotators")  # a row may lack them
ChatFormat = Literal["messages", "sharegpt", "alpaca", "prompt_completion", "text"]
Weight = Annotated[float, Field(ge=0, le=1e9)]


class TokenizerSpec(SpecSection):
    """Trained on the run's own data unless a tokenizer is given."""

    path: str | None = setting(
        None, "a tokenizer.json, a SentencePiece .model or a tiktoken file to load", "tokenizer.json", min_length=1
    )
    kind: Literal["bpe", "unigram", "wordpiece", "char"] = setting("bpe", "bpe, unigram, wordpiece or char", "bpe")
    vocab: AutoVocab = setting("auto", "tokens to train", "8K")
    eos: str | None = setting(None, "the end-of-document token", "</s>", min_length=1)
    special: list[str] = setting([], "tokens with an id of their own, never split", ["<|user|>", "<|assistant|>"])
    chat: str = setting(
        "chatml",
        "layout of conversations: chatml, llama3, plain, none (texts one after another) or a Jinja file",
        "chatml",
    )
    learn: Literal["all", "last", "completion", "everything"] = setting(
        "all",
        "what conversations are learnt from: all turns of the assistant, the last, its turns after the last message "
        "of the user (completion), or every token (everything)",
        "last",
    )
    pattern: str | None = setting(None, "for tiktoken files of other names: cl100k, o200k, gpt2 or a regex", "cl100k")
    sample: Bytes = setting(64_000_000, "text to train the tokenizer on, at most", "64MB")


class SourceSpec(ShortSection, short="path"):
    """A named body of text. `name: PATH` is short for `name: {path: PATH}`."""

    path: Paths = setting([], "files, folders, globs or URLs (s3://, gs://, az://, https://)", "data/*.jsonl.gz")
    format: Literal["auto", Format] = setting("auto", "auto, or one of " + ", ".join(get_args(Format)), "jsonl")
    text_field: str = setting("text", "the field or column that holds the text", "text")
    id_field: str | None = setting(None, "the field that holds the document's id", "id")
    url_field: str | None = setting(None, "the field that holds its URL, for steps that use URLs", "url")
    messages_field: str | None = setting(None, "the field that holds a conversation, instead of text_field", "messages")
    columns: dict[str, str] | None = setting(
        None,
        "columns by what they are for: text (instead of text_field), words, label; prompt with completion, with "
        "completion and label (a thumb up or down), with chosen and rejected (and their margin), or with answers (a "
        "list, best first, or with their scores); annotators (their votes); turns with rewards (a conversation with a "
        "number for each turn of the assistant); instruction, input and output; system; "
        "tools (JSON schemas)",
        {"text": "review", "label": "sentiment"},
    )
    ranked: Literal["adjacent", "best", "all"] = setting(
        "best",
        "pairs from `answers`: each with the next one (adjacent), the best with each other one (best), or all pairs",
        "adjacent",
    )
    chat_format: ChatFormat | None = setting(
        None,
        "format of the rows: messages, sharegpt, alpaca, prompt_completion or text; objective: sft recognises it from "
        "the first rows",
        "sharegpt",
    )
    message_weights: bool = setting(
        False,
        "messages have a `weight`, by which the loss of their tokens is multiplied; objective: sft recognises it from "
        "the first rows",
        True,
    )
    include: Paths = setting([], "file patterns inside folders", "*.py")
    exclude: Paths = setting([], "file patterns to exclude inside folders", "tests/*")
    storage: dict[str, Any] = setting({}, "file system options; secrets go in the environment", {"anon": True})
    clean: list[CleanStep] = setting([], "steps for this source only, before those of data.clean", ["whitespace"])
    weight: Weight = setting(1.0, "share in the mixture, relative to the others", 1.0)
    domain: Domain | None = setting(None, "its domain, for mix: auto (default: derived from its name)", "code")
    max_epochs: float | None = setting(
        None, "maximum epochs over this source; then its share goes to the others", 4.0, gt=0, le=1_000_000
    )

    @model_validator(mode="after")
    def _check_columns(self) -> SourceSpec:
        """The text's column becomes `text_field`."""
        if self.columns is None:
            return self
        if unknown := [role for role in self.columns if role not in COLUMN_ROLES]:
            raise ValueError(f"columns: no {unknown[0]!r}; write {', '.join(COLUMN_ROLES)}")
        text = self.columns.get("text") or self.columns.get("words")
        if text and text != self.text_field:
            if self.text_field != "text":
                raise ValueError(f"columns and text_field ({self.text_field}) both name the text: remove text_field")
            self.__dict__["text_field"] = text
        if "instruction" in self.columns or "output" in self.columns or "input" in self.columns:
            return self._check_instruction(text)
        for role in ("system", "tools"):
            if role in self.columns and not self.messages_field and "prompt" not in self.columns:
                raise ValueError(f"columns: {role} needs a prompt, an instruction or messages_field")
        if ("turns" in self.columns) != ("rewards" in self.columns):
            raise ValueError("columns: turns and rewards need each other")
        answers = [role for role in ("completion", "chosen", "rejected", "answers", "turns") if role in self.columns]
        complete = (["completion"], ["chosen", "rejected"], ["answers"], ["turns"])
        if answers and answers not in complete:
            raise ValueError("columns: a prompt needs completion, both chosen and rejected, or answers")
        if "turns" in answers and "prompt" in self.columns:
            raise ValueError("columns: turns are a conversation with its prompts: remove prompt")
        if answers in (["completion"], ["answers"]) and "prompt" not in self.columns:
            raise ValueError(f"columns: {answers[0]} needs prompt")
        if "scores" in self.columns and answers != ["answers"]:
            raise ValueError("columns: scores are those of answers: name their column too")
        if (answers or "prompt" in self.columns) and (self.messages_field or text):
            other = f"messages_field ({self.messages_field})" if self.messages_field else f"the text ({text})"
            raise ValueError(f"columns: prompt and answers, and {other}: name one of them")
        return self

    def _check_instruction(self, text: str | None) -> SourceSpec:
        roles = set(self.columns or ())
        if not {"instruction", "output"} <= roles:
            raise ValueError("columns: instruction and output need each other, and input needs both")
        if (
            (others := roles - {"instruction", "input", "output", "system", "tools", "label"})
            or self.messages_field
            or text
        ):
            other = ", ".join(sorted(others)) or f"messages_field ({self.messages_field})"
            raise ValueError(f"columns: instruction and output, and {other}: name one of them")
        return self

    @property
    def has_answers(self) -> bool:
        """Whether a row is a prompt with its answers."""
        roles = ("completion", "chosen", "output", "answers", "turns")
        return self.columns is not None and any(role in self.columns for role in roles)

    @property
    def compares(self) -> bool:
        """Whether a row has answers that are not to be imitated."""
        columns = self.columns or {}
        named = any(role in columns for role in ("chosen", "answers", "turns"))
        return named or ("label" in columns and self.has_answers)

    @property
    def has_only_prompt(self) -> bool:
        """Whether a row is a prompt whose answers are sampled."""
        return "prompt" in (self.columns or {}) and not self.has_answers

    @property
    def names_content(self) -> bool:
        """Whether the spec says which fields of a row are read."""
        return bool(self.messages_field or self.columns or self.chat_format) or self.text_field != "text"

    @property
    def is_chat(self) -> bool:
        """Whether its documents are conversations, laid out by the chat template."""
        return self.messages_field is not None or self.has_answers


class StoreSpec(ShortSection, short="url"):
    """Data that `bessemer data publish` uploaded. `store: URL` is short for `store: {url: URL}`."""

    url: str = setting(..., "URL of the published data (s3://, gs://, az://, ...)", "s3://bucket/corpus")
    storage: dict[str, Any] = setting({}, "file system options; secrets go in the environment", {"anon": True})
    cache: Bytes | None = setting(None, "disk space for downloaded shards (default: enough for all)", "50GB")

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        return check_url(value, "s3://bucket/corpus or file:///mnt/corpus")


class MixPhase(SpecSection):
    """Another mixture from a position of the stream on."""

    start: Count = setting(..., "tokens before this phase starts", "10M tokens")
    weights: dict[str, Weight] = setting(..., "weight of each source; other sources are not used", {"web": 0.7})


class DataSpec(SpecSection):
    """Sources, curation, mixture, and the length of a training sequence."""

    sources: dict[str, SourceSpec] = setting(..., "named sources", {"code": "src/"})
    store: StoreSpec | None = setting(
        None,
        "published data to train on instead of the sources' files; sources then need no path",
        "s3://bucket/corpus",
    )
    clean: list[CleanStep] = setting(
        [], "curation steps for all sources", ["whitespace", {"length": {"min_chars": 100}}]
    )
    bad_rows: Share = setting(0.01, "largest share of unreadable rows before the job fails", "1%")
    part: Bytes = setting(64 << 20, "bytes of files per unit of work", "64MiB")
    mix: Literal["weights", "auto"] = setting("weights", "weights: of the sources; auto: shares by domain", "auto")
    phases: list[MixPhase] = setting([], "later mixtures of the run", [{"start": "10M", "weights": {"code": 1}}])
    context: AutoContext = setting("auto", "tokens per training sequence", 2048)
    packing: Literal["concat", "best_fit", "pad"] = setting(
        "concat", "concat, best_fit (keeps documents whole if they fit) or pad", "best_fit"
    )
    padding: PaddingSpec = section(PaddingSpec, "padding of rows with one document each")
    curriculum: CurriculumSpec = section(CurriculumSpec, "order within an epoch")
    noise: NoiseSpec = section(NoiseSpec, "noise on the inputs")
    validation: Share = setting(0.01, "share of documents held out for validation, chosen by hash", "1%")
    exclude: Paths = setting(
        [],
        "exclusion lists of other runs: documents that a trial found harmful get zero loss weight",
        ["runs/a/exclusions.jsonl"],
    )
    cross_documents: bool = setting(False, "let attention cross document boundaries", False)
    workers: int = setting(
        1,
        "threads that assemble batches ahead of the loop; 0 assembles a step's batches when it starts",
        2,
        ge=0,
        le=64,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_obsolete_keys(cls, value: Any) -> Any:
        """The spec.yaml of earlier runs contains `tokenize: ahead`; all data is tokenized ahead now."""
        if isinstance(value, dict) and value.get("tokenize") == "ahead":
            return {key: item for key, item in value.items() if key != "tokenize"}
        return value

    @field_validator("sources")
    @classmethod
    def _some(cls, value: dict[str, SourceSpec]) -> dict[str, SourceSpec]:
        if not value:
            raise ValueError("list at least one source, such as code: src/")
        return value
