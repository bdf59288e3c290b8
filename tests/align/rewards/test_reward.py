"""Rewards as a user writes them: functions in TRL's signature, verifiers, weights, and errors that name the row."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer, models, pre_tokenizers

from bessemer.align.reward_model import RewardModel
from bessemer.align.rewards.reward import Sample, make_rewards, score_samples
from bessemer.errors import UserError
from bessemer.spec.rewards import Rewards


def specs(**rewards: Any) -> Rewards:
    return TypeAdapter(Rewards).validate_python(rewards)


def sample(completion: str, place: str = "data.jsonl:3", prompt: Any = "2+2?", **columns: Any) -> Sample:
    return Sample(prompt, completion, (1, 2), columns, True, place)


def parts(rewards: Rewards, *samples: Sample) -> dict[str, list[float | None]]:
    return score_samples(make_rewards(rewards), samples).parts


def test_functions_in_the_signature_of_trl(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import asyncio\n"
        "def length(completions, **kwargs):\n    return [len(c) for c in completions]\n"
        "def right(prompts, completions, completion_ids, answer, trainer_state, log_metric, **kwargs):\n"
        "    log_metric('step_seen', trainer_state.global_step)\n"
        "    return [None if a is None else c == a for c, a in zip(completions, answer)]\n"
        "def chat(prompts, completions):\n"
        "    return [len(c[0]['content']) + len(p) for p, c in zip(prompts, completions)]\n"
        "async def later(completions, **kwargs):\n    await asyncio.sleep(0)\n    return [0.5] * len(completions)\n"
    )
    rewards = make_rewards(
        specs(length=f"{file}:length", right={"function": f"{file}:right", "weight": 10.0}, later=f"{file}:later")
    )
    samples = [sample("4", answer="4"), sample("five", answer="4"), sample("six", answer=None)]
    scores = score_samples(rewards, samples, step=7)
    assert scores.parts == {"length": [1.0, 4.0, 3.0], "right": [1.0, 0.0, None], "later": [0.5] * 3}
    assert scores.totals == [11.5, 4.5, 3.5] and scores.extras.metrics == {"step_seen": 7}
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    assert parts(specs(chat=f"{file}:chat"), sample("four", prompt=messages)) == {"chat": [6.0]}


def test_no_reward_that_applies_is_nan(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def none(completions, **kwargs):\n    return [None for _ in completions]\n")
    scores = score_samples(make_rewards(specs(none=f"{file}:none")), [sample("a")])
    assert math.isnan(scores.totals[0]) and scores.parts == {"none": [None]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "gave 1 rewards for 2 answers"),
        ("return [1.0, 'high']", "gave 'high' for an answer to data.jsonl:9; give a finite number, or None"),
        ("return [float('nan'), 1]", "gave nan for an answer to data.jsonl:3"),
        ("return 3", "gave int, not a list"),
        ("raise KeyError('x')", r"mine.py:score (line 2) failed on 2 answers from data.jsonl:3 on: KeyError: 'x'"),
    ],
)
def test_wrong_functions(tmp_path: Path, body: str, message: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def score(completions, **kwargs):\n    {body}\n")
    with pytest.raises(UserError) as error:
        parts(specs(mine=f"{file}:score"), sample("a"), sample("b", "data.jsonl:9"))
    assert message in str(error.value) and "rl.rewards.mine" in str(error.value)


def test_exact() -> None:
    rewards = specs(
        loose="exact", strict={"verifier": "exact", "strict": True}, marked={"verifier": "exact", "extract": "A: (.+)"}
    )
    answers = ["Paris.", "  the  PARIS", "A: London\nA: Paris", "paris"]
    samples = [sample(text, answer=["Paris", "the Paris"]) for text in answers]
    assert parts(rewards, *samples) == {
        "loose": [1.0, 1.0, 0.0, 1.0], "strict": [0.0] * 4, "marked": [0.0, 0.0, 1.0, 0.0],
    }  # fmt: skip
    assert parts(specs(number="exact"), sample("4", answer=4)) == {"number": [1.0]}


def test_math_reads_solutions_on_both_sides() -> None:
    texts = ["so 1 + 1\n#### 2", r"thus \boxed{\frac{4}{2}}", "The answer is 2 apples.", "2 or rather 3", "none"]
    for answer in ("2", 2, 2.0, "long story\n#### 2"):
        samples = [sample(text, answer=answer) for text in texts]
        assert parts(specs(right="math"), *samples) == {"right": [1.0, 1.0, 1.0, 0.0, 0.0]}
    assert parts(specs(right={"verifier": "math", "column": "target"}), sample("7", target="7")) == {"right": [1.0]}


def test_missing_columns_and_values_name_the_row() -> None:
    with pytest.raises(
        UserError, match=r"rl\.rewards\.right\.column: data\.jsonl:3 has no column 'answer' \(it has q\)"
    ):
        parts(specs(right="math"), sample("4", q="x"))
    with pytest.raises(UserError, match=r"data\.jsonl:3: the right answer is None"):
        parts(specs(right="math"), sample("4", answer=None))


def test_regex_and_json(tmp_path: Path) -> None:
    form = specs(form={"verifier": "regex", "pattern": r"^<think>.*</think>\s*<answer>.*</answer>$"})
    texts = ["<think>a\nb</think>\n<answer>4</answer>", "<answer>4</answer>", "x <think></think><answer></answer>"]
    assert parts(form, *map(sample, texts)) == {"form": [1.0, 0.0, 0.0]}
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    texts = ['{"a": 1}', 'Here:\n```json\n{"a": 2}\n```', '{"a": "x"}', "{a: 1}", "NaN", "[" * 100_000, "3"]
    pytest.importorskip("jsonschema")
    for given in (schema, str(file)):
        rewards = specs(any="json", fits={"verifier": "json", "json_schema": given})
        assert parts(rewards, *map(sample, texts)) == {
            "any": [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0], "fits": [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        }  # fmt: skip
    with pytest.raises(UserError, match="not a JSON schema"):
        make_rewards(specs(bad={"verifier": "json", "json_schema": {"type": "nothing"}}))


@pytest.mark.slow
def test_a_reward_model_gives_its_scores(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path)
    shape = transformers.LlamaConfig(
        vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=1,
        eos_token_id=1, bos_token_id=None, pad_token_id=1,
    )  # fmt: skip
    transformers.LlamaForSequenceClassification(shape).save_pretrained(tmp_path)
    rewards = make_rewards(specs(taste={"model": str(tmp_path), "weight": 2.0}))
    scores = score_samples(rewards, [sample("a b", prompt="b "), sample("b b", prompt="a ")])
    expected = RewardModel.load(tmp_path).score(["b ", "a "], ["a b", "b b"])
    assert scores.parts["taste"] == pytest.approx(expected) and expected[0] != expected[1]
    assert scores.totals == pytest.approx([2 * value for value in expected])
    with pytest.raises(UserError, match=r"rl\.rewards\.taste\.model: .*missing"):
        make_rewards(specs(taste={"model": str(tmp_path / "missing")}))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("exat", "no verifier 'exat'; did you mean exact"), ({"verifier": "regex"}, "needs pattern"),
        ({}, "has no kind"),
        ({"verifier": "exact", "pattern": "x"}, "pattern is of verifier regex: remove it"),
        ({"verifier": "regex", "pattern": "("}, "no regular expression"), ("mine.py:1", "names no function"),
        ({"verifier": "exact", "function": "a.py:b"}, "function and verifier are set"),
        ({"judge": {"url": "http://a:pw@h/v1", "model": "m", "rubric": "r.md"}}, "password"),
    ],
)  # fmt: skip
def test_wrong_specs(reward: Any, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        specs(part=reward)
    assert message in str(error.value)


def test_async_functions_work_inside_a_running_loop(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("async def later(completions, **kwargs):\n    return [1.0] * len(completions)\n")

    async def outer() -> dict[str, list[float | None]]:
        return parts(specs(later=f"{file}:later"), sample("a"))

    assert asyncio.run(outer()) == {"later": [1.0]}
