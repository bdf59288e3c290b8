"""The objectives' section: short form, defaults of each kind, and mistakes with their fix."""

import pytest
from pydantic import ValidationError

from bessemer.spec.model import DropoutSpec, LossSpec, ObjectiveSpec, count_spans


def test_defaults_are_those_of_the_papers():
    assert ObjectiveSpec.model_validate("masked").settings() == {"rate": 0.15, "mask": 0.8, "random": 0.1}
    assert ObjectiveSpec(kind="denoise", span=8.0).settings() == {"rate": 0.15, "span": 8.0}
    assert ObjectiveSpec(kind="infill").settings() == {"rate": 0.5, "suffix_first": 0.5}
    assert ObjectiveSpec().kind == "causal" and ObjectiveSpec().settings() == {}


def test_the_special_tokens_that_a_tokenizer_must_have():
    assert ObjectiveSpec(kind="causal").special_tokens(512) == []
    assert ObjectiveSpec(kind="masked", tokens=["[MASK]"]).special_tokens(512) == ["[MASK]"]
    assert ObjectiveSpec(kind="infill").special_tokens(512) == ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
    names = ObjectiveSpec(kind="denoise").special_tokens(568)
    assert len(names) == 28 and names[0] == "<extra_id_0>" and names[-1] == "<extra_id_27>"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "masked", "span": 3.0}, "span is a key of denoise: remove it, or write kind: denoise"),
        ({"kind": "causal", "rate": 0.1}, "rate is a key of masked and denoise and infill"),
        ({"kind": "masked", "rate": 1.0}, "rate 1 leaves no context"),
        ({"kind": "masked", "mask": 0.8, "random": 0.3}, "add up to 1.1: lower them"),
        ({"kind": "infill", "tokens": ["<a>", "<b>"]}, "infill uses 3 tokens .* not 2"),
        ({"kind": "prefix", "tokens": ["<a>"]}, "prefix uses 0 tokens"),
        ({"kind": "denoise", "tokens": ["<a>", "<a>"]}, "lists a token twice"),
        ({"kind": "denoise", "rate": 0.0}, "greater than 0"),
        ({"kind": "bert"}, "'causal', 'masked', 'denoise', 'prefix' or 'infill'"),
    ],
)
def test_mistakes_are_told(given, message):
    with pytest.raises(ValidationError, match=message):
        ObjectiveSpec.model_validate(given)


def test_loss_and_dropout_have_limits():
    assert LossSpec().model_dump() == {"smoothing": 0.0, "focal": 0.0, "z": 0.0}
    assert DropoutSpec(residual=0.1).model_dump() == {"embedding": 0.0, "attention": 0.0, "residual": 0.1}
    for part, key, value in ((LossSpec, "smoothing", 1.0), (LossSpec, "z", -1.0), (DropoutSpec, "attention", 1.0)):
        with pytest.raises(ValidationError, match=key):
            part.model_validate({key: value})


@pytest.mark.parametrize(("rate", "span"), [(0.15, 3.0), (0.9, 1.0), (0.01, 20.0)])
def test_spans_fit_their_tokens_and_never_get_fewer_with_more(rate, span):
    found = [count_spans(length, rate, span) for length in range(2, 500)]
    assert all(
        1 <= spans <= noise < length and spans <= length - noise for length, (noise, spans) in enumerate(found, 2)
    )
    assert [spans for _, spans in found] == sorted(spans for _, spans in found)
