"""Settings of the deduplication steps: described, with examples that hold, and refused where they make no sense."""

from typing import Any

import pytest
from pydantic import ValidationError

from bessemer.spec.curate.dedup import DecontaminateSpec, DedupMinhashSpec, EvaluationSetSpec
from bessemer.spec.data import STEPS as ALL_STEPS
from bessemer.spec.text_steps import StepSpec

STEPS = [spec for name, spec in ALL_STEPS.items() if name.startswith("de")]
NEEDED: dict[str, dict[str, Any]] = {"decontaminate": {"sets": {"arc": "arc.jsonl"}}}


@pytest.mark.parametrize("spec", STEPS, ids=lambda spec: spec.step)
def test_every_field_is_described_and_its_examples_are_accepted(spec: type[StepSpec]) -> None:
    needed = NEEDED.get(spec.step, {})
    assert spec.model_validate(needed) == spec.model_validate({spec.step: needed})
    for name, field in spec.model_fields.items():
        assert field.description
        assert field.examples
        for example in field.examples:
            spec.model_validate({**needed, name: example})


@pytest.mark.parametrize("spec", STEPS, ids=lambda spec: spec.step)
def test_settings_survive_being_written(spec: type[StepSpec]) -> None:
    made = spec.model_validate(NEEDED.get(spec.step, {}))
    assert spec.model_validate_json(made.model_dump_json()) == made


def test_a_preset_fills_what_is_not_written() -> None:
    assert DedupMinhashSpec().numbers == ("word", 5, 14, 8)
    assert DedupMinhashSpec(preset="curator").numbers == ("char", 24, 20, 13)
    assert DedupMinhashSpec(preset="curator", bands=9).numbers == ("char", 24, 9, 13)
    assert DedupMinhashSpec(preset="none", unit="char", ngram=7, bands=2, rows=3).numbers == ("char", 7, 2, 3)
    with pytest.raises(ValidationError, match="preset: none also needs ngram, rows"):
        DedupMinhashSpec(preset="none", unit="char", bands=2)


def test_a_set_may_be_a_path() -> None:
    spec = DecontaminateSpec.model_validate({"sets": {"a": "x.jsonl", "b": {"path": "y", "fields": ["q"]}}})
    assert spec.sets == {"a": EvaluationSetSpec(path=["x.jsonl"]), "b": EvaluationSetSpec(path=["y"], fields=["q"])}
    with pytest.raises(ValidationError):
        DecontaminateSpec.model_validate({"sets": {}})
