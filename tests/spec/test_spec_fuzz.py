"""Whatever stands in the file or on the command line: a spec, or messages for people. Never another exception."""

import copy
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import annotated_types
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, BeforeValidator

from bessemer.errors import UserError
from bessemer.spec.document import YamlDocument
from bessemer.spec.lints import lint_spec
from bessemer.spec.load import SpecError, dump_spec, load_spec, validate
from bessemer.spec.schema import RunSpec

FULL: dict[str, Any] = {
    "name": "x",
    "seed": 1,
    "model": {"preset": "10M", "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "tied": True, "norm_eps": 1e-5},
    "tokenizer": {"vocab": 512, "sample": "1MB"},
    "data": {
        "sources": {"web": "data/", "code": {"path": ["a", "b"], "weight": 0.5, "include": "*.py"}},
        "phases": [{"start": "1M", "weights": {"web": 1.0}}],
        "context": 256,
        "validation": "2%",
    },
    "budget": {
        "tokens": "20M",
        "batch": "64Ki",
        "micro_batch": 2,
        "batch_changes": [{"from_step": 10, "batch": "128Ki"}],
        "stop": {"patience": 3, "time": "1h"},
    },
    "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95]},
    "schedule": {"kind": "linear", "warmup": "100 steps", "floor": 0.1},
    "precision": "bf16",
    "parallel": {"device": "cpu", "threads": 2, "tp": 1},
    "guard": {"enabled": True, "window": 64},
    "checkpoint": {"every": "10 min", "keep_last": 1},
    "evaluate": {"every": "100 steps", "tokens": "1M"},
}

words = st.sampled_from(["auto", "no", "x", "", "10M", "2%", "10 min", "5 steps", "1e-4", "web", "0", "\0", "é", "<<"])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**70),
    st.sampled_from([0, 1, 10**9, 10**30, 10**400]),
    st.floats(),
    words,
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def outcome(text: str, overrides: tuple[str, ...] = ()) -> RunSpec | UserError:
    """What loading comes to; any other exception fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_bytes(text.encode("utf-8", "replace"))
        try:
            return load_spec(path, overrides)
        except UserError as error:
            refused = error
    lines = str(refused).splitlines()
    assert lines and all(line.startswith((str(path), "--set")) for line in lines)
    assert not isinstance(refused, SpecError) or len(lines) == len(refused.problems)
    return refused


def parts(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    below = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(found for key, inner in below for found in parts(inner, (*path, key)))]


@given(st.text(max_size=200) | st.from_regex(r"(\w{1,5}: ?[\[\]{}&*!|>'\"%@`#,?\-\w ]{0,12}\n){1,5}"))
def test_any_text(text: str) -> None:
    outcome(text)


@given(st.dictionaries(st.sampled_from(list(RunSpec.model_fields)), values, max_size=5))
def test_any_document(data: dict[str, Any]) -> None:
    outcome(yaml.safe_dump(data, allow_unicode=True))


@given(st.data())
def test_a_good_spec_with_parts_exchanged_removed_and_added(draw: st.DataObject) -> None:
    data = copy.deepcopy(FULL)
    for _ in range(draw.draw(st.integers(1, 4))):
        path = draw.draw(st.sampled_from(parts(data)[1:] or [()]))
        if not path:
            break
        holder = data
        for step in path[:-1]:
            holder = holder[step]
        match draw.draw(st.sampled_from(["exchange", "remove", "add"])):
            case "exchange":
                holder[path[-1]] = draw.draw(values)
            case "remove":
                del holder[path[-1]]
            case "add" if isinstance(holder, dict):
                holder[draw.draw(words | st.text(max_size=5))] = draw.draw(values)
    result = outcome(yaml.safe_dump(data, allow_unicode=True))
    if isinstance(result, RunSpec):
        assert outcome(dump_spec(result)) == result


@given(st.lists(st.text(max_size=20) | st.from_regex(r"[a-z_.0-9]{1,20}=[^\0]{0,20}"), max_size=3))
def test_any_setting(settings: list[str]) -> None:
    outcome(yaml.safe_dump(FULL), tuple(settings))


@given(st.sampled_from(parts(FULL)[1:]), st.text(max_size=10) | words)
def test_a_setting_of_any_key(path: tuple[Any, ...], value: str) -> None:
    outcome(yaml.safe_dump(FULL), (f"{'.'.join(map(str, path))}={value}",))


def test_the_spec_that_is_mutated_is_good() -> None:
    assert isinstance(outcome(yaml.safe_dump(FULL)), RunSpec)


def leaves(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The plain types inside an annotation, each with the constraints that hold for it."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from leaves(inner[0], (*metadata, *inner[1:]))
    elif origin in (list, tuple, dict):
        for part in inner:
            yield from leaves(part)
    elif origin is not Literal and inner:
        for part in inner:
            yield from leaves(part, metadata)
    elif origin is not Literal:
        yield annotation, metadata


def keys(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, tuple[Any, ...]]]:
    """(path, type, constraints) of every value in a section and below it; of lists, those of an entry."""
    for name, field in model.model_fields.items():
        for kind, metadata in leaves(field.annotation, tuple(field.metadata)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys(kind, (*path, name))
            else:
                yield (*path, name), kind, metadata


KEYS = list(keys(RunSpec))


def _bounds(metadata: tuple[Any, ...]) -> set[str]:
    inner = [part for item in metadata for part in (item, *getattr(item, "metadata", ()))]
    lower = any(isinstance(part, (annotated_types.Ge, annotated_types.Gt)) for part in inner)
    upper = any(isinstance(part, (annotated_types.Le, annotated_types.Lt)) for part in inner)
    parsed = any(isinstance(part, BeforeValidator) for part in inner)  # a quantity, which has its own bounds
    return {"lower", "upper"} if parsed else {name for name, there in (("lower", lower), ("upper", upper)) if there}


def test_every_number_of_the_spec_has_bounds() -> None:
    numbers = [(path, metadata) for path, kind, metadata in KEYS if kind in (int, float)]
    assert len(numbers) > 150
    assert not [".".join(path) for path, metadata in numbers if _bounds(metadata) != {"lower", "upper"}]


NASTY = [None, True, -1, 1e26, 1e-300, float("nan"), 10**30, "", "x" * 500, "a\0b", "500%", "1e30 steps", "*", [], {},
         [0, 0], {"a": 1}]  # fmt: skip


@pytest.mark.parametrize("section", RunSpec.model_fields)
def test_nasty_values_of_every_key(section: str) -> None:
    """Accepted, or refused in lines that name the key; whatever is accepted can also be linted."""
    for path in {path for path, _, _ in KEYS if path[0] == section and "clean" not in path}:
        for value in NASTY:
            data: dict[str, Any] = {"model": {"preset": "1M"}, "data": {"sources": {"web": "x.jsonl"}}}
            place = data
            for step in path[:-1]:
                inner = {"web": {"path": "x.jsonl"}} if step == "sources" else {}
                place = place[step] if isinstance(place.get(step), dict) else place.setdefault(step, inner)
                place = place["web"] if step == "sources" and isinstance(place["web"], dict) else place
            place[path[-1]] = copy.deepcopy(value)
            lines = ""
            try:
                lint_spec(validate(YamlDocument(data, "f.yaml")))
            except UserError as error:
                lines = str(error)
            assert len(lines.splitlines()) <= 21 and len(lines) < 5000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("windows", [-1]), ("windows", []), ("blocks", [0, 0]), ("qk_norm", []), ("norm_eps", 1e26),
        ("moe", {"experts": 8, "top_k": 2, "dense_layers": [99]}), ("moe", {"experts": 8, "top_k": 2, "groups": 3}),
        ("moe", {"experts": 8, "top_k": 2, "groups": 2, "top_groups": 3}),
        ("moe", {"experts": 8, "top_k": 2, "dense_layers": [-1]}), ("rope", {"theta": 1e-30}),
    ],
)  # fmt: skip
def test_numbers_that_no_model_can_have(key: str, value: Any) -> None:
    with pytest.raises(SpecError):
        validate(YamlDocument({"model": {"preset": "1M", key: value}, "data": {"sources": {"a": "b"}}}, "f.yaml"))
