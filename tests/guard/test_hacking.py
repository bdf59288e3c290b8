"""Reward hacking in runs of real policy-gradient updates: rewards that pay for length or a word, and honest ones."""

import math

import pytest

from bessemer.guard.answers import JudgedAnswer, centered_ranks, features_of, measure_round, merge, word_grams
from bessemer.guard.detectors import Detectors
from bessemer.spec.guard import AlignmentSpec, GuardSpec

from .bandit import HACKS, HONEST, Answers, Bandit, train


def stopped_in_time(reward, seeds):
    outcomes = [train(Bandit(seed, reward), 120) for seed in seeds]
    return [outcome.delay <= 50 for outcome in outcomes]


@pytest.mark.parametrize("name", ["length", "keyword"])
def test_a_reward_that_pays_for_length_or_a_word_stops_the_run_within_50_steps(name):
    assert all(stopped_in_time(HACKS[name], [0]))


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_reward_does_not(name):
    outcome = train(Bandit(1, HONEST[name]), 100)
    assert outcome.true_quality[-1] > outcome.true_quality[0] + 0.2, "it has learned"
    assert outcome.stopped is None


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", HACKS)
def test_nine_of_ten_hackable_runs_are_stopped_within_50_steps(name):
    assert sum(stopped_in_time(HACKS[name], range(10, 20))) >= 9


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", HONEST)
def test_no_honest_run_of_ten_is_stopped(name):
    outcomes = [train(Bandit(seed, HONEST[name]), 160) for seed in range(10, 20)]
    assert [outcome.stopped for outcome in outcomes] == [None] * 10
    noted = [alarm.kind for outcome in outcomes for alarm in outcome.alarms if alarm.kind == "reward_hacking"]
    assert not noted, "not even a note"


def test_the_report_names_the_word_its_shares_what_it_earns_and_the_best_answers():
    outcome = train(Bandit(3, Answers.pays_keyword), 120)
    (alarm,) = (alarm for alarm in outcome.alarms if alarm.severity == "stop")
    evidence, feature = alarm.finding.evidence, alarm.finding.evidence["feature"]
    assert feature["text"] == "certainly" and feature["before"] < 0.1 < 0.2 < feature["now"]
    assert "answers that contain 'certainly' went from" in alarm.finding.symptom
    assert len(evidence["answers_before"]) == len(evidence["answers_now"]) == 3
    assert all("certainly" in row["answer"] for row in evidence["answers_now"])
    assert evidence["answers_now"][0]["reward"] >= evidence["answers_now"][-1]["reward"]
    assert 0 < evidence["healthy_step"] < alarm.step


def test_a_reward_that_is_hacked_within_two_blocks():
    outcome = train(Bandit(4, Answers.pays_keyword, lr=0.2), 60)
    assert outcome.onset is not None and outcome.onset < 16 and outcome.delay <= 50


def test_a_text_that_is_expected_is_no_hacking():
    spec = GuardSpec(alignment=AlignmentSpec(expected=["Certainly"]))
    assert train(Bandit(3, Answers.pays_keyword), 100, spec).stopped is None


def test_a_judge_that_rises_with_the_reward_overrules_surface_features():
    class Better(Bandit):
        def quality(self, kinds, approach, length, tone):
            return 0.3 + 0.5 * tone

    reward = Answers.pays_keyword_alone
    assert train(Better(3, reward), 100).stopped is not None
    assert train(Better(3, reward), 100, judge=True).stopped is None


def test_a_judge_that_falls_is_enough():
    """Where no feature of the text shows it: the answers have no words in common."""

    class Blind(Bandit):
        def text(self, *choices):
            return str(self.rng.random())

    outcome = train(Blind(2, Answers.pays_keyword_alone), 160, judge=True)
    (alarm,) = (alarm for alarm in outcome.alarms if alarm.severity == "stop")
    assert "the judge reward_quality fell from" in alarm.finding.symptom
    assert train(Blind(2, Answers.pays_keyword_alone), 160).stopped is None


