"""YAML as people mean it: numbers, words, duplicate keys, line numbers, and files that are no YAML at all."""

import math
from typing import Any

import pytest

from bessemer.errors import UserError
from bessemer.spec.document import apply_override, edit_text, parse_yaml


def value_of(text: str) -> Any:
    return parse_yaml(f"key: {text}", "spec.yaml").data["key"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1_000", 1000),
        ("+7", 7),
        ("007", 7),
        ("0", 0),
        ("-.inf", -math.inf),
        ("1e400", math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("0x1F", "0x1F"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
        ("e5", "e5"),
        ("20M", "20M"),
        ("'1e-4'", "1e-4"),
        ('"true"', "true"),
        ("''", ""),
        ("[1, no, 2%]", [1, "no", "2%"]),
        ("{a: 1e3}", {"a": 1000.0}),
    ],
)
def test_words_mean_what_people_mean(text: str, value: Any) -> None:
    read = value_of(text)
    assert read == value and type(read) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(value_of(".nan"))


def test_thousands_of_digits_stay_text() -> None:
    assert value_of("9" * 5000) == "9" * 5000


def test_keys_are_text() -> None:
    assert parse_yaml("1: a\nno: b\n2024-01-01: c", "spec.yaml").data == {"1": "a", "no": "b", "2024-01-01": "c"}


def test_lines_of_keys_entries_and_what_was_not_written() -> None:
    document = parse_yaml("a:\n  b:\n    - 1\n    - x: 2\n", "spec.yaml")
    assert document.lines[("a", "b")] == 2
    assert document.lines[("a", "b", 1, "x")] == 4
    assert document.place(("a", "b", 1, "y", "z")) == "spec.yaml:4"
    assert document.place(("c",)) == "spec.yaml:1"
    assert parse_yaml("", "spec.yaml").place(("c",)) == "spec.yaml"


def test_a_key_written_again_is_a_problem_at_its_second_line() -> None:
    document = parse_yaml("a: 1\nb: 2\na: 3\na: 4\n", "spec.yaml")
    assert document.data == {"a": 1, "b": 2}
    assert [(path, line) for path, line, _ in document.problems] == [(("a",), 3), (("a",), 4)]
    assert "first in line 1" in document.problems[0][2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", ":1: not YAML"),
        ("a: 1\nb: c: d\n", ":2: not YAML"),
        ("a:\n\tb: 1\n", ":2: not YAML"),
        ("a: 1\n---\nb: 2\n", "not YAML"),
        ("a: 'x", "not YAML"),
        ('a: "\\UFFFFFFFF"', "not YAML"),  # PyYAML itself raises ValueError here
        ("%YAML 2.0\n---\na: 1\n", "not YAML"),
        ("a: \x00\nb: 1", ":1: not text"),
        ("a: 1\nb: \x1b[0m", ":2: not text"),
        ("- 1\n- 2\n", ":1: a spec is a mapping of keys"),
        ("\n\njust words", ":3: a spec is a mapping of keys"),
        ("5", "a spec is a mapping of keys"),
        ("a: " + "[" * 700, "not YAML|too deeply nested"),
        ("a: " + "[" * 60 + "]" * 60, "too deeply nested"),
        ("a: &x [*x]", "too deeply nested"),
        ("a: &x {b: *x}", "too deeply nested"),
    ],
)
def test_what_is_no_spec_is_said_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        parse_yaml(text, "spec.yaml")
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("spec.yaml")


def test_aliases_that_multiply_without_end_are_refused() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]" for i in range(1, 20)]
    with pytest.raises(UserError, match="too deeply nested"):
        parse_yaml("\n".join(lines), "spec.yaml")


def test_an_alias_repeats_its_value() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: *x\n", "spec.yaml").data == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("? [a]\n: 1", "plain word"),
        ("a: !env HOME", "tag 'env' is not supported"),
        ("a: !!binary aGk=", "tag 'binary'"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "merge keys"),
        ('a: "x\\0y"', "control character"),
        ('"a\\0": 1', "control character"),
        ('a: "\\ud800"', "control character"),
    ],
)
def test_what_cannot_be_taken_as_written_is_a_problem(text: str, words: str) -> None:
    (problem,) = parse_yaml(text, "spec.yaml").problems
    assert words in problem[2]


