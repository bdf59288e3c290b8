"""A chain of runs in one spec: `stages:` lists them, and each starts from the model that the one before it trained.

Keys beside `stages` are common to all; a stage's own keys are merged into them, mappings key by key. `from:` names
another stage to start from, or `model` for the common model. `stage:NAME` as a value stands for the model of a stage.
`make:` samples a stage's training rows from the model that it starts from, and `repeat:` runs a stage several times,
each from the model of the time before: iterative DPO, or best-of-N fine-tuning. A mistake is reported with the line of
the file that it comes from.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from bessemer.errors import UserError
from bessemer.spec.document import YamlDocument, apply_override, parse_yaml
from bessemer.spec.load import SpecError, read_text, validate, with_default_name
from bessemer.spec.quantity import SpecSection, setting
from bessemer.spec.schema import RunSpec

STAGES, MODEL, _REFERENCE = "stages", "model", "stage:"
MAKE, MADE = "make", "made"  # the key of a stage, and the source of the rows that it makes
_OF_A_TOKENIZER = {"path", "kind", "vocab", "sample", "pattern", "eos"}
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,30}")
_EXAMPLE = "stages: [{name: sft, objective: sft, data: ...}, {name: dpo, objective: dpo, data: ...}]"


class SampledRowsSpec(SpecSection):
    """Rows that are sampled from the model that a stage starts from, and chosen by a reward."""

    prompts: str = setting(..., "file of prompts: one per line, or .jsonl with prompt or messages", "prompts.jsonl")
    reward: str | dict[str, Any] = setting(
        ..., "a reward model's folder or stage:NAME, or a reward as in rl.rewards, such as math", "stage:reward"
    )
    n: int = setting(8, "samples of each prompt", 8, ge=2, le=4096)
    max_tokens: int = setting(200, "maximum number of tokens of an answer", 200, ge=1, le=10**6)
    temperature: float = setting(1.0, "sampling temperature", 1.0, ge=0, le=100)
    top_p: float = setting(1.0, "sample from the most likely tokens that reach this probability", 0.95, gt=0, le=1)


class MakeSpec(SpecSection):
    """What a stage samples before it trains: `pairs` (best and worst answer) or `best` (the best answer)."""

    pairs: SampledRowsSpec | None = setting(None, "pairs for dpo", {"prompts": "p.jsonl", "reward": "math"})
    best: SampledRowsSpec | None = setting(None, "rows for sft", {"prompts": "p.jsonl", "reward": "math"})

    @model_validator(mode="after")
    def _one_kind(self) -> MakeSpec:
        if (self.pairs is None) == (self.best is None):
            raise ValueError("write pairs (for dpo) or best (for sft), such as {pairs: {prompts: FILE, reward: math}}")
        return self

    @property
    def rows(self) -> SampledRowsSpec:
        rows = self.pairs or self.best
        assert rows is not None
        return rows


@dataclass(frozen=True)
class Stage:
    """`needs`: the stages whose models it uses."""

    name: str
    spec: RunSpec
    needs: tuple[str, ...]
    make: MakeSpec | None = None

    @property
    def run(self) -> Path:
        return Path(self.spec.runs) / self.spec.name


@dataclass(frozen=True)
class Chain:
    """`folder` holds the stages' specs and models and the report."""

    folder: Path
    stages: list[Stage]

    def spec_file(self, stage: Stage) -> Path:
        return self.folder / STAGES / f"{stage.name}.yaml"

    def model_folder(self, name: str) -> Path:
        return self.folder / STAGES / name

    def made_rows(self, name: str) -> Path:
        """The rows that a stage with `make` trains on."""
        return self.folder / STAGES / f"{name}.jsonl"


def has_stages(path: Path) -> bool:
    return STAGES in parse_yaml(read_text(path), str(path)).data