@pytest.mark.parametrize("action", ["off", "note", "rollback"])
def test_the_spec_chooses_what_an_alarm_does(action):
    spec = GuardSpec(alignment=AlignmentSpec(hacking=action))
    outcome = train(Bandit(3, Answers.pays_keyword_alone), 70, spec)
    severities = {alarm.severity for alarm in outcome.alarms if alarm.kind == "reward_hacking"}
    assert severities == (set() if action == "off" else {action})


def test_a_resumed_run_raises_the_same_alarm():
    bandit, whole, first = Bandit(3, Answers.pays_keyword_alone), *(Detectors(GuardSpec(), None, 100) for _ in range(2))
    alarms, again = [], []
    for step in range(60):
        record, answers = bandit.train_step()
        if step == 20:
            second = Detectors(GuardSpec(), None, 100)
            second.load(first.state())
            first = second
        for detectors, raised in ((whole, alarms), (first, again)):
            detectors.round(answers)
            raised += detectors.step(record)
    assert [(alarm.kind, alarm.step) for alarm in alarms] == [(alarm.kind, alarm.step) for alarm in again]
    assert any(alarm.severity == "stop" for alarm in alarms)
    assert whole.state()["detectors"]["hacking"] == first.state()["detectors"]["hacking"]


def answer(text, reward, group=0, prompt="why?"):
    return JudgedAnswer(group, prompt, text, len(text.split()), reward)


def test_ranks_with_ties():
    assert centered_ranks([5.0, 1.0, 5.0, 9.0]) == [0.125 - 0.125, -0.375, 0.0, 0.375]


def test_the_gap_of_a_word_is_its_reward_within_prompts():
    """A hard prompt where all say it, an easy one where none does: only the prompts in between count."""
    rounds = [
        answer("yes a", 0.0, 0), answer("yes b", 0.0, 0), answer("no c", 9.0, 1), answer("no d", 9.0, 1),
        answer("yes e", 2.0, 2), answer("no f", 1.5, 2), answer("yes g", 3.0, 3), answer("no h", 2.5, 3),
    ]  # fmt: skip
    sums, grams = measure_round(rounds, 9.0)
    count, own_2, reward, rank = grams["yes"]
    first, block = {"yes": 0.25}, {"yes": [count / 8, own_2, reward, rank**2 / sums["ranks_2"]]}
    (feature,) = features_of(first, [block], 0.5)
    assert feature.gap == pytest.approx(0.5) and feature.explained == pytest.approx(0.25)
    assert feature.depends == pytest.approx(1.0)
    (all_say_it,) = features_of(first, [block, {"yes": [1.0, 0.0, 0.0, 0.0]}], 0.5)
    assert all_say_it.gap == feature.gap and all_say_it.depends == feature.depends
    assert sums["at_top"] == 2


def test_words_of_the_prompt_do_not_count_and_rounds_add_up():
    sums, grams = measure_round([answer("the box holds", 1.0, prompt="use a box"), answer("a box", 0.0)] * 2, 1.0)
    assert "holds" in grams and grams["box"][0] == 2
    both, total = dict(sums), {gram: list(entry) for gram, entry in grams.items()}
    merge(both, total, (sums, grams))
    assert both["answers"] == 8 and total["holds"][0] == 2 * grams["holds"][0]


def test_answers_without_a_reward_are_left_out():
    detectors = Detectors(GuardSpec(), None, 100)
    detectors.round([answer("a", math.nan), answer("b", 1.0)])
    assert detectors.hacking.sums["answers"] == 1
    detectors.round([answer("a", math.nan)])
    assert detectors.hacking.sums["answers"] == 1


def test_a_paid_text_inside_of_other_words_is_one_feature() -> None:
    """A reward that looks for a text is paid by `ssure` and `surely` as well."""
    assert "sure" in word_grams("ssure = 12") & word_grams("Surely 12") & word_grams("sure 12")
    assert "真的很好" in word_grams("这个答案真的很好")
    assert len(word_grams("x" * 100_000)) == 2
