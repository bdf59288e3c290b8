"""The constitutional loop with a scripted model: what is asked, what becomes a pair, and that it resumes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bessemer.align import records
from bessemer.align.behaviour import is_refusal, measure_rate, open_detector
from bessemer.align.critique import UNCHANGED, Principle, critique_all, load_principles
from bessemer.align.records import forget_partial, partial_path
from bessemer.align.responder import Conversation, EndpointResponder, Reply, open_responder, prompt_value
from bessemer.align.rewards.reward import Sample
from bessemer.endpoint import Endpoint, EndpointAnswer
from bessemer.errors import UserError
from bessemer.train.answers import AnswerSettings, PromptRow

POLITE = Principle(name="polite", critique="Be critical.", revision="Be polite.")


@dataclass
class Scripted:
    """Answers `You fool: PROMPT`; criticises; takes the insult out where the prompt has an even number."""

    identity: str = "scripted"
    stop_after: int = 10**9
    asked: list[Conversation] = field(default_factory=list)

    def reply(self, conversations: Sequence[Conversation], seed: int = 0) -> list[Reply]:
        if len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += conversations
        return [self._answer(messages) for messages in conversations]

    def _answer(self, messages: Conversation) -> Reply:
        first, last = str(messages[0]["content"]), messages[-1]["content"]
        if last == POLITE.critique:
            return Reply(f"It says {messages[-2]['content']}", True)
        if last == POLITE.revision:
            number = int(first.split()[-1])
            return Reply(f"You dear: {first}" if number % 2 == 0 else f"You fool: {first}", number % 6 != 0)
        return Reply(f"You fool: {first}", True)


def prompts(count: int) -> list[PromptRow]:
    return [PromptRow(f"prompt {number}", f"p.txt:{number + 1}") for number in range(count)]


def test_answers_are_criticised_and_revised() -> None:
    model = Scripted()
    result = critique_all(model, prompts(8), [POLITE], detector=open_detector("words:fool,dolt"))
    assert [message["content"] for message in model.asked[-1]] == [
        "prompt 7", "You fool: prompt 7", "Be critical.", "It says You fool: prompt 7", "Be polite.",
    ]  # fmt: skip
    assert [message["role"] for message in model.asked[-1]] == ["user", "assistant", "user", "assistant", "user"]
    assert result.before and result.after and result.change
    assert (result.before.hits, result.after.hits, result.change.falls) == (8, 4, 4)
    assert result.pairs() == [
        {"prompt": f"prompt {number}", "chosen": f"You dear: prompt {number}", "rejected": f"You fool: prompt {number}",
         "principle": "polite", "critique": f"It says You fool: prompt {number}", "number": number}
        for number in (2, 4)
    ]  # fmt: skip
    assert result.left_out() == {"revision cut off or empty": 2, "revision still unwanted": 4}
    assert [row["completion"] for row in result.revisions()] == ["You dear: prompt 2", "You dear: prompt 4"]


def test_without_a_measure_only_equal_and_cut_revisions_are_left_out() -> None:
    result = critique_all(Scripted(), prompts(8), [POLITE], rounds=2)
    assert result.before is None and len(result.pairs()) == 2 and len(result.revisions()) == 6
    assert result.left_out() == {"revision cut off or empty": 2, UNCHANGED: 4}


def test_a_stopped_command_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "CHUNK", 4)
    path = tmp_path / "pairs.jsonl"
    expected = critique_all(Scripted(), prompts(10), [POLITE]).records
    with pytest.raises(KeyboardInterrupt):
        critique_all(Scripted(stop_after=24), prompts(10), [POLITE], path=path)
    with partial_path(path).open("a") as file:
        file.write('{"number": 8, "pro')  # a kill in the middle of a line
    rest = Scripted()
    assert critique_all(rest, prompts(10), [POLITE], path=path).records == expected
    assert len(rest.asked) == 3 * 2  # the last two prompts
    assert critique_all(Scripted(stop_after=0), prompts(10), [POLITE], path=path).records == expected
    with pytest.raises(UserError, match="begun with another model, file or options"):
        critique_all(Scripted(), prompts(10), [POLITE], seed=1, path=path)
    forget_partial(path)
    assert not partial_path(path).exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("principles: []", "principles: list should have at least 1 item"),
        ("principles: [{name: a, critique: b}]", "principles.0.revision: field required"),
        ("rules: []", "principles: field required"),
        ("principles: [{name: a, critique: b, revision: c, weight: 1}]", "principles.0.weight: extra inputs"),
    ],
)
def test_mistakes_in_principles_have_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "principles.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load_principles(path)
    assert "\n" not in str(error.value) and "write principles: [{" in str(error.value)


def test_behaviours_are_detected(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("# rude\nfool\n\ndolt\n")
    (tmp_path / "mine.py").write_text(
        "def loud(prompts, completions, **_):\n    return [c.isupper() for c in completions]\n"
    )
    answers = [Sample("p", text) for text in ("You FOOL!", "foolish", "QUIET")]
    for measure, flags in {
        f"words:{tmp_path / 'words.txt'}": [True, False, False], "words:quiet": [False, False, True],
        "regex:^fool": [False, True, False], f"{tmp_path / 'mine.py'}:loud": [False, False, True],
        "{verifier: regex, pattern: 'oo'}": [False, True, False],
    }.items():  # fmt: skip
        assert open_detector(measure)(answers) == flags, measure
    for measure, message in {
        "words:": "has no words",
        "regex:(": "not a regular expression",
        "polite": "--measure",
    }.items():
        with pytest.raises(UserError, match=message):
            open_detector(measure)
    flags_of_prompts = measure_rate(Scripted(), prompts(3), open_detector("words:fool"), samples=2)
    assert flags_of_prompts == [[True, True]] * 3


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("I can't help with that.", True), ("I’m sorry, but no.", True), ("As an AI, I am not able to do this.", True),
        ("", True), ("Sure, here is how.", False), ("First, one cannot see it. " * 20 + "I can't help.", False),
        ("You will not regret it.", False),
    ],
)  # fmt: skip
def test_refusals_are_recognised_by_their_beginning(text: str, refused: bool) -> None:
    assert is_refusal(text) is refused


def test_endpoints_answer_too() -> None:
    responder = open_responder("http://localhost:8000/v1/#my-model", AnswerSettings(7))
    assert isinstance(responder, EndpointResponder) and responder.identity == "http://localhost:8000/v1#my-model"
    assert responder.endpoint.max_tokens == 7
    with pytest.raises(UserError, match="name the endpoint's model too"):
        open_responder("http://localhost:8000/v1", AnswerSettings())


def test_endpoints_give_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Endpoint, "complete", lambda self, some, seed: [EndpointAnswer(" yes \n", False)] * len(some))
    responder = open_responder("http://localhost:8000/v1#m", AnswerSettings(7))
    assert responder.reply([[{"role": "user", "content": "hi"}]]) == [Reply("yes", False)]


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    class Short(Scripted):
        def reply(self, conversations: Sequence[Conversation], seed: int = 0) -> list[Reply]:
            return [Reply("", False, fits=False) for _ in conversations]

    with pytest.raises(UserError, match="the prompt 'prompt 0' exceeds the model's context: shorten it"):
        measure_rate(Short(), prompts(1), open_detector("words:fool"))


def test_a_prompt_of_one_turn_is_a_text() -> None:
    assert prompt_value([{"role": "user", "content": "hi"}]) == "hi"
    assert prompt_value([{"role": "system", "content": "hi"}]) == [{"role": "system", "content": "hi"}]
