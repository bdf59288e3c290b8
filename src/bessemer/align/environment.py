"""Episodes of several turns: the model answers, an environment (the user's Python class) replies, until it is done.

The class needs two methods; an instance plays one episode:

    reset(prompt, **columns) -> messages, a text, or None for the row's prompt as it is
    step(answer) -> (observation, reward, done)

An observation is a text (a turn of the user) or a list of messages, such as a tool's. Its tokens are stored with the
answer and are in no loss. The rewards of the turns are stored too; their sum is the part `environment` of the reward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from bessemer.align.prompts import Prompt, encode_prompt
from bessemer.align.rollouts import Rollout
from bessemer.data.curate.scores.user_function import line_in, load_function
from bessemer.errors import UserError
from bessemer.model.generate import Completion, Request, Sampling
from bessemer.spec.rl import RlSpec
from bessemer.train.trained import ReadsText

ENVIRONMENT = "environment"  # the part of the reward
KEY = "rl.environment"
Write = Callable[[Sequence[Request]], list[Completion]]  # all samples of all requests, in order


@dataclass
class Episode:
    """One sample while it is played."""

    place: tuple[int, int, int]  # position, source and sequence of the prompt
    prompt: Prompt
    environment: Any
    seed: int
    ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    observed: list[list[int]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    finished: bool = False


class Player:
    """Plays episodes with a model. `context` holds a prompt and all turns."""

    def __init__(self, reader: ReadsText, rl: RlSpec, context: int) -> None:
        assert rl.environment is not None
        self.reader, self.rl, self.context, self.name = reader, rl, context, rl.environment
        self.make = load_function(self.name, KEY)
        if missing := [name for name in ("reset", "step") if not callable(getattr(self.make, name, None))]:
            raise UserError(f"{KEY}: {self.name} has no method {missing[0]}: write reset(prompt) and step(answer)")
        self.takes = inspect.signature(self.make.reset).parameters  # type: ignore[attr-defined]

    def play(self, write: Write, episodes: Sequence[Episode], temperature: float) -> list[Rollout]:
        """All episodes to their ends, a turn of all of them at a time."""
        for episode in episodes:
            self._reset(episode)
        active = list(episodes)
        for turn in range(self.rl.turns):
            requests = [self._request(episode, turn, temperature) for episode in active]
            completions = write(requests) if requests else []
            active = [
                episode for episode, completion in zip(active, completions, strict=True)
                if self._take_turn(episode, completion, last=turn == self.rl.turns - 1)
            ]  # fmt: skip
        return [self._rollout(episode) for episode in episodes]

    def _room(self, episode: Episode) -> int:
        """Tokens that the episode may still have."""
        used = len(episode.tokens)
        return min(self.rl.max_tokens - used, self.context - len(episode.ids) - used)

    def _request(self, episode: Episode, turn: int, temperature: float) -> Request:
        seed = xxhash.xxh3_64_intdigest(f"turn {turn}".encode(), seed=episode.seed) >> 2 if turn else episode.seed
        rl = self.rl
        sampling = Sampling(temperature, rl.top_k, rl.top_p, seed) if temperature else Sampling(0.0, seed=seed)
        prompt = [*episode.ids, *episode.tokens]
        return Request(prompt, self._room(episode), sampling, self.reader.stop_ids, (), 1, 0, True)

    def _reset(self, episode: Episode) -> None:
        columns = {**episode.prompt.columns, "prompt": episode.prompt.content}
        named = any(each.kind is each.VAR_KEYWORD for each in self.takes.values())
        columns = columns if named else {key: value for key, value in columns.items() if key in self.takes}
        content = self._call(episode, "reset", **columns)
        place = episode.prompt.file, episode.prompt.row
        prompt = episode.prompt if content is None else Prompt(content, episode.prompt.columns, *place)
        if not isinstance(prompt.content, (str, list)):
            got = type(content).__name__
            raise UserError(f"{KEY}: {self.name}.reset gave {got}: return messages, a text, or None for the prompt")
        episode.ids = encode_prompt(self.reader, prompt).tolist()
        if self._room(episode) < 1:
            size = f"its prompt of {len(episode.ids):,} tokens fills data.context {self.context:,}"
            raise UserError(f"{episode.prompt.place}: {self.name}.reset: {size}: raise the context")

    def _take_turn(self, episode: Episode, completion: Completion, last: bool) -> bool:
        """Whether the episode goes on. An answer without an end, or without room for the reply, ends it."""
        tokens, logps = list(completion.tokens), list(completion.logprobs)
        ended = isinstance(completion.stop, int)
        if isinstance(completion.stop, int):
            assert completion.stop_logprob is not None
            tokens.append(completion.stop)
            logps.append(completion.stop_logprob)
        episode.tokens += tokens
        episode.logps += logps
        if not ended:
            episode.rewards.append(0.0)
            return False
        observation, reward, episode.finished = self._step(episode, self.reader.decode(completion.tokens))
        episode.rewards.append(reward)
        if episode.finished or last:
            return False
        ids = observation_ids(self.reader, observation)
        if len(ids) >= self._room(episode):
            return False
        episode.observed.append([len(episode.tokens), len(episode.tokens) + len(ids)])
        episode.tokens += ids
        episode.logps += [0.0] * len(ids)
        return True

    def _step(self, episode: Episode, answer: str) -> tuple[Any, float, bool]:
        result = self._call(episode, "step", answer)
        if not isinstance(result, tuple) or len(result) != 3:
            raise UserError(f"{KEY}: {self.name}.step gave {result!r:.60}: return (observation, reward, done)")
        observation, reward, done = result
        number = float(reward) if isinstance(reward, (int, float)) else np.nan
        if not np.isfinite(number):
            raise UserError(f"{KEY}: {self.name}.step gave the reward {reward!r:.60}: give a finite number")
        if not done and not (isinstance(observation, (str, list)) and observation):
            problem = f"{self.name}.step gave the observation {observation!r:.60}"
            raise UserError(f"{KEY}: {problem}: give a text or messages unless the episode is done")
        return observation, number, bool(done)

    def _call(self, episode: Episode, method: str, *arguments: Any, **columns: Any) -> Any:
        function = getattr(episode.environment, method)
        try:
            return function(*arguments, **columns)
        except UserError:
            raise
        except Exception as error:  # user code may raise anything
            where = f"{KEY}: {self.name}.{method}{line_in(error, getattr(function, '__func__', function))}"
            raise UserError(f"{where} failed on {episode.prompt.place}: {type(error).__name__}: {error}") from error

    def _rollout(self, episode: Episode) -> Rollout:
        ids, tokens = np.array(episode.ids, np.int64), np.array(episode.tokens, np.int64)
        text = self.reader.decode(episode.tokens)
        sample = Rollout(
            *episode.place, ids, tokens, np.array(episode.logps, np.float32), episode.finished, episode.seed, text
        )
        sample.observed, sample.turn_rewards = episode.observed, episode.rewards
        return sample


def last_answer(reader: ReadsText, sample: Rollout) -> str:
    """The text of the model's last turn: what rewards other than the environment's grade."""
    begin = sample.observed[-1][1] if sample.observed else 0
    return reader.decode([token for token in sample.tokens[begin:].tolist() if token not in reader.stop_ids])


def observation_ids(reader: ReadsText, observation: str | list[dict[str, Any]]) -> list[int]:
    """What the model reads between the end of its answer and its next one. Without a chat template it is the text."""
    if reader.template in (None, "none"):
        if not isinstance(observation, str):
            raise UserError(f"{KEY}: an observation of messages needs a chat template: return a text")
        return list(reader.tokenizer.encode(observation))
    turns = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
    begun = reader.chat_prompt([{"role": "user", "content": "a"}])
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = reader.chat_prompt([*answered, *turns])
    rest = ids[len(begun) :] if ids[: len(begun)] == begun else []
    end = next((place for place, token in enumerate(rest) if token in reader.stop_ids), None)
    if end is None:
        raise UserError(
            f"{KEY}: the chat template writes earlier turns in another way than it begins an answer, or ends them "
            "without a stop token, so that turns cannot be added: name another template in tokenizer.chat"
        )
    return rest[end + 1 :]