@pytest.mark.parametrize(
    ("setting", "data"),
    [
        ("seed=5", {"seed": 5}),
        ("optimizer.lr=3e-4", {"optimizer": {"lr": 3e-4}}),
        ("optimizer.betas=[0.9, 0.99]", {"optimizer": {"betas": [0.9, 0.99]}}),
        ("optimizer.lr=auto", {"optimizer": {"lr": "auto"}}),
        ("name=no", {"name": "no"}),
        ("name=a=b", {"name": "a=b"}),
        ("budget.steps=", {"budget": {"steps": None}}),
        (" a . b = 1", {"a": {"b": 1}}),
    ],
)
def test_an_override_makes_the_way_to_its_key(setting: str, data: dict[str, Any]) -> None:
    document = parse_yaml("", "spec.yaml")
    apply_override(document, setting)
    assert document.data == data


SPEC = """\
model: 10M
data:
  sources:
    web: data/
    books: [a.txt, b.txt]
  phases:
    - start: 1M
"""


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("model.layers=3", ("model",), {"preset": "10M", "layers": 3}),
        ("data.sources.web.weight=2", ("data", "sources", "web"), {"path": "data/", "weight": 2}),
        ("data.sources.books.weight=2", ("data", "sources", "books"), {"path": ["a.txt", "b.txt"], "weight": 2}),
        ("data.sources.books.1=c.txt", ("data", "sources", "books"), ["a.txt", "c.txt"]),
        ("data.phases.0.start=2M", ("data", "phases", 0), {"start": "2M"}),
    ],
)
def test_an_override_keeps_what_a_short_form_said(setting: str, path: tuple[Any, ...], value: Any) -> None:
    document = parse_yaml(SPEC, "spec.yaml")
    apply_override(document, setting)
    found = document.data
    for step in path:
        found = found[step]
    assert found == value


@pytest.mark.parametrize(
    "setting",
    [
        "seed",
        "=5",
        "",
        "a..b=1",
        ".=1",
        "data.phases.1.start=2M",
        "data.phases.first.start=2M",
        "data.phases.²=1",
        "seed={",
        "seed=*x",
        "data.sources={a: x, a: y}",
        "name=!env HOME",
    ],
)
def test_an_override_that_cannot_be_applied_is_refused_by_name(setting: str) -> None:
    document = parse_yaml(SPEC, "spec.yaml")
    with pytest.raises(UserError) as refused:
        apply_override(document, setting)
    assert str(refused.value).startswith(f"--set {setting}")
    assert "\n" not in str(refused.value)


def test_an_overridden_part_no_longer_points_at_the_file() -> None:
    document = parse_yaml(SPEC, "spec.yaml")
    apply_override(document, "data.phases=[{start: x}]")
    assert document.place(("data", "phases", 0, "start")) == "--set data.phases=[{start: x}]"
    assert document.place(("data", "sources", "web")) == "spec.yaml:4"


@pytest.mark.parametrize("text", ["model: 10M", "model: {preset: 10M, width: 8}", "model:\n  width:"])
def test_what_a_setting_opened_is_placed_at_the_setting(text: str) -> None:
    document = parse_yaml(text, "run.yaml")
    apply_override(document, "model.width.x=3")
    assert document.place(("model", "width")) == "--set model.width.x=3"
    assert document.rank(("model", "width"))[0] == 1
    assert document.place(("model",)) == "run.yaml:1"


@pytest.mark.parametrize(
    ("text", "key", "value", "edited"),
    [
        ("a: 1  # one\nb: 2\n", "a", "3", "a: 3  # one\nb: 2\n"),
        ("a: 1\n", "b.c", "x", "a: 1\nb:\n  c: x\n"),
        ("a: {x: 1}  # in braces\n", "a.y", "2", "a: {y: 2, x: 1}  # in braces\n"),
        ("a: {}\n", "a.y.z", "2", "a: {y: {z: 2}}\n"),
        ("a:\n  # why\n  x: 1\nb: 2\n", "a.y", "2", "a:\n  # why\n  y: 2\n  x: 1\nb: 2\n"),
        ("a:\n    x: 1\n", "a.y.z", "2", "a:\n    y:\n      z: 2\n    x: 1\n"),
        ("a: short\n", "a.x", "1", "a: {x: 1}\n"),
        ('{"a": {"x": 1}}', "a.x", "2", '{"a": {"x": 2}}'),
        ("# nothing\n", "a.x", "1", "# nothing\na:\n  x: 1\n"),
    ],
)
def test_a_key_is_set_in_the_text(text: str, key: str, value: str, edited: str) -> None:
    assert edit_text(text, key, value) == edited
    inner = parse_yaml(edited, "spec.yaml").data
    for part in key.split("."):
        inner = inner[part]
    assert str(inner) == value
