"""Judges behind a real server: scripted replies with known verdicts, and our own server with a random model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.test_endpoint import Answer, ChatServer, completion
from typer.testing import CliRunner

from bessemer.cli.evaluate_judge import app
from bessemer.endpoint import Endpoint
from bessemer.errors import UserError
from bessemer.evaluate.judge import (
    answer_turns,
    judge_facts,
    judge_pairs,
    judge_turns,
    read_rows,
    score_facts,
    score_pairs,
    score_turns,
)


@pytest.fixture
def server() -> Iterator[ChatServer]:
    running = ChatServer()
    yield running
    running.close()


def tag(request: dict[str, Any], name: str) -> str:
    (text,) = re.findall(rf"<{name}>\n(.*?)\n</{name}>", request["messages"][1]["content"], re.DOTALL)
    return str(text)


def pair(a: str, b: str, **more: Any) -> dict[str, Any]:
    return {"prompt": "Why?", "answer_a": a, "answer_b": b, **more}


def test_pairs_are_won_only_in_both_orders(server: ChatServer) -> None:
    """The judge likes `good`, and of two others the first shown; it says nothing readable of `mute`."""

    def answer(request: dict[str, Any], count: int) -> Answer:
        first, second = tag(request, "answer_a"), tag(request, "answer_b")
        if "mute" in first + second:
            return completion("no idea")
        return completion(json.dumps({"better": "B" if second == "good" else "A"}))

    server.answer = answer
    rows = [
        pair("good", "bad", label="A"), pair("bad", "good", label="B"), pair("good", "worse", label="A"),
        pair("x", "y", label="tie"), pair("y", "z", label="A"), pair("mute", "z", label="A"),
    ]  # fmt: skip
    verdicts = judge_pairs(Endpoint(server.url, "m"), rows)
    assert [verdict.value for verdict in verdicts] == [1.0, 0.0, 1.0, 0.5, 0.5, None]
    scores = score_pairs(rows, verdicts)
    assert (scores.wins, scores.ties, scores.losses, scores.unread) == (2, 2, 1, 1)
    assert scores.win_rate == 0.6 and scores.consistency == 0.6 and len(server.requests) == 12
    assert scores.first == 0.7  # 3 of 6 where it is honest, 4 of 4 where it is not
    assert scores.labelled == 5 and scores.agreement == 0.8 and scores.kappa == pytest.approx(1 - 0.2 / 0.64)
    with pytest.raises(UserError, match="no verdict on any of 1 pairs"):
        score_pairs(rows[5:], verdicts[5:])
    with pytest.raises(UserError, match="label 'C': write A, B or tie"):
        score_pairs([pair("good", "bad", label="C")], verdicts[:1])


def test_turns_are_graded_with_the_conversation_before_them(server: ChatServer) -> None:
    def answer(request: dict[str, Any], count: int) -> Answer:
        conversation = tag(request, "conversation")
        assert "from 1 to 10" in request["messages"][0]["content"]
        if "And Spain?" in conversation:
            assert conversation == "user: Capital of France?\nassistant: Paris\nuser: And Spain?"
            assert tag(request, "reference") == "Madrid"
            return completion('{"score": 8}' if tag(request, "answer") == "Madrid" else '{"score": 2}')
        return completion("Rating: 9/10" if tag(request, "answer") == "Paris" else "11")

    server.answer = answer
    turns, references = ["Capital of France?", "And Spain?"], ["Paris", "Madrid"]
    rows = [
        {"turns": turns, "answers": ["Paris", "Madrid"], "references": references, "category": "geo", "human": [9, 9]},
        {"turns": turns, "answers": ["Paris", "Lisbon"], "references": references, "category": "geo", "human": [8, 1]},
        {"turns": ["Hello"], "answers": ["Hi"], "category": "chat"},
    ]  # fmt: skip
    grades = judge_turns(Endpoint(server.url, "m"), rows)
    assert grades == [[9.0, 8.0], [9.0, 2.0], [None]]  # 11 is no grade
    scores = score_turns(rows, grades)
    assert scores.mean == 7.0 and scores.by_turn == [9.0, 5.0] and scores.by_category == {"chat": None, "geo": 7.0}
    assert (scores.grades, scores.unread, scores.labelled) == (4, 1, 4) and scores.spearman == pytest.approx(0.5)
    with pytest.raises(UserError, match="2 turns and 1 answers"):
        judge_turns(Endpoint(server.url, "m"), [{"turns": turns, "answers": ["Paris"]}])


def test_a_model_answers_turn_by_turn(server: ChatServer) -> None:
    server.answer = lambda request, count: completion(" ".join(m["content"] for m in request["messages"]).upper())
    rows = [{"turns": ["a", "b"], "category": "x"}, {"turns": ["c"]}]
    answered = answer_turns(Endpoint(server.url, "m"), rows)
    assert answered == [
        {"turns": ["a", "b"], "category": "x", "answers": ["A", "A A B"]},
        {"turns": ["c"], "answers": ["C"]},
    ]


def test_claims_are_compared_with_the_reference(server: ChatServer) -> None:
    verdicts = {"Bessemer blew air.": "supported", "It was 1900.": "contradicted", "He liked tea.": "absent"}

    def answer(request: dict[str, Any], count: int) -> Answer:
        if "List every factual claim" in request["messages"][0]["content"]:
            text = tag(request, "answer")
            return completion("none" if text == "?" else "Claims:\n" + json.dumps(text.split("|")))
        assert tag(request, "reference") == "In 1856 Bessemer blew air through iron."
        return completion(f'Well. {{"verdict": "{verdicts.get(tag(request, "claim"), "unsure")}"}}')

    server.answer = answer
    reference = "In 1856 Bessemer blew air through iron."
    rows = [
        {"answer": "Bessemer blew air.|It was 1900.", "reference": reference, "prompt": "When?"},
        {"answer": "Bessemer blew air.|He liked tea.", "reference": reference},
        {"answer": "?", "reference": reference},
        {"answer": "", "claims": list(verdicts), "labels": ["supported", "contradicted", "supported"],
         "reference": reference},
        {"answer": "odd", "reference": reference},
    ]  # fmt: skip
    results = judge_facts(Endpoint(server.url, "m"), rows)
    assert results[0].verdicts == ["supported", "contradicted"] and results[2].claims is None
    scores = score_facts(rows, results)
    assert (scores.answers, scores.claims, scores.unread) == (5, 7, 2)
    assert (scores.supported, scores.contradicted, scores.absent) == (3 / 7, 2 / 7, 2 / 7)
    assert scores.contradicting == 0.5 and scores.labelled == 3 and scores.kappa == pytest.approx(0.5)


def test_the_commands(server: ChatServer, tmp_path: Path) -> None:
    server.answer = lambda request, count: completion('{"better": "A"}')
    file, written = tmp_path / "pairs.jsonl", tmp_path / "judged.jsonl"
    file.write_text(json.dumps(pair("x", "y", label="tie")) + "\n\n" + json.dumps(pair("long answer", "z")) + "\n")
    call = ["pairs", str(file), "--url", server.url + "/", "--model", "m", "--write", str(written)]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    assert "win rate of A" in result.output and "0, 2, 0; 0 unreadable" in result.output
    assert "0.0% equal in both orders; the first shown wins 100.0%" in result.output
    assert json.loads(written.read_text().splitlines()[0])["judge"] == {"forward": 1.0, "swapped": 0.0}
    found = json.loads(CliRunner().invoke(app, [*call, "--json"]).stdout)
    assert found["ties"] == 2 and found["length"]["rate"] == pytest.approx(0.5)
    for text, message in (("{", "is not JSON"), ('{"prompt": "x"}', "has no 'answer_a'"), ("", "has no rows")):
        file.write_text(text)
        with pytest.raises(UserError, match=message):
            read_rows(file, ("prompt", "answer_a", "answer_b"))
    server.answer = lambda request, count: completion('{"score": 7}')
    file.write_text('{"turns": ["a", "b"], "human": [6, 7]}\n')
    call = ["turns", str(file), "--url", server.url, "--model", "m", "--answers-url", server.url]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0 and "mean grade             7.00" in result.output and "turn 2" in result.output
    server.answer = lambda request, count: completion('["one"]' if count % 2 else "supported")
    file.write_text('{"answer": "a", "reference": "b"}\n')
    server.requests.clear()
    result = CliRunner().invoke(app, ["facts", str(file), "--url", server.url, "--model", "m"])
    assert result.exit_code == 0 and "1 of 1 answers; 0 replies unreadable" in result.output


@pytest.mark.slow
def test_our_own_server_as_a_judge(tmp_path: Path) -> None:
    """A model of random weights follows no format: every reply is unreadable, and the protocol holds."""
    pytest.importorskip("fastapi")
    from tests.serve.conftest import llama_folder, running

    from bessemer.serve.models import ModelOptions, load_served

    model = load_served("m", llama_folder(tmp_path / "m"), ModelOptions(device="cpu"))
    with running([model]) as served:
        endpoint = Endpoint(f"{served.url}/v1", "m", max_tokens=4)
        verdicts = judge_pairs(endpoint, [pair("x", "y")])
        assert [verdict.value for verdict in verdicts] == [None]
        rows = answer_turns(endpoint, [{"turns": ["a", "b"]}])
        assert len(rows[0]["answers"]) == 2 and score_turns(rows, judge_turns(endpoint, rows)).grades <= 2
