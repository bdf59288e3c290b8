"""Samples answers with the weights of a run, on all its ranks, and adds their rewards.

Each data-parallel rank answers its share of the prompts with the embedded generator; then all ranks hold all answers,
in the order of the prompts. A draw depends on the seed of its prompt and on nothing else in the batch, so the answers
are the same on any number of ranks, as far as rounding is. The exchange sends every answer to every rank: about 12
bytes a token, 200 MB for 16,384 answers of 1,000 tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import xxhash

from bessemer.align.environment import ENVIRONMENT, Episode, Player, Write, last_answer
from bessemer.align.prompts import Prompt, PromptRows
from bessemer.align.resident import RoundGenerator
from bessemer.align.rewards.reward import Reward, score_samples
from bessemer.align.rewards.reward import Sample as RewardSample
from bessemer.align.rollouts import Rollout
from bessemer.align.vllm import VllmGenerator
from bessemer.errors import UserError
from bessemer.model.generate import Completion, Generator, Request, Sampling
from bessemer.model.transformer import Decoder
from bessemer.parallel.generate import gathered
from bessemer.parallel.world import World
from bessemer.spec.rl import RlSpec
from bessemer.train.trained import TextReader

_SAMPLE_SEED = 0x9E3779B9  # as the generator spaces the seeds of a request's samples
OnStep = Callable[[int, int], None]  # answers that are done, of all


@dataclass(frozen=True)
class PromptRequest:
    """A prompt to answer: its position in the stream, and source and row of the prompt."""

    position: int
    source: int
    sequence: int
    prompt: Prompt
    ids: np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Answers:
    """The answers of all ranks, those to one prompt one after another, with the seconds that this rank took."""

    samples: list[Rollout]
    generate_s: float = 0.0
    sync_s: float = 0.0  # of these, to give the generator the weights
    reward_s: float = 0.0
    extras: dict[str, float] = field(default_factory=dict)  # what reward functions log, as means over ranks


@dataclass
class LocalAnswers:
    """The answers of one rank, before ranks exchange them. `failure` is raised there, on all ranks."""

    samples: list[Rollout] = field(default_factory=list)
    generate_s: float = 0.0
    reward_s: float = 0.0
    extras: dict[str, float] = field(default_factory=dict)
    failure: Exception | None = None


class Sampler:
    """Samples answers, decodes and rewards them. A `remote` generator receives the weights before it samples."""

    def __init__(
        self, reader: TextReader, rl: RlSpec, rewards: Sequence[Reward], context: int, seed: int,
        remote: VllmGenerator | None = None,
    ) -> None:  # fmt: skip
        self.reader, self.rl, self.rewards, self.context, self.seed = reader, rl, rewards, context, seed
        self.generator = RoundGenerator(context, rl.slots)
        self.remote = remote
        self.player = Player(reader, rl, context) if rl.environment else None

    def questions(
        self, names: Sequence[str], rows: Mapping[str, PromptRows], positions: Any, sources: Any, sequences: Any
    ) -> list[PromptRequest]:
        places = zip(positions.tolist(), sources.tolist(), sequences.tolist(), strict=True)
        return [PromptRequest(p, s, q, rows[names[s]].prompts[q], rows[names[s]].ids[q]) for p, s, q in places]

    def answer(
        self, model: Decoder, world: World, precision: str, questions: Sequence[PromptRequest], samples: int,
        temperature: float, step: int, salt: str = "", on_step: OnStep | None = None,
    ) -> Answers:  # fmt: skip
        """Answers to all questions; a collective call. `step` and `salt` tell calls apart whose questions may be equal.
        An error of one rank is raised on all."""
        part = self.share(questions, world)
        with self.writer(model, world, precision, len(part) * samples, on_step) as write:
            local = self.make(write, part, samples, temperature, step, salt)
        return self.exchange(local, world, len(questions), samples)

    def share(self, questions: Sequence[PromptRequest], world: World) -> list[PromptRequest]:
        """The prompts that this rank answers."""
        return list(questions)[world.dp_rank :: world.layout.dp]

    def make(
        self, write: Write, questions: Sequence[PromptRequest], samples: int, temperature: float, step: int,
        salt: str = "",
    ) -> LocalAnswers:  # fmt: skip
        """Answers and rewards of this rank. Sends nothing to other ranks, so it may run beside the training."""
        local, began_s = LocalAnswers(), time.perf_counter()
        try:
            local.samples = self._generate(write, questions, samples, temperature, f"{step} {salt}")
        except UserError as failure:
            local.failure = failure
        generated_s = time.perf_counter()
        try:
            if local.failure is None:
                local.extras = self._reward(questions, local.samples, samples, step)
        except Exception as failure:  # the others wait for this rank
            local.failure = failure
        local.generate_s, local.reward_s = generated_s - began_s, time.perf_counter() - generated_s
        return local

    def exchange(self, local: LocalAnswers, world: World, questions: int, samples: int) -> Answers:
        """The answers of all ranks to `questions` prompts; a collective call."""
        if local.failure is not None and world.size == 1:
            raise local.failure
        error = "" if local.failure is None else str(local.failure)
        if local.failure is not None and not isinstance(local.failure, UserError):
            error = f"rl.rewards: {type(local.failure).__name__} on rank {world.rank}: {error}"
        if error := next(filter(None, world.gather(error)), ""):
            raise UserError(error)
        by_rank = dict(world.gather((world.dp_rank, local.samples)))  # ranks that share rows have the same
        merged: list[Rollout] = []
        for number in range(questions):
            rank, at = number % world.layout.dp, number // world.layout.dp * samples
            merged += by_rank[rank][at : at + samples]
        logged = [each for each in world.gather(local.extras) if each]
        extras = {name: float(np.mean([each[name] for each in logged if name in each])) for name in (logged or [{}])[0]}
        return Answers(merged, local.generate_s, self.generator.sync_s, local.reward_s, extras)

    @contextmanager
    def writer(
        self, model: Decoder, world: World, precision: str, answers: int, on_step: OnStep | None = None
    ) -> Iterator[Write]:
        """What completes requests with the present weights; all ranks enter together."""
        if self.remote is not None:
            self.load_remote(model, world)
            yield partial(self.remote.complete, on_step=on_step)
            return
        with self.generator.provide(model, world, precision, answers) as generator:
            yield self.embedded(generator, on_step)

    def slots(self, answers: int) -> int:
        return max(1, min(self.rl.slots, answers))

    def load_remote(self, model: Decoder, world: World) -> None:
        """Rank 0 gives the remote generator the weights; the others wait for it."""
        assert self.remote is not None
        error = ""
        with gathered(model, world) as local:
            try:
                if world.main:
                    self.remote.load_weights(local)
            except UserError as failure:
                error = str(failure)
        if error := world.agree(error):
            raise UserError(error)

    def embedded(self, generator: Generator, on_step: OnStep | None = None) -> Write:
        """Completes requests with a generator, whose slots keep what later turns of an episode begin with."""

        def write(requests: Sequence[Request]) -> list[Completion]:
            queued = [completion for request in requests for completion in generator.submit(request)]
            while generator.step():
                if on_step is not None:
                    on_step(sum(completion.reason is not None for completion in queued), len(queued))
            return queued

        return write

    def _generate(
        self, write: Write, questions: Sequence[PromptRequest], samples: int, temperature: float, salt: str
    ) -> list[Rollout]:
        rl = self.rl
        seeds = [
            xxhash.xxh3_64_intdigest(f"{salt} {question.position}".encode(), seed=self.seed) >> 2
            for question in questions
        ]
        if self.player is not None:
            episodes = [
                Episode(
                    (question.position, question.source, question.sequence), question.prompt, self.player.make(),
                    seed + sample * _SAMPLE_SEED,
                )
                for question, seed in zip(questions, seeds, strict=True) for sample in range(samples)
            ]  # fmt: skip
            return self.player.play(write, episodes, temperature)
        requests: list[Request] = []
        for question, seed in zip(questions, seeds, strict=True):
            sampling = Sampling(temperature, rl.top_k, rl.top_p, seed) if temperature else Sampling(0.0, seed=seed)
            ids, stops = question.ids.tolist(), self.reader.stop_ids
            requests.append(Request(ids, rl.max_tokens, sampling, stops, (), samples, 0, True))
        made = []
        for number, completion in enumerate(write(requests)):
            question = questions[number // samples]
            tokens, logps = list(completion.tokens), list(completion.logprobs)
            finished = isinstance(completion.stop, int)
            if finished:
                assert isinstance(completion.stop, int) and completion.stop_logprob is not None
                tokens.append(completion.stop)
                logps.append(completion.stop_logprob)
            seed = requests[number // samples].sampling.seed + completion.sample * _SAMPLE_SEED
            arrays = np.array(tokens, np.int64), np.array(logps, np.float32)
            text = self.reader.decode(completion.tokens)
            place = question.position, question.source, question.sequence, question.ids
            made.append(Rollout(*place, *arrays, finished, seed, text))
        return made

    def _reward(
        self, questions: Sequence[PromptRequest], made: Sequence[Rollout], samples: int, step: int
    ) -> dict[str, float]:
        """Adds the rewards to the samples; returns what the functions log."""
        graded = []
        for number, sample in enumerate(made):
            prompt, ids = questions[number // samples].prompt, sample.tokens.tolist()
            place = prompt.columns, sample.finished, prompt.place
            text = last_answer(self.reader, sample) if self.player else sample.text
            graded.append(RewardSample(prompt.content, text, ids, *place))
        scores = score_samples(self.rewards, graded, step)
        for number, sample in enumerate(made):
            sample.reward = scores.totals[number]
            parts = {name: values[number] for name, values in scores.parts.items()}
            sample.rewards = {name: math.nan if value is None else value for name, value in parts.items()}
            if self.player is not None:
                earned = math.fsum(sample.turn_rewards)
                sample.reward = earned + (0.0 if math.isnan(sample.reward) else sample.reward)
                sample.rewards[ENVIRONMENT] = earned
        return scores.extras.metrics
