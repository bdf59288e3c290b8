"""The constitutional loop of recipes/constitutional on three seeds: rude answers become rare, and stay on the topic."""

import importlib.util
import random
import re
from pathlib import Path

import pytest
from tests.align.tiny_chat import train_dpo, train_on, write_jsonl

from bessemer.align.behaviour import measure_rate, open_detector
from bessemer.align.critique import critique_all, load_principles
from bessemer.align.responder import Responder, conversation, open_responder
from bessemer.model.generate import Sampling
from bessemer.statistics import PairedChange, Rate
from bessemer.train.answers import AnswerSettings, PromptRow, read_prompt_rows

RECIPES = Path(__file__).parents[2] / "recipes"


def write_data(folder: Path, seed: int) -> None:
    spec = importlib.util.spec_from_file_location("make_data", RECIPES / "make_data.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    principle = (RECIPES / "constitutional" / "principles.yaml").read_text()
    assert module.CRITIQUE in principle and module.REVISION in principle
    module.write_critiques(folder, random.Random(seed))


def open_run(run: Path) -> Responder:
    return open_responder(str(run), AnswerSettings(16, sampling=Sampling(1.0)), device="cpu")


def on_topic(responder: Responder, rows: list[PromptRow]) -> float:
    """The share of answers that name what was asked about, in a complete sentence."""
    rows = 10 * rows
    replies = responder.reply([conversation(row.prompt) for row in rows], 5)
    things = [re.findall(r"\w+", str(row.prompt))[-1] for row in rows]
    return sum(f"The {t} is " in reply.text for t, reply in zip(things, replies, strict=True)) / len(rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_loop_lowers_the_unwanted_behaviour(tmp_path: Path, seed: int, one_probe: None) -> None:
    write_data(tmp_path, seed)
    rude = train_on(tmp_path, tmp_path / "critiques.jsonl", 600, 96, seed)
    detector = open_detector("words:rubbish,awful")
    prompts, tests = (read_prompt_rows(tmp_path / f"critique-{name}.txt") for name in ("prompts", "test"))
    principles = load_principles(RECIPES / "constitutional" / "principles.yaml")
    result = critique_all(open_run(rude), prompts, principles, seed=seed, detector=detector)
    assert result.before and result.after and result.before.share > 0.4
    polite = train_dpo(tmp_path, "polite", rude, write_jsonl(tmp_path / "pairs.jsonl", result.pairs()), 96, sft=1.0)
    flags = [measure_rate(open_run(run), tests, detector, samples=10, seed=seed) for run in (rude, polite)]
    before, after = (Rate.of(flag for some in values for flag in some) for values in flags)
    change = PairedChange.of(*([sum(some) / 10 for some in values] for values in flags))
    topics = [on_topic(open_run(run), tests) for run in (rude, polite)]
    print(f"seed {seed}: {result.before} -> revised {result.after}; held out {before} -> {after}; on topic {topics}")
    assert after.share * 4 < before.share and change.p < 0.001
    assert topics[1] > 0.75 * topics[0]
