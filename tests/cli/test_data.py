"""The verbs of `bessemer data`, each on tiny inputs; what is wrong is one line on standard error and exit code 2."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from bessemer.data.curate.scores.classifier import Quality
from bessemer.data.read.entry import Document
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.spec.curate.scores import QualitySpec

from .conftest import Call

LINES = """the furnace was lit before dawn and the men stood round it while the iron ran
def return if else for while in import class self print None True range len str"""
PROSE, CODE = (line.split() for line in LINES.splitlines())


def texts(words: list[str], count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=draw.randint(20, 60))) for _ in range(count)]


def write(path: str, found: list[str]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps({"text": text}) + "\n" for text in found))


def write_spec(clean: str = "[{length: {min_chars: 120}}, dedup_exact]") -> None:
    write("data/web.jsonl", [*texts(PROSE, 40), *texts(PROSE, 5)])
    Path("spec.yaml").write_text(
        "model: {width: 32, layers: 1, heads: 2}\ntokenizer: {vocab: 300}\n"
        f"data:\n  sources: {{web: data/}}\n  validation: 10%\n  clean: {clean}\n"
    )


def refused(call: Call, *arguments: str) -> str:
    said = call("data", *arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.endswith("\n") and said.err.count("\n") == 1
    return said.err


def test_prepare_and_report(call: Call) -> None:
    write_spec()
    assert "not prepared yet; run `bessemer data prepare`" in refused(call, "report", "spec.yaml")
    said = call("data", "prepare", "spec.yaml", "--workers", "1")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].split()[:2] == ["step", "documents"] and lines[1].split()[:2] == ["read", "45"]
    assert any(line.split()[:1] == ["dedup_exact"] for line in lines)
    assert any(line.split()[:1] == ["web"] for line in lines)
    page = Path(said.out.splitlines()[-1].removeprefix("report  "))
    assert page.name == "report.html" and page.exists()
    again = call("data", "prepare", "spec.yaml", "--json")
    assert again.err == ""  # nothing was to be done
    report = json.loads(again.out)
    assert report["page"] == str(page) and report["sources"]["web"]["documents_read"] == 45
    for where in ("spec.yaml", str(page.parent)):
        assert json.loads(call("data", "report", where, "--json").out) == report
    assert call("data", "report", "spec.yaml").out == said.out


def test_a_message_about_damaged_data_names_the_spec(call: Call) -> None:
    write_spec()
    setting = ("--set", "data.validation=20%")
    page = Path(call("data", "prepare", "spec.yaml", *setting).out.splitlines()[-1].removeprefix("report  "))
    next(page.parent.glob("web.train.*.json")).write_text("damaged")
    fix = "prepare the data again: bessemer data prepare spec.yaml --set data.validation=20%\n"
    assert refused(call, "prepare", "spec.yaml", *setting).endswith(fix)
    assert fix in call("data", "verify", "spec.yaml", *setting).out


def test_the_same_data_for_another_setting_is_not_prepared(call: Call) -> None:
    write_spec("[]")
    assert call("data", "prepare", "spec.yaml", "--workers", "1", "--set", "data.validation=20%").code == 0
    assert call("data", "report", "spec.yaml", "--set", "data.validation=20%").code == 0
    assert "not prepared yet" in refused(call, "report", "spec.yaml")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("prepare", "none.yaml"), "none.yaml: no such file"),
        (("prepare", "spec.yaml", "--engine", "spark"), "--engine spark: write local or ray"),
        (("prepare", "spec.yaml", "--set", "data.sources.web=none/"), "source 'web': "),
        (("prepare", "spec.yaml", "--set", "data.clean=[nosuch]"), "data.clean"),
        (("report", "data"), "data: is a folder; pass the YAML file of a spec"),
        (("report", "spec.yaml", "--set", "x"), "--set x: write it as key=value"),
    ],
)
def test_prepare_and_report_refuse_in_one_line(call: Call, arguments: tuple[str, ...], told: str) -> None:
    write_spec()
    assert told in refused(call, *arguments)


def test_a_bad_row_is_refused_with_its_place(call: Call) -> None:
    write_spec("[]")
    with Path("data/web.jsonl").open("a") as file:
        file.write("{\n")
    assert "source 'web': " in (err := refused_with_progress(call)) and "data/web.jsonl:46: not valid JSON" in err


def refused_with_progress(call: Call) -> str:
    """The last line: those before it tell of the progress."""
    said = call("data", "prepare", "spec.yaml", "--workers", "1")
    assert (said.code, said.out) == (2, "")
    return said.err.splitlines()[-1]


def test_check(call: Call) -> None:
    write("data/web.jsonl", ["one", "two"])
    assert call("data", "check", "data").code == 0
    write("data/web.jsonl", ["one", "one"])
    said = call("data", "check", "data")
    assert (said.code, said.err) == (1, "") and "copy of an earlier document" in said.out
    assert "no such file or folder" in refused(call, "check", "none")
    assert refused(call, "check", "data", "--format", "docx").startswith("format: ")


def test_classifier(call: Call) -> None:
    write("good/a.jsonl", texts(PROSE, 60))
    write("other/a.jsonl", texts(CODE, 60, seed=1))
    said = call("data", "classifier", "quality.safetensors", "--class", "good=good", "--class", "other=other")
    assert said.code == 0 and said.out.endswith("written  quality.safetensors\n")
    assert json.loads(said.out.splitlines()[0])["classes"] == {"good": 60, "other": 60}
    step = Quality(QualitySpec(model="quality.safetensors", keep=0.5), 0)
    documents = [Document(text, "f", i) for i, text in enumerate([*texts(PROSE, 3, 7), *texts(CODE, 3, 8)])]
    scores = step.collect(documents, np.arange(6))["score"]
    assert min(scores[:3]) > 0.5 > max(scores[3:])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("q.safetensors", "--class", "good=good"), "name two or more"),
        (("q.safetensors", "--class", "good"), "--class good: write NAME=PATH"),
        (("q.safetensors", "--class", "good=good", "--class", "other=none"), "none"),
        (("good", "--class", "good=good", "--class", "other=good"), "good: is a folder; name a file"),
    ],
)
def test_classifier_refuses_in_one_line(call: Call, arguments: tuple[str, ...], told: str) -> None:
    write("good/a.jsonl", texts(PROSE, 5))
    assert told in refused(call, "classifier", *arguments)
    assert not Path("q.safetensors").exists()


def test_perplexity(call: Call) -> None:
    write("good/a.jsonl", texts(PROSE, 60))
    said = call("data", "perplexity", "good.safetensors", "good", "--order", "4", "--json")
    assert said.code == 0 and Path("good.safetensors").exists()
    assert json.loads(said.out)["texts"] == 60
    assert "none" in refused(call, "perplexity", "x.safetensors", "none")
    assert "good: is a folder" in refused(call, "perplexity", "good", "good")
    told = refused(call, "perplexity", "good.safetensors/x", "good")
    assert "good.safetensors is a file, not a folder" in told
    write("one/a.jsonl", ["alone"])
    assert "a perplexity model needs two or more" in refused(call, "perplexity", "x.safetensors", "one")


def test_audit(call: Call) -> None:
    Tokenizer.train(texts(PROSE, 60), 300).save("tokenizer.json")
    write("prose/a.jsonl", texts(PROSE, 10))
    write("code/a.jsonl", texts(CODE, 10))
    said = call("data", "audit", "tokenizer.json", "prose=prose", "code=code")
    assert said.code == 0 and "300 tokens: " in said.out
    assert {"prose", "code"} <= {line.split()[0] for line in said.out.splitlines() if line.strip()}
    found = json.loads(call("data", "audit", "tokenizer.json", "prose=prose", "--json").out)
    assert found["vocab"] == 300
    assert "prose: write NAME=PATH" in refused(call, "audit", "tokenizer.json", "prose")
    assert "none.json" in refused(call, "audit", "none.json", "prose=prose")
    assert "none" in refused(call, "audit", "tokenizer.json", "prose=none")


def test_extend(call: Call) -> None:
    Tokenizer.train(texts(PROSE, 60), 300).save("tokenizer.json")
    write("code/a.jsonl", texts(CODE, 30))
    said = call("data", "extend", "tokenizer.json", "more.json", "code", "--tokens", "20")
    assert said.code == 0 and "20 new tokens" in said.out and "written  more.json" in said.out
    old, new = Tokenizer.load("tokenizer.json"), Tokenizer.load("more.json")
    assert new.vocab_size == old.vocab_size + 20
    text = texts(CODE, 1, seed=5)[0]
    assert len(new.encode(text)) < len(old.encode(text)) and new.decode(new.encode(text)) == text
    assert "none.json" in refused(call, "extend", "none.json", "x.json", "code")
    assert "none" in refused(call, "extend", "tokenizer.json", "x.json", "none")
    assert "code: is a folder" in refused(call, "extend", "tokenizer.json", "code", "code")
    assert call("data", "extend", "tokenizer.json", "new/x.json", "code").code == 0
    assert Tokenizer.load("new/x.json").vocab_size > 300
