"""Keys of other tools lead to ours, and only to keys that exist."""

import pytest
import yaml

from bessemer.spec import hints
from bessemer.spec.document import parse
from bessemer.spec.load import SpecError, _field, _fields_at, validate
from bessemer.spec.schema import RunSpec

GOOD = {"model": "1M", "data": {"sources": {"web": "x.jsonl"}}}


def problems(**more: object) -> list[str]:
    with pytest.raises(SpecError) as refused:
        validate(parse(yaml.safe_dump(GOOD | more), "run.yaml"))
    return refused.value.problems


@pytest.mark.parametrize("key", hints.FOREIGN)
def test_every_hint_names_a_key_of_the_schema(key: str) -> None:
    assert _field(tuple(key.split("."))) is not None


def test_no_foreign_name_is_listed_twice_or_is_a_section_of_ours() -> None:
    names = [name for foreign, _ in hints.FOREIGN.values() for name in foreign.split()]
    assert len(names) == len(set(names)) > 200
    ours = {key for section in ("", *RunSpec.model_fields) for key in _fields_at((section,) if section else ()) or {}}
    assert ours & set(names) == {"deepspeed"}  # elsewhere a path, here a section


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lora", "optimizer.freeze"),
        ("per_device_train_batch_size", "budget.micro_batch"),
        ("gradient_accumulation_steps", "budget.batch"),
        ("learning_rate", "optimizer.lr"),
        ("Learning-Rate", "optimizer.lr"),
        ("num_train_epochs", "budget.epochs"),
        ("bf16", "precision"),
        ("sequence_len", "data.context"),
        ("output_dir", "runs"),
        ("deepspeed", "parallel.engine"),
        ("warmup_ratio", "schedule.warmup"),
        ("rope_theta", "model.rope.theta"),
    ],
)
def test_a_name_of_another_tool(name: str, key: str) -> None:
    (line,) = problems(**{name: 1})
    assert f": {name}: unknown key; here it is {key}" in line


def test_another_tools_name_for_a_required_key_is_one_mistake() -> None:
    with pytest.raises(SpecError) as refused:
        validate(parse("base_model: x\ndatasets: [y]\n", "run.yaml"))
    assert [line.split(":")[2].strip() for line in refused.value.problems] == ["base_model", "datasets"]


def test_unknown_keys_of_an_optional_section_name_the_known_ones() -> None:
    (line,) = problems(model={"preset": "1M", "rope": {"thetta": 2.0}})
    assert line.endswith("unknown key; did you mean theta?")


def test_of_thousands_of_problems_the_first_are_shown() -> None:
    with pytest.raises(SpecError) as refused:
        validate(parse(yaml.safe_dump(GOOD | {f"key{i}": 1 for i in range(1000)}), "run.yaml"))
    lines = str(refused.value).splitlines()
    assert len(refused.value.problems) == 1000 and len(lines) == 21
    assert lines[-1] == "and 980 more problems; mend these first"
