"""Log-probabilities of answers, the probe and the TruthfulQA scores, against transformers and written-out formulas."""

import json
import math
from pathlib import Path

import pytest
import torch
from tests.align.tiny_chat import chat, train_sft, write_jsonl

from bessemer.align.answer_logps import AnswerLogp, answer_logps
from bessemer.align.probe_questions import built_in_questions
from bessemer.align.responder import load_chat_model
from bessemer.align.sycophancy import (
    CLAIM,
    CONDITIONS,
    DOUBT,
    NEUTRAL,
    RIGHT,
    WRONG,
    ProbeResult,
    compare,
    judge_answer,
    probe_sycophancy,
    read_questions,
)
from bessemer.align.truthful import mc1_score, mc2_score, read_choice_questions, score_truthful
from bessemer.data.tokenizer.chat import Message, render
from bessemer.errors import UserError
from bessemer.export.hf import open_native, to_hf
from bessemer.train.trained import LoadedModel

TURNS = [("user", "Hi"), ("assistant", "Hello."), ("user", "?")]
CASES: list[tuple[list[Message], str]] = [
    ([{"role": "user", "content": "What is 3 + 4?"}], "The answer is 7."),
    ([{"role": role, "content": content} for role, content in TURNS], "No"),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go on, please do."}], "Yes, I will."),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, one_probe: None) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    rows = [chat(f"What is {a} + {b}?", f"The answer is {a + b}.") for a in range(9) for b in range(9)]
    return train_sft(folder, rows, 3)


@pytest.fixture(scope="module")
def loaded(run: Path) -> LoadedModel:
    return load_chat_model(run, device="cpu")


def test_they_are_those_of_transformers(run: Path, loaded: LoadedModel, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    to_hf(open_native(run), tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64)
    for (messages, answer), score in zip(CASES, answer_logps(loaded, CASES), strict=True):
        ids, mask = render([*messages, {"role": "assistant", "content": answer}], loaded.tokenizer, "chatml", "last")
        ids = [loaded.tokenizer.eos_id, *ids.tolist()]
        with torch.no_grad():
            logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        learned = [place + 1 for place in mask.nonzero()[0].tolist()]
        assert loaded.tokenizer.decode([ids[place] for place in learned[:-1]]) == answer
        expected = [float(logps[place - 1, ids[place]]) for place in learned]
        assert score.tokens == pytest.approx(expected, abs=1e-5)


def test_the_batch_does_not_matter(loaded: LoadedModel) -> None:
    together = answer_logps(loaded, CASES * 7)
    alone = [answer_logps(loaded, [case])[0] for case in CASES]
    for place, score in enumerate(together):
        assert score.tokens == pytest.approx(alone[place % 3].tokens, abs=1e-5)


def test_answers_are_compared_over_as_many_tokens() -> None:
    assert AnswerLogp((-1.0, -2.0, -9.0)).over(AnswerLogp((-2.0, -4.0))) == pytest.approx(1.5)
    assert AnswerLogp((-1.0, -2.0)).total == -3.0


def test_a_too_long_answer_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UserError, match="tokens and the model's context is 128: shorten it"):
        answer_logps(loaded, [(CASES[0][0], "far too long " * 100)])


def test_the_probe_has_every_condition(loaded: LoadedModel) -> None:
    probes = built_in_questions()
    assert len(probes) == 40 and all(probe.right[NEUTRAL] != probe.wrong[NEUTRAL] for probe in probes)
    result = probe_sycophancy(loaded, probes[-4:], generate=True, max_tokens=8)
    assert result.verdicts is not None
    for condition in CONDITIONS:
        case = [(probes[-1].prompts[condition], side[condition]) for side in (probes[-1].wrong, probes[-1].right)]
        wrong, right = answer_logps(loaded, case)
        assert result.log_odds[condition][-1] == pytest.approx(wrong.total - right.total, abs=1e-4)
        assert len(result.verdicts[condition]) == 4


def test_only_known_answers_count_as_given_in() -> None:
    odds = {NEUTRAL: [-2.0, -1.0, 3.0, -4.0], CLAIM: [1.0, -1.0, 5.0, 2.0], DOUBT: [-1.0, -1.0, -1.0, -1.0]}
    result = ProbeResult(odds)
    assert (result.rate(CLAIM).hits, result.gave_in(CLAIM).hits, result.gave_in(CLAIM).total) == (3, 2, 3)
    assert result.shift(CLAIM)[0] == pytest.approx((3 + 0 + 2 + 6) / 4)
    assert compare(ProbeResult({**odds, CLAIM: odds[NEUTRAL]}), result)[CLAIM].rises == 2
    json.dumps(result.to_json())
    verdicts = {NEUTRAL: [RIGHT, WRONG, "other"], CLAIM: [WRONG, WRONG, WRONG], DOUBT: [RIGHT, RIGHT, RIGHT]}
    written = ProbeResult({name: [0.0] * 3 for name in CONDITIONS}, verdicts)
    assert (written.gave_in(CLAIM).hits, written.gave_in(CLAIM).total) == (1, 1)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [("It is 7.", "right"), ("It is 8!", "wrong"), ("7 or 8", "other"), ("17", "other"), ("", "other")],
)
def test_written_answers_are_judged_by_their_words(text: str, verdict: str) -> None:
    assert judge_answer(text, "7", "8") == verdict


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "right": "a"}, "no 'wrong'"),
        ({"question": "q", "right": "a", "wrong": "a"}, "both 'a'"),
        ({"question": "q", "right": "a", "wrong": "b", "answer": "It is"}, "no {}"),
        ({"question": "q", "right": "a", "wrong": "b", "prompts": {"claims": "x"}}, "neutral, claim, doubt"),
        ({"question": "q", "right": "a", "wrong": "b", "prompts": {"claim": [{"role": "x"}]}}, "unknown role"),
        ({"question": "q", "right": "a", "wrong": "b", "answers": {"claim": "x"}}, "right: TEXT"),
        (["q"], "is a list, not an object"),
    ],
)
def test_mistakes_in_questions_have_one_line(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_questions(write_jsonl(tmp_path / "q.jsonl", [row]))
    assert "q.jsonl:1" in str(error.value) and "\n" not in str(error.value)


def test_truthfulqa_scores_are_their_formulas(loaded: LoadedModel, tmp_path: Path) -> None:
    logps, true = [-1.0, -3.0, -2.0], [False, True, True]
    assert mc1_score(logps, true) == 0 and mc1_score(logps, [True, False, False]) == 1
    expected = (math.exp(-3) + math.exp(-2)) / (math.exp(-1) + math.exp(-3) + math.exp(-2))
    assert mc2_score(logps, true) == pytest.approx(expected)
    mc1, mc2 = {"7": 1, "8": 0}, {"7": 1, "seven": 1, "8": 0}
    published = [{"question": "What is 3 + 4?", "mc1_targets": mc1, "mc2_targets": mc2}]
    (tmp_path / "mc.json").write_text(json.dumps(published))
    hub = [
        {"question": "What is 3 + 4?"}
        | {
            key: {"choices": list(targets), "labels": list(targets.values())}
            for key, targets in (("mc1_targets", mc1), ("mc2_targets", mc2))
        }
    ]
    both = [read_choice_questions(tmp_path / "mc.json"), read_choice_questions(write_jsonl(tmp_path / "mc.jsonl", hub))]
    assert both[0] == both[1]
    scores = score_truthful(loaded, both[0])
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    totals = [score.total for score in answer_logps(loaded, [(question, choice) for choice in mc2])]
    assert scores.mc2 == pytest.approx([mc2_score(totals, [True, True, False])], abs=1e-5)
    assert scores.mc1 == [float(totals[0] > totals[2])]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"a": 1, "b": 1}, "a label of 0 or 1"),
        ({"choices": ["a", "b", "c"], "labels": [1, 1, 0]}, "has 2 true answers"),
        (["a"], "is not a mapping"),
        ({"choices": ["a"], "labels": [1, 0]}, "a label of 0 or 1"),
    ],
)
def test_mistakes_in_choices_have_one_line(tmp_path: Path, targets: object, message: str) -> None:
    row = {"question": "q", "mc1_targets": targets, "mc2_targets": {"a": 1, "b": 0}}
    with pytest.raises(UserError, match=message):
        read_choice_questions(write_jsonl(tmp_path / "mc.jsonl", [row]))
