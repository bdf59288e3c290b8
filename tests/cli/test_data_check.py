"""`bessemer data check` on a spec: the checks of its run, the trained tokens, pages and JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from bessemer.observe.page import WeightedText, html_page, markdown

from .conftest import Call

SPEC = """
name: smith
objective: sft
model: {width: 32, layers: 1, heads: 2}
tokenizer: {vocab: 400}
data: {sources: {chats: chats.jsonl}, context: 256, validation: 0}
budget: {steps: 1, batch: 512}
parallel: {device: cpu, threads: 1}
"""


def write(count: int = 40, **more: Any) -> None:
    with Path("chats.jsonl").open("w") as file:
        for i in range(count):
            question = f"How hot must the furnace be for {i + 1} kg of <b>iron</b>?"
            turns = [{"role": "user", "content": question},
                     {"role": "assistant", "content": f"About {1538 + i} degrees Celsius.", **more}]  # fmt: skip
            file.write(json.dumps({"messages": turns}) + "\n")
    Path("spec.yaml").write_text(SPEC)


def test_a_healthy_spec(call: Call) -> None:
    write()
    result = call("data", "check", "spec.yaml")
    assert result.code == 0
    assert result.out.splitlines() == [
        "data.sources.chats", "40 documents, 3,271 characters in 1 files", "no problems found",
        "fine-tuning rows: no mistakes found",
    ]  # fmt: skip


def test_trained_tokens_are_printed_and_written_as_a_page(call: Call) -> None:
    write()
    result = call("data", "check", "spec.yaml", "--show-masks", "--rows", "2", "--html", "masks/page.html")
    assert result.code == 0
    first = result.out.split("\n\n")[0].splitlines()
    assert first[0].startswith("chats.jsonl:1, ") and first[0].endswith(" trained")
    assert first[1:] == [
        "<|im_start|>user", "How hot must the furnace be for 1 kg of <b>iron</b>?<|im_end|>", "<|im_start|>assistant",
        "[[About 1538 degrees Celsius.<|im_end|>]]", "<|endoftext|>",
    ]  # fmt: skip
    assert "chats.jsonl:2, " in result.out and "chats.jsonl:3, " not in result.out
    page = Path("masks/page.html").read_text()
    assert "<mark>About 1538 degrees Celsius.&lt;|im_end|&gt;</mark>" in page and "<b>iron" not in page
    assert "default-src 'none'" in page and "fine-tuning rows: no mistakes found" in page
    told = json.loads(call("data", "check", "spec.yaml", "--show-masks", "--rows", "1", "--json").out)
    [row] = told["rows"]
    assert row["pieces"][1] == ["About 1538 degrees Celsius.<|im_end|>", 1.0]
    assert told["mistakes"] == {} and told["sources"]["chats"]["documents"] == 40


def test_weights_of_messages_are_shown(call: Call) -> None:
    write(weight=0.25)
    result = call("data", "check", "spec.yaml", "--show-masks", "--rows", "1")
    assert result.code == 0 and "[[0.25: About 1538 degrees Celsius.<|im_end|>]]" in result.out


def test_exit_codes_of_warnings_and_of_a_run_that_would_be_refused(call: Call) -> None:
    write()
    turns = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes.", "train": False}]
    with Path("chats.jsonl").open("a") as file:
        file.write(json.dumps({"messages": turns}) + "\n")
    result = call("data", "check", "spec.yaml")
    line = result.out.splitlines()[-1]
    assert result.code == 1 and line.startswith("warning: data.sources.chats: ") and line.endswith("[nothing_trained]")
    assert "chats.jsonl:41: 2% (1) of 41 rows have no trained token" in line
    assert call("data", "check", "spec.yaml", "--set", "lints.silence=[nothing_trained]").code == 0
    write(train=False)
    result = call("data", "check", "spec.yaml")
    assert result.code == 2 and "\nerror: data.sources.chats: " in result.out and "chats.jsonl:3" in result.out
    refused = call("train", "spec.yaml")
    assert refused.code == 2 and "[nothing_trained]" in refused.err and not Path("runs/smith").exists()
    assert [one["name"] for one in json.loads(call("data", "check", "spec.yaml", "--json").out)["mistakes"]["chats"]] \
        == ["nothing_trained"]  # fmt: skip


def test_a_spec_of_another_objective_has_its_files_checked(call: Call) -> None:
    Path("words.jsonl").write_text('{"text": "one two"}\n{"text": "one two"}\n')
    Path("spec.yaml").write_text("model: {width: 32, layers: 1, heads: 2}\ndata: {sources: {words: words.jsonl}}\n")
    result = call("data", "check", "spec.yaml")
    assert result.code == 1 and "copy of an earlier document" in result.out and "fine-tuning" not in result.out
    for option, words in (("--show-masks", "has no conversations"), ("--chat=plain", "change it, or write --set")):
        result = call("data", "check", "spec.yaml", option)
        assert (result.code, result.out) == (2, "") and words in result.err.splitlines()[-1]


@pytest.mark.parametrize("text", ["a</pre><script>x</script>", "\x1b[31mred", "\u202eright to left"])
def test_marked_text_is_escaped_and_shows_weights(text: str) -> None:
    block = WeightedText([("read ", 0.0), (text, 1.0), (" half", 0.5), (" none", 0.0)], "rows.jsonl:1")
    page = html_page("t", [("", [block])])
    assert "<script>" not in page and "\x1b" not in page and "\u202e" not in page
    assert "<mark><sub>0.5</sub> half</mark> none</pre>" in page and "<figcaption>rows.jsonl:1</figcaption>" in page
    plain = block.plain()
    assert plain.startswith("read [[") and plain.endswith("]][[0.5:  half]] none") and "\x1b" not in plain
    assert plain in markdown("t", [("", [block])])


def test_conversations_are_recognised_without_a_tokenizer(call: Call) -> None:
    write()
    with Path("chats.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "And then?"}]}) + "\n")
    result = call("data", "check", "chats.jsonl")
    assert result.code == 1
    assert "note  read as messages (messages)" in result.out and "conversation: no assistant turn" in result.out


def test_labels_of_a_classifier(call: Call) -> None:
    rows = [{"text": f"number {i}", "label": ("odd", "even", "evn")[2 if i == 9 else i % 2]} for i in range(12)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("spec.yaml").write_text(
        "name: parity\nobjective: classify\nclassify: {labels: [odd, even]}\nmodel: {width: 32, layers: 1, heads: 2}\n"
        "data: {sources: {rows: {path: rows.jsonl, columns: {text: text, label: label}}}}\n"
    )
    result = call("data", "check", "spec.yaml")
    assert result.code == 1
    assert "label 'evn' is none of odd, even" in result.out and "rows.jsonl:10" in result.out
