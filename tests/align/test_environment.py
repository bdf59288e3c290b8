"""Episodes of several turns: what is stored of them, what is learned, and where the rewards of turns go."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from bessemer.align.environment import Episode, Player, last_answer, observation_ids
from bessemer.align.prompts import Prompt
from bessemer.align.rollout_maker import turn_rewards
from bessemer.align.rollouts import Round, RoundStore
from bessemer.data.tokenizer.tokenizer import PromptFormat, Tokenizer
from bessemer.errors import UserError
from bessemer.model.generate import Completion, Request
from bessemer.spec.rl import RlSpec
from bessemer.train.trained import TextReader

from .test_rollouts import rl_of, stream_of

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALCULATOR = '''
class Calculator:
    """Computes what the model writes as CALC: ...; the answer is graded."""

    def reset(self, prompt, answer):
        self.answer = answer
        return None

    def step(self, text):
        if text.startswith("CALC:"):
            total = sum(int(part) for part in text[5:].split("+"))
            return [{"role": "tool", "content": str(total)}], 0.1, False
        return "", float(text == self.answer), True

class Broken(Calculator):
    def step(self, text):
        return 1 / 0

class Endless(Calculator):
    def step(self, text):
        return "again", 0.5, False

class NoStep:
    def reset(self, prompt):
        return None
'''


@pytest.fixture
def reader() -> TextReader:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = HfTokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = Tokenizer(inner, "<|endoftext|>")
    return TextReader(tokenizer, PromptFormat((), (), tokenizer.eos_id, frozenset({tokenizer.eos_id})), CHATML)


@pytest.fixture
def make(tmp_path: Path, reader: TextReader) -> Any:
    (tmp_path / "tools.py").write_text(CALCULATOR)

    def player(name: str, **settings: Any) -> Player:
        rl = {"max_tokens": 60, "rewards": {}, "environment": f"{tmp_path / 'tools.py'}:{name}", **settings}
        return Player(reader, RlSpec.model_validate(rl), settings.pop("context", 200))

    return player


def episode(player: Player, number: int = 0) -> Episode:
    prompt = Prompt("2+3?", {"answer": "5"}, "rows.jsonl", number + 1)
    return Episode((number, 0, number), prompt, player.make(), seed=number)


def scripted(reader: TextReader, *turns: str) -> Any:
    """A model that writes these texts, one at each turn, with log-probability -k at token k."""
    asked: list[Sequence[Request]] = []

    def write(requests: Sequence[Request]) -> list[Completion]:
        text, stop = turns[len(asked)], reader.tokenizer.special["<|im_end|>"]
        asked.append(requests)
        ids = reader.tokenizer.encode(text)
        logps = [-float(k) for k in range(len(ids))]
        return [Completion(0, 0, ids, logprobs=logps, reason="stop", stop=stop, stop_logprob=-9.0) for _ in requests]

    write.asked = asked  # type: ignore[attr-defined]
    return write


def test_a_tool_is_called_and_its_output_is_masked(make: Any, reader: TextReader, tmp_path: Path) -> None:
    player, write = make("Calculator"), scripted(reader, "CALC:2+3", "5")
    (sample,) = player.play(write, [episode(player)], 1.0)
    assert sample.turn_rewards == [0.1, 1.0] and sample.finished
    observed = "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    whole = "CALC:2+3<|im_end|>" + observed + "5<|im_end|>"
    assert sample.tokens.tolist() == reader.tokenizer.encode_with_special(whole)
    ((begin, end),) = sample.observed
    assert sample.tokens[begin:end].tolist() == reader.tokenizer.encode_with_special(observed)
    assert sample.learned.sum() == len("CALC:2+3") + 1 + 2 and not sample.learned[begin:end].any()
    assert sample.logps[begin - 1] == -9.0 and not sample.logps[begin:end].any()
    # What the model read at its second turn is what the template writes.
    asked = write.asked[1][0]
    turns = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "CALC:2+3"}]
    assert list(asked.prompt) == reader.chat_prompt([*turns, {"role": "tool", "content": "5"}])
    assert asked.max_tokens == 60 - end and asked.sampling.seed != write.asked[0][0].sampling.seed
    assert last_answer(reader, sample) == "5"
    # Stored, loaded, packed: only the model's tokens have weight.
    made = Round(0, [sample] * 4, 4, np.ones(4, np.bool_))
    made.arrays["generator_logps"] = np.concatenate([sample.logps] * 4)
    made.arrays["advantages"] = np.ones(int(made.starts[-1]), np.float32)
    RoundStore(tmp_path / "rollouts").save(made, "key", [])
    loaded = RoundStore(tmp_path / "rollouts").load(0)
    assert (
        loaded is not None and loaded.samples[2].observed == [[begin, end]] and (loaded.learned == made.learned).all()
    )
    stream = stream_of(tmp_path, rl_of(prompts=1), loaded)
    stream.sequence_length = 200
    batch = stream.micro_batches(0, 100)[0]
    assert batch.weights.sum() == stream.step_count(0) == 4 * sample.learned.sum()
    assert set(batch.targets[batch.weights > 0]) <= set(sample.tokens[sample.learned].tolist())
    assert set(batch.fields["lengths"][batch.weights > 0]) == {float(sample.learned.sum())}
    assert not batch.fields["lengths"][batch.weights == 0].any()


def test_rewards_of_turns_are_at_their_last_tokens(make: Any, reader: TextReader) -> None:
    player = make("Calculator")
    (sample,) = player.play(scripted(reader, "CALC:2+3", "5"), [episode(player)], 1.0)
    mask_BT = torch.from_numpy(sample.learned)[None].double()
    rewards_BT = turn_rewards([sample], mask_BT)
    ends = [sample.observed[0][0] - 1, sample.tokens.size - 1]
    assert rewards_BT.nonzero()[:, 1].tolist() == ends and rewards_BT[0, ends].tolist() == [0.1, 1.0]


def test_an_episode_ends_without_room_or_turns(make: Any, reader: TextReader) -> None:
    player = make("Endless", turns=3)
    (sample,) = player.play(scripted(reader, "a", "b", "c"), [episode(player)], 1.0)
    assert len(sample.turn_rewards) == 3 and not sample.finished and len(sample.observed) == 2
    player = make("Endless", max_tokens=20)  # the reply alone takes more
    (sample,) = player.play(scripted(reader, "a", "b"), [episode(player)], 1.0)
    assert len(sample.turn_rewards) == 1 and not sample.finished and not sample.observed


def test_mistakes_are_one_line(make: Any, reader: TextReader) -> None:
    player = make("Broken")
    with pytest.raises(UserError, match=r"rl.environment: .*tools.py:Broken.step.*rows.jsonl:1: ZeroDivisionError"):
        player.play(scripted(reader, "x"), [episode(player)], 1.0)
    with pytest.raises(UserError, match="NoStep has no method step"):
        make("NoStep")
    plain = TextReader(reader.tokenizer, reader.format, None)
    assert observation_ids(plain, "ab") == reader.tokenizer.encode("ab")
    with pytest.raises(UserError, match="needs a chat template"):
        observation_ids(plain, [{"role": "tool", "content": "5"}])


def test_the_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="names no class"):
        RlSpec(environment="tools")
    assert json.loads(RlSpec(environment="tools:Env").model_dump_json())["turns"] == 8
