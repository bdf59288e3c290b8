"""Settings of the scoring steps: what `keep` may be, and how a service is described."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from bessemer.spec.curate.scores import Bounds, PerplexitySpec, QualitySpec, ScoreSpec, ServiceSpec, best_share
from bessemer.spec.data import STEPS

WHOLE: dict[str, dict[str, Any]] = {
    "quality": {"model": "m"},
    "domain": {"model": "m"},
    "perplexity": {"model": "m"},
    "score": {"function": "f.py:g"},
}


@pytest.mark.parametrize("spec", [STEPS[name] for name in WHOLE], ids=lambda spec: spec.step)
def test_every_field_is_described_and_its_examples_are_accepted(spec: type[BaseModel]) -> None:
    base = WHOLE[spec.step]  # type: ignore[attr-defined]
    for name, field in spec.model_fields.items():
        assert field.description and field.examples, name
        for example in field.examples:
            others = {} if name in ("function", "service") else base
            made = spec.model_validate({**others, name: example})
            assert spec.model_validate(made.model_dump(mode="json")) == made


def test_every_field_of_a_service_is_described_and_its_examples_are_accepted() -> None:
    for name, field in ServiceSpec.model_fields.items():
        assert field.description and field.examples, name
        for example in field.examples:
            also = {"request": {"all": "{texts}"}} if name == "batch" else {}
            made = ServiceSpec.model_validate({"url": "https://host/score", **also, name: example})
            assert ServiceSpec.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize(("keep", "share"), [("best 25%", 0.25), ("best 0.3", 0.3), ("best 12.5 %", 0.125)])
def test_a_share(keep: str, share: float) -> None:
    made = QualitySpec(model="m", keep=keep)
    assert best_share(made.keep) == share and made.keep == keep


def test_numbers_and_bounds() -> None:
    assert QualitySpec.model_validate({"model": "m", "keep": 1}).keep == 1.0
    assert QualitySpec.model_validate({"model": "m", "keep": {"max": 2.0}}).keep == Bounds(min=None, max=2.0)
    assert best_share(0.5) is None and best_share(None) is None


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("top 25%", "expected a lowest score such as 0.5"),
        ("25%", "expected a lowest score such as 0.5"),
        ("best", "expected a lowest score such as 0.5"),
        ("best 25", "for 25 percent write 25%"),
        ("best 101%", "between 0 and 100%"),
        ("best 0%", "would keep nothing"),
        ("best of all", "expected a share"),
        (True, "expected a lowest score"),
        ([0.5], "expected a lowest score"),
        ({}, "set min or max"),
        ({"min": 2.0, "max": 1.0}, "min 2.0 is above max 1.0"),
        ({"least": 1.0}, "least"),
        (float("nan"), "finite"),
    ],
)
def test_what_keep_may_not_be(keep: Any, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        QualitySpec.model_validate({"model": "m", "keep": keep})
    assert message in str(error.value) and error.value.error_count() == 1


def test_perplexity_is_bounded_above() -> None:
    with pytest.raises(ValidationError, match=r"write \{max: 2.5\}"):
        PerplexitySpec(model="m", keep=2.5)
    with pytest.raises(ValidationError, match=r"head 0.6 and middle 0.5 sum to more than 1"):
        PerplexitySpec(model="m", head=0.6, middle=0.5)


@pytest.mark.parametrize("spec", [{}, {"function": "a:b", "service": "http://h/"}])
def test_a_score_is_from_one_of_the_two(spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="either function"):
        ScoreSpec.model_validate(spec)


@pytest.mark.parametrize("function", ["file.py", "a:b:c", ":f", "a:1", "a: f", ""])
def test_names_that_are_no_function(function: str) -> None:
    with pytest.raises(ValidationError):
        ScoreSpec(function=function)


def test_the_presets() -> None:
    plain = ServiceSpec.model_validate("https://host/score")
    assert (plain.request, plain.response) == ({"text": "{text}"}, "score")
    several = ServiceSpec.model_validate({"url": "https://host/score", "batch": 8})
    assert (several.request, several.response) == ({"texts": "{texts}"}, "scores")
    perspective = ServiceSpec.model_validate({"preset": "perspective", "requests_per_s": 50.0})
    assert perspective.response == "attributeScores.TOXICITY.summaryScore.value"
    assert perspective.requests_per_s == 50.0 and perspective.key_query == "key"
    own = ServiceSpec.model_validate({"preset": "perspective", "key_env": "MINE"})
    assert own.key_env == "MINE"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set url"),
        ({"url": "file:///etc/passwd"}, "expected a URL such as https"),
        ({"url": "host/score"}, "expected a URL such as https"),
        ({"url": "https://me:secret@host/"}, "use key_env and key_header"),
        ({"url": "https://h/", "request": {"text": "text"}}, 'the request needs "{text}"'),
        ({"url": "https://h/", "batch": 2, "request": {"text": "{text}"}}, 'the request needs "{texts}"'),
        ({"url": "https://h/", "key_header": "Authorization: secret"}, "key_header"),
        ({"url": "https://h/", "key_header": "A: {key}\r\nB: x"}, "key_header"),
        ({"url": "https://h/", "requests_per_s": 0.0}, "requests_per_s"),
        ({"url": "https://h/", "preset": "openai"}, "preset"),
    ],
)
def test_services_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        ServiceSpec.model_validate(settings)
    assert message in str(error.value)
    assert "secret@" not in str(error.value.errors(include_input=False))
