"""The spec as data: it survives being written and read, takes `auto` where the planner decides, has a JSON Schema."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.spec.document import parse_yaml
from bessemer.spec.load import dump_spec, load_spec, validate
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ALIASES, PRESETS

MINIMAL: dict[str, Any] = {"name": "x", "model": "10M", "data": {"sources": {"web": "data/"}}}

# Words that some YAML readers take for something else.
tricky = st.sampled_from(
    [
        "no",
        "true",
        "Null",
        "~",
        "1e5",
        "08",
        "007",
        "1_0",
        ".5",
        "0x1F",
        "1:30",
        "2024-01-01",
        "- x",
        "a: b",
        "#",
        "'",
        "<<",
    ]
)
text = tricky | st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
name = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,10}", fullmatch=True) | st.sampled_from(["no", "1e5", "08", "true"])
positive = st.floats(1e-12, 1e12)
small = st.floats(1e-12, 1)
share = st.floats(0, 0.5)
count = st.integers(1, 10**12)
span = st.one_of(
    st.just("auto"),
    st.integers(0, 10**6),
    st.floats(0, 1),
    share.map(lambda value: f"{value}%"),
    count.map("{} tokens".format),
)
interval = st.one_of(st.just("auto"), st.integers(1, 10**6), positive.filter(lambda s: s < 1e9).map("{} s".format))


def auto(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.just("auto") | values


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    sources = draw(
        st.dictionaries(
            name,
            st.one_of(
                text.filter(str.strip),
                st.fixed_dictionaries(
                    {"path": st.lists(text.filter(str.strip), min_size=1, max_size=2), "weight": st.floats(1e-6, 1e6)},
                    optional={"text_field": text, "include": st.lists(text, max_size=2)},
                ),
            ),
            min_size=1,
            max_size=3,
        )
    )
    starts = sorted(draw(st.sets(count, max_size=3)))
    weights = st.dictionaries(st.sampled_from(list(sources)), st.floats(0.01, 1e3), min_size=1)
    changes = sorted(draw(st.sets(st.integers(1, 10**6), max_size=3)))
    return {
        "name": draw(name.filter(lambda name: name != "auto")),
        "runs": draw(text),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "model": draw(
            st.sampled_from([*PRESETS, *ALIASES])
            | some(layers=st.integers(1, 99), tied=st.booleans(), norm_eps=st.floats(1e-12, 0.1)).map(
                lambda m: {"preset": "1B", **m}
            )
        ),
        "tokenizer": draw(some(vocab=auto(st.integers(257, 10**6)), eos=text, sample=count)),
        "data": {
            "sources": sources,
            "phases": [{"start": start, "weights": draw(weights)} for start in starts],
            "validation": draw(share.filter(bool)),
        },
        "budget": {
            "batch": draw(auto(count)),
            "micro_batch": draw(auto(st.integers(1, 10**6))),
            "batch_changes": [{"from_step": step, "batch": draw(count)} for step in changes],
            "stop": draw(some(patience=st.integers(1, 99), time=positive.filter(lambda s: s < 1e9).map("{} s".format))),
            **draw(st.sampled_from([{}, {"tokens": "20M"}, {"steps": "10K"}, {"epochs": 1.5}])),
        },
        "optimizer": draw(some(lr=auto(small), eps=small, betas=st.lists(st.floats(0, 0.999), min_size=2, max_size=2))),
        "schedule": draw(some(warmup=span, floor=share, kind=st.sampled_from(["cosine", "linear", "constant"]))),
        "checkpoint": draw(some(every=interval, keep_last=st.integers(1, 9), keep_best=st.booleans())),
        "evaluate": draw(some(every=interval, tokens=auto(count))),
        "observe": draw(some(line_every=st.floats(0, 1e6).map("{} s".format))),
        "parallel": draw(some(threads=auto(st.integers(1, 99)), device=st.sampled_from(["auto", "cpu", "cuda"]))),
    }


@given(specs())
def test_a_spec_survives_being_written_and_read(data: dict[str, Any]) -> None:
    spec = RunSpec.model_validate(data)
    written = dump_spec(spec)
    again = validate(parse_yaml(written, "spec.yaml"))
    assert again == spec
    assert dump_spec(again) == written
    kinds = (type(spec.schedule.warmup), type(spec.checkpoint.every))  # 1 step is not 100 %, though 1 == 1.0
    assert (type(again.schedule.warmup), type(again.checkpoint.every)) == kinds


def test_a_written_spec_is_the_same_from_a_file() -> None:
    spec = RunSpec.model_validate(MINIMAL | {"name": "1e5", "runs": "no", "schedule": {"warmup": "100%"}})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "other.yaml"
        path.write_text(dump_spec(spec), encoding="utf-8")
        assert load_spec(path) == spec


DECIDED_LATER: dict[str, dict[str, Any]] = {
    "sft": {},
    "classify": {
        "classify": {"labels": ["good", "bad"]},
        "data": {"sources": {"reviews": {"path": ["*.jsonl"], "columns": {"text": "text", "label": "label"}}}},
    },
}


@pytest.mark.parametrize("objective", DECIDED_LATER)
def test_a_written_spec_leaves_open_what_a_start_decides(objective: str) -> None:
    """Otherwise a launched run would cut conversations, and use another template than the model's own."""
    spec = RunSpec.model_validate(MINIMAL | {"objective": objective, **DECIDED_LATER[objective]})
    again = validate(parse_yaml(dump_spec(spec), "spec.yaml"))
    assert again == spec and "packing" not in again.data.model_fields_set
    assert "chat" not in again.tokenizer.model_fields_set or objective == "classify"
    assert "long" not in again.data.padding.model_fields_set or objective == "sft"
    data = {**spec.data.model_dump(exclude_unset=True), "packing": "best_fit"}
    chosen = RunSpec.model_validate(
        spec.model_dump(exclude_unset=True) | {"data": data, "tokenizer": {"chat": "plain"}}
    )
    again = validate(parse_yaml(dump_spec(chosen), "spec.yaml"))
    assert again.data.packing == "best_fit" and again.tokenizer.chat == "plain"