def load_chain(path: Path, overrides: list[str] | tuple[str, ...] = ()) -> Chain:
    """All stages of a file, checked. `--set` settings apply to every stage."""
    document = parse_yaml(read_text(path), str(path))
    entries = document.data.get(STAGES)
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{document.place((STAGES,))}: stages: is a list of runs; write {_EXAMPLE}")
    name = with_default_name(RunSpec.model_construct(name=document.data.get("name", "auto")), path).name
    chain = Chain(Path(document.data.get("runs", RunSpec.model_fields["runs"].default)) / str(name), [])
    for i, entry in enumerate(entries):
        stage, place = entry.get("name"), document.place((STAGES, i))
        known = [earlier.name for earlier in chain.stages]
        if not isinstance(stage, str) or not _NAME.fullmatch(stage) or stage in (*known, MODEL):
            reason = f"{stage!r} is taken" if stage in (*known, MODEL) else "has no name of small letters and digits"
            raise UserError(f"{place}: stages: entry {i + 1} {reason}: give each a name of its own; {_EXAMPLE}")
        source = entry.get("from", known[-1] if known else MODEL)
        if source not in (*known, MODEL):
            raise UserError(f"{place}: from: {source!r} is no earlier stage: write {' or '.join((*known, MODEL))}")
        times = entry.get("repeat", 1)
        if not isinstance(times, int) or not 1 <= times <= 100:
            raise UserError(f"{document.place((STAGES, i))}: repeat: {times!r} is no number from 1 to 100")
        for copy_name in [f"{stage}-{k}" for k in range(1, times + 1)] if "repeat" in entry else [stage]:
            try:
                loaded = _load(chain, _document_of(document, i), f"{name}-{copy_name}", copy_name, source, overrides)
            except SpecError as error:  # what follows depends on it
                raise SpecError([f"stage {stage}: {problem}" for problem in error.problems]) from None
            chain.stages.append(loaded)
            source = copy_name
    return chain


def _load(chain: Chain, document: YamlDocument, run: str, name: str, source: str, overrides: Any) -> Stage:
    needs = [] if source == MODEL else [source]
    for override in overrides:
        apply_override(document, override)

    def resolve(value: Any) -> Any:
        """The value with `stage:NAME` replaced by that stage's model."""
        if isinstance(value, dict):
            return {key: resolve(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [resolve(inner) for inner in value]
        if not isinstance(value, str) or not value.startswith(_REFERENCE):
            return value
        needs.append(value.removeprefix(_REFERENCE))
        return str(chain.model_folder(needs[-1]))

    document.data = resolve(document.data) | {"name": run}
    if source != MODEL:  # the folder has its tokenizer
        previous = next(stage.spec.tokenizer for stage in chain.stages if stage.name == source)
        own = {key: value for key, value in document.data.get("tokenizer", {}).items() if key not in _OF_A_TOKENIZER}
        template = {"chat": previous.chat} if "chat" in previous.model_fields_set else {}
        document.data["tokenizer"] = template | own
        document.data["model"] = {"hf": str(chain.model_folder(source))}
    make = _make(chain, document, name)
    spec = validate(document)
    if make and spec.model.hf is None:
        raise SpecError(
            [f"{document.name}: make: samples from a trained model: write from: STAGE or model: {{hf: FOLDER}}"]
        )
    if unknown := [need for need in needs if need not in [stage.name for stage in chain.stages]]:
        raise SpecError([f"{document.name}: {_REFERENCE}{unknown[0]}: no earlier stage has that name"])
    return Stage(name, spec, tuple(dict.fromkeys(needs)), make)


def _make(chain: Chain, document: YamlDocument, name: str) -> MakeSpec | None:
    """Takes `make` out of the document, whose data then has the rows that it makes."""
    if (section := document.data.pop(MAKE, None)) is None:
        return None
    try:
        make = MakeSpec.model_validate(section)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, (MAKE, *first["loc"])))
        reason = f"{key}: {first['msg'].removeprefix('Value error, ')}"
        raise SpecError([f"{document.place((MAKE,))}: {reason}"]) from None
    data = document.data.setdefault("data", {})
    data["sources"] = {**data.get("sources", {}), MADE: str(chain.made_rows(name))}
    return make


def _document_of(document: YamlDocument, i: int) -> YamlDocument:
    """A stage as a document of its own, whose parts keep their lines."""
    prefix = (STAGES, i)
    entry = {key: value for key, value in document.data[STAGES][i].items() if key not in ("name", "from", "repeat")}
    common = {key: value for key, value in document.data.items() if key != STAGES}
    lines = {path: line for path, line in document.lines.items() if path[:1] != (STAGES,)}
    lines |= {path[2:]: line for path, line in document.lines.items() if path[:2] == prefix}
    problems = [problem for problem in document.problems if problem[0][:1] != (STAGES,)]
    problems += [(path[2:], line, text) for path, line, text in document.problems if path[:2] == prefix]
    return YamlDocument(_merged(common, entry), document.name, lines, problems)


def _merged(common: Any, own: Any) -> Any:
    if not isinstance(common, dict) or not isinstance(own, dict):
        return copy.deepcopy(own)
    both = {key: _merged(common[key], own[key]) if key in common else copy.deepcopy(own[key]) for key in own}
    return copy.deepcopy({key: value for key, value in common.items() if key not in own}) | both
