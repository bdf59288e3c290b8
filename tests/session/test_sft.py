"""Supervised fine-tuning: formats become the same tokens, masks select turns, and runs learn, resume and replay."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.session.conftest import spec_data, train_until

from bessemer.data.prepare import prepare
from bessemer.data.stream.packing import open_best_fit
from bessemer.data.stream.rows import ConcatRows, PadRows
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.session.start import complete_spec, dry_run
from bessemer.spec.schema import RunSpec

QUESTIONS = ["What is steel?", "Name a metal.", "Who blew the converter?", "How hot is it?"]
ANSWERS = ["An alloy of iron.", "Copper is a metal.", "The blower did it.", "It is very hot."]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft_spec(path: Path, runs: Path, source: dict[str, Any] | None = None, **parts: Any) -> RunSpec:
    data = {"sources": {"chat": {"path": [str(path)], **(source or {})}}, "context": 64, "validation": 0}
    parts = {"objective": "sft", "data": data, "tokenizer": {"kind": "char", "vocab": 300}, **parts}
    return RunSpec.model_validate(spec_data("sft", path, runs, **parts))


def store_of(spec: RunSpec, tmp_path: Path) -> list[tuple[str, str]]:
    """Each document, and its learned part."""
    spec = complete_spec(spec)
    prepared = prepare(spec.data, spec.tokenizer, tmp_path / "cache", 300, 0)
    store, result = prepared.train["chat"], []
    for document in range(store.documents):
        start, stop = (int(edge[0]) for edge in store.extents(np.array([document])))
        ids = store.gather(np.array([start]), stop - start)[0]
        mask = np.zeros(stop - start, np.float32)
        store.copy_weights(np.array([start]), np.array([stop - start]), mask, np.array([0]))
        result.append((prepared.tokenizer.decode(ids.tolist()), prepared.tokenizer.decode(ids[mask > 0].tolist())))
    return result


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]


ROLES = {"system": "system", "user": "human", "assistant": "gpt"}
FORMATS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "messages": lambda q, a: {"messages": turns(q, a)},
    "parts": lambda q, a: {
        "messages": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns(q, a)]
    },
    "sharegpt": lambda q, a: {
        "conversations": [{"from": ROLES[turn["role"]], "value": turn["content"]} for turn in turns(q, a)]
    },
    "sharegpt_system": lambda q, a: {
        "system": "Be brief.",
        "conversations": [{"from": ROLES[turn["role"]], "value": turn["content"]} for turn in turns(q, a)[1:]],
    },
    "alpaca": lambda q, a: {
        "instruction": q.split(" ", 1)[0] + " " + q.split(" ", 1)[1],
        "input": "",
        "output": a,
        "system": "Be brief.",
    },
    "prompt_completion": lambda q, a: {"prompt": q, "completion": a, "system": "Be brief."},
    "conversational_prompt": lambda q, a: {"prompt": turns(q, a)[:2], "completion": turns(q, a)[2:]},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("reference")
    path = write(folder / "rows.jsonl", [FORMATS["messages"](*row) for row in zip(QUESTIONS, ANSWERS, strict=True)])
    return store_of(sft_spec(path, folder), folder)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_tokens(name: str, tmp_path: Path, reference: list[tuple[str, str]]) -> None:
    path = write(tmp_path / "rows.jsonl", [FORMATS[name](*row) for row in zip(QUESTIONS, ANSWERS, strict=True)])
    assert store_of(sft_spec(path, tmp_path), tmp_path) == reference
    text, learned = reference[0]
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is steel?<|im_end|>\n")
    assert learned == "An alloy of iron.<|im_end|>"


def test_tables_are_recognised_and_other_names_are_mapped(tmp_path: Path, reference: list[tuple[str, str]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [FORMATS["alpaca"](*row) for row in zip(QUESTIONS, ANSWERS, strict=True)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert store_of(sft_spec(tmp_path / "rows.parquet", tmp_path), tmp_path) == reference
    columns = {"instruction": "task", "output": "reply", "system": "role"}
    renamed = [{"task": row["instruction"], "reply": row["output"], "role": row["system"]} for row in rows]
    path = write(tmp_path / "renamed.jsonl", renamed)
    assert store_of(sft_spec(path, tmp_path, {"columns": columns}), tmp_path) == reference
    with pytest.raises(UserError, match=r"data.sources.chat: the rows have task, reply, role: none of the formats"):
        complete_spec(sft_spec(path, tmp_path))


def test_plain_text_and_the_input_of_alpaca(tmp_path: Path) -> None:
    path = write(tmp_path / "text.jsonl", [{"text": "Steel is an alloy."}, {"text": "Iron rusts."}])
    spec = complete_spec(sft_spec(path, tmp_path))
    assert spec.data.sources["chat"].chat_format == "text" and spec.data.packing == "best_fit"
    eos = "<|endoftext|>"
    assert store_of(spec, tmp_path)[0] == (f"Steel is an alloy.{eos}",) * 2
    path = write(tmp_path / "alpaca.jsonl", [{"instruction": "Add.", "input": "1 2", "output": "3"}])
    spec = sft_spec(path, tmp_path, tokenizer={"chat": "none", "kind": "char"})
    assert store_of(spec, tmp_path) == [(f"Add.\n1 23{eos}", f"3{eos}")]


TALK = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "d"},
]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
EOS = "<|endoftext|>"


@pytest.mark.parametrize(
    ("learn", "expected"),
    [
        ("all", f" b{EOS} {CALL}{EOS} d{EOS}"),
        ("last", f" d{EOS}"),
        ("completion", f" {CALL}{EOS} d{EOS}"),
        ("everything", f"User: a?\n\nAssistant: b{EOS}\n\nUser: c?\n\nAssistant: {CALL}{EOS}\n\nTool: 7"
                       f"\n\nAssistant: d{EOS}"),
    ],
)  # fmt: skip
def test_masks_by_turn(tmp_path: Path, learn: str, expected: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"messages": TALK}])
    spec = sft_spec(path, tmp_path, tokenizer={"chat": "plain", "kind": "char", "learn": learn})
    assert store_of(spec, tmp_path)[0][1] == expected


def test_single_messages_are_left_out(tmp_path: Path) -> None:
    for key, value in (("train", False), ("weight", 0)):
        marked = [*TALK[:1], {**TALK[1], key: value}, *TALK[2:]]
        path = write(tmp_path / f"{key}.jsonl", [{"messages": marked}])
        spec = sft_spec(path, tmp_path, tokenizer={"chat": "plain", "kind": "char"})
        assert store_of(spec, tmp_path)[0][1] == f" {CALL}{EOS} d{EOS}"
    spec = sft_spec(path, tmp_path, tokenizer={"chat": "plain", "kind": "char", "learn": "everything"})
    assert store_of(spec, tmp_path)[0][1].startswith("User: a?\n\nAssistant:\n\nUser: c?")


def weighted(weight: Any) -> list[dict[str, Any]]:
    return [*TALK[:1], {**TALK[1], "weight": weight}, *TALK[2:]]


def test_weights_of_messages(tmp_path: Path) -> None:
    """Each token weighs what its message does, also where a row begins inside a conversation."""
    path = write(tmp_path / "rows.jsonl", [{"messages": weighted(weight)} for weight in (0.25, 1, 4)])
    spec = complete_spec(sft_spec(path, tmp_path, tokenizer={"chat": "plain", "kind": "char"}))
    assert spec.data.sources["chat"].message_weights
    prepared = prepare(spec.data, spec.tokenizer, tmp_path / "cache", 300, 0)
    store, tokenizer = prepared.train["chat"], prepared.tokenizer
    for rows in (open_best_fit(store, 40, tmp_path / "index"), ConcatRows(store, 40), PadRows(store, 40)):
        block = rows.assemble(np.arange(rows.count))
        weights = block.weights * np.nan_to_num(rows.fields(block.spans, rows.count)["message_weight"])
        for weight in (0.25, 4):
            ids = block.targets[weights == weight].tolist()
            assert tokenizer.decode(ids) == f" b{EOS}"
        count = (weights > 0).sum()
        assert weights.sum() == pytest.approx(count + 3 * (0.25 - 1) + 3 * (4 - 1))


def test_the_loss_is_a_weighted_mean(tmp_path: Path) -> None:
    rows = [turns(*row) for row in zip(QUESTIONS, ANSWERS, strict=True)]

    def first_loss(name: str, *weights: float) -> float:
        marked = [{"messages": [*row[:2], {**row[2], "weight": w}]} for row, w in zip(rows, weights, strict=True)]
        path, source = (
            write(tmp_path / f"{name}.jsonl", marked),
            {"messages_field": "messages", "message_weights": True},
        )
        data = {"sources": {"chat": {"path": [str(path)], **source}}, "context": 128, "validation": 0}
        spec = sft_spec(path, tmp_path / "runs", data=data, budget={"steps": 1, "batch": 512})
        spec = spec.model_copy(update={"name": name})
        Session(spec).train()
        return losses(spec)[0]

    tokens = [len(answer) + 1 for answer in ANSWERS]  # characters, and the end of the turn
    alone = [first_loss(f"alone-{i}", *(float(i == j) for j in range(4))) for i in range(2)]
    expected = (3 * tokens[0] * alone[0] + 0.5 * tokens[1] * alone[1]) / (3 * tokens[0] + 0.5 * tokens[1])
    assert first_loss("both", 3, 0.5, 0, 0) == pytest.approx(expected, rel=1e-5)
    assert first_loss("twice", 2, 2, 2, 2) == pytest.approx(first_loss("once", 1, 1, 1, 1), rel=1e-6)


def test_weights_that_the_first_rows_do_not_have_or_that_are_no_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "late.jsonl", [{"messages": TALK}] * 30 + [{"messages": weighted(0.5)}])
    with pytest.raises(UserError, match=r"late.jsonl:31: message 2: weight 0.5: write message_weights: true"):
        store_of(sft_spec(path, tmp_path), tmp_path)
    assert store_of(sft_spec(path, tmp_path, {"messages_field": "messages", "message_weights": True}), tmp_path)
    for weight in (-1, "much", float("inf")):
        path = write(tmp_path / "bad.jsonl", [{"messages": weighted(weight)}])
        with pytest.raises(UserError, match=r"bad.jsonl:1: message 2: weight .*: write a number from 0 on"):
            store_of(sft_spec(path, tmp_path), tmp_path)
    path = write(tmp_path / "flag.jsonl", [{"messages": [TALK[0], {**TALK[1], "train": "no"}]}])
    with pytest.raises(UserError, match=r"flag.jsonl:1: message 2: train 'no': write true or false"):
        store_of(sft_spec(path, tmp_path), tmp_path)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = [{"messages": TALK, "tools": [TOOL]}, {"messages": TALK, "tools": json.dumps([TOOL])}, {"messages": TALK}]


def test_tools_reach_the_template(tmp_path: Path) -> None:
    """As a list or as JSON; conversations without tools are as ever."""
    path = write(tmp_path / "tools.jsonl", CALLS[::-1])
    listed, spelled, without = store_of(sft_spec(path, tmp_path), tmp_path)[::-1]
    [alone] = store_of(sft_spec(write(tmp_path / "none.jsonl", CALLS[2:]), tmp_path), tmp_path)
    assert listed == spelled and without == alone
    system = f"<tools>\n{json.dumps(TOOL)}\n</tools>"
    assert listed[0].startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user")
    assert listed[1] == without[1]
    template = tmp_path / "t.jinja"
    template.write_text(
        "{{ tools|length if tools else 0 }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    spec = sft_spec(path, tmp_path, tokenizer={"chat": str(template), "kind": "char"})
    assert [text[0] for text, _ in store_of(spec, tmp_path)] == ["0", "1", "1"]
    for value, problem in (
        (3, "a int, not a list"),
        ("{", "Expecting property name"),
        (["f"], "a str, not a list of JSON"),
    ):
        path = write(tmp_path / "bad.jsonl", [{"messages": TALK, "tools": value}] * 2)
        spec = sft_spec(path, tmp_path, {"messages_field": "messages", "columns": {"tools": "tools"}})
        with pytest.raises(UserError, match=problem):
            store_of(spec, tmp_path)


def test_reasoning_is_learnt_before_the_answer(tmp_path: Path) -> None:
    messages = [TALK[0], {"role": "assistant", "reasoning_content": "hm", "content": "b"}]
    path = write(tmp_path / "rows.jsonl", [{"messages": messages}])
    assert store_of(sft_spec(path, tmp_path), tmp_path)[0][1] == "<think>\nhm\n</think>\n\nb<|im_end|>"
    source = {"messages_field": "messages"}  # pre-training reads the same field as before
    spec = sft_spec(path, tmp_path, source, objective="pretrain")
    assert store_of(spec, tmp_path)[0][1] == "b<|im_end|>"


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"messages": turns(f"{QUESTIONS[i % 4]} {i}", f"{ANSWERS[i % 4]} {'Really. ' * (i % 5)}{i}")}
        for i in range(120)
    ]
    return write(tmp_path_factory.mktemp("talks") / "talks.jsonl", rows)


def losses(spec: RunSpec) -> list[float]:
    return [record["loss"] for record in Run.existing(run_folder(spec)).metrics()]


def make_run(talks: Path, runs: Path, name: str = "sft", **budget: Any) -> RunSpec:
    data = {"sources": {"chat": {"path": [str(talks)]}}, "context": 256, "validation": 0.1}
    budget = {"steps": 6, "batch": 1024, **budget}
    spec = sft_spec(talks, runs, data=data, budget=budget, sft={"neftune": 5.0})
    return spec.model_copy(update={"name": name})


def test_the_rate_is_of_all_tokens_that_a_step_reads(talks: Path, tmp_path: Path) -> None:
    spec = make_run(talks, tmp_path / "runs", "rate", steps=2)
    session = Session(spec)
    session.train()
    first, second = Run.existing(run_folder(spec)).metrics()
    read = second["tokens_per_s"] * second["step_s"]
    in_loss = second["tokens"] - first["tokens"]
    assert in_loss < 0.5 * read and 0.7 * 1024 < read <= 1024.5


def test_losses_are_the_same_at_any_accumulation_and_after_a_resume(talks: Path, tmp_path: Path) -> None:
    """With NEFTune's noise, which depends on a row's position alone."""
    curves = []
    for micro in (4, 2, 1):
        spec = make_run(talks, tmp_path / "runs", f"micro-{micro}", micro_batch=micro)
        Session(spec).train()
        curves.append(losses(spec))
    np.testing.assert_allclose(curves[1:], [curves[0]] * 2, rtol=2e-5)
    stopped = make_run(talks, tmp_path / "runs", "stopped", micro_batch=2)
    train_until(stopped, 2)
    Session(stopped).train()
    assert losses(stopped) == curves[1]
    plain = make_run(talks, tmp_path / "runs", "plain", micro_batch=4).model_copy(update={"sft": None})
    Session(plain).train()
    assert losses(plain)[0] != curves[0][0] and abs(losses(plain)[0] - curves[0][0]) < 0.5


def test_the_plan_states_formats_and_decisions(talks: Path, tmp_path: Path) -> None:
    spec = complete_spec(make_run(talks, tmp_path / "runs", steps=None, batch="auto"))
    decisions = dry_run(spec, torch.device("cpu")).plan.decisions
    assert decisions["data.sources.chat"].value == "messages (messages)"
    assert "2 passes" in decisions["budget.tokens"].reason
    assert decisions["budget.batch"].reason.startswith("8 conversations of")
    assert decisions["data.layout"].value == "best_fit"