AUTO = [
    "tokenizer.vocab",
    "data.context",
    "budget.tokens",
    "budget.batch",
    "budget.micro_batch",
    "optimizer.lr",
    "schedule.warmup",
    "precision",
    "parallel.device",
    "parallel.threads",
    "checkpoint.every",
    "evaluate.every",
    "evaluate.tokens",
]


@pytest.mark.parametrize("key", AUTO)
def test_what_the_planner_decides_may_be_auto_and_is_by_default(key: str) -> None:
    written = RunSpec.model_validate(_with(key, "auto"))
    default = RunSpec.model_validate(MINIMAL)
    assert _get(written, key) == _get(default, key) == "auto"


def _with(key: str, value: Any) -> dict[str, Any]:
    section, _, field = key.rpartition(".")
    if not section:
        return MINIMAL | {field: value}
    return MINIMAL | {section: {**MINIMAL.get(section, {}), field: value}}


def _get(spec: RunSpec, key: str) -> Any:
    found: Any = spec
    for part in key.split("."):
        found = getattr(found, part)
    return found


def test_editors_are_told_of_every_key_and_of_the_short_forms() -> None:
    schema = RunSpec.model_json_schema()
    assert set(schema["properties"]) == set(RunSpec.model_fields)
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"model", "data"}
    definitions = schema["$defs"]
    for part in ("ModelSpec", "SourceSpec"):
        short, full = definitions[part]["anyOf"]
        assert short["type"] == "string"
        assert full["additionalProperties"] is False
    assert definitions["SourceSpec"]["anyOf"][0] == {"type": "string"}
    assert definitions["BudgetSpec"]["properties"]["tokens"]["type"] == ["number", "string"]


def _fields(model: Any, path: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, field in model.model_fields.items():
        found.append((f"{path}{key}", field))
        if hasattr(field.annotation, "model_fields"):
            found += _fields(field.annotation, f"{path}{key}.")
    return found


@pytest.mark.parametrize(("key", "field"), _fields(RunSpec), ids=lambda value: value if isinstance(value, str) else "")
def test_every_field_is_described_and_its_example_is_accepted(key: str, field: Any) -> None:
    assert field.description
    for example in field.examples or ():
        section, _, last = key.rpartition(".")
        if section.count(".") == 0:
            RunSpec.model_validate(_with(key, example) if section != "model" else MINIMAL | {"model": {last: example}})


@pytest.mark.slow
def test_editors_accept_a_step_by_its_name_and_with_settings() -> None:
    schema = RunSpec.model_json_schema()
    jsonschema = pytest.importorskip("jsonschema")
    base = {"model": "1M", "data": {"sources": {"a": "x"}}}
    good = [["whitespace", {"length": {"min_chars": 3}}], ["dedup_minhash"]]
    for steps in good:
        jsonschema.validate({**base, "data": {**base["data"], "clean": steps}}, schema)
    for steps in (["whitspace"], [{"length": {"min_char": 3}}], [5]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**base, "data": {**base["data"], "clean": steps}}, schema)
