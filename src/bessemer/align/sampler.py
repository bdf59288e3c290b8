"""Samples answers with the weights of a run, on all its ranks, and adds their rewards.

Each data-parallel rank answers its share of the prompts with the embedded generator; then all ranks hold all answers,
in the order of the prompts. A draw depends on the seed of its prompt and on nothing else in the batch, so the answers
are the same on any number of ranks, as far as rounding is. The exchange sends every answer to every rank: about 12
bytes a token, 200 MB for 16,384 answers of 1,000 tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from bessemer.align.prompts import Prompt, PromptRows
from bessemer.align.resident import RoundGenerator
from bessemer.align.rewards.reward import Reward, score_samples
from bessemer.align.rewards.reward import Sample as RewardSample
from bessemer.align.rollouts import Rollout
from bessemer.errors import UserError
from bessemer.model.generate import Request, Sampling
from bessemer.model.transformer import Decoder
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


class Sampler:
    """Asks the model, decodes and rewards."""

    def __init__(self, reader: TextReader, rl: RlSpec, rewards: Sequence[Reward], context: int, seed: int) -> None:
        self.reader, self.rl, self.rewards, self.context, self.seed = reader, rl, rewards, context, seed
        self.generator = RoundGenerator(context, rl.slots)

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
        local = list(questions)[world.dp_rank :: world.layout.dp]
        began_s = time.perf_counter()
        made = self._generate(model, world, precision, local, samples, temperature, f"{step} {salt}", on_step)
        generated_s, error = time.perf_counter(), ""
        extras: dict[str, float] = {}
        try:
            extras = self._reward(local, made, samples, step)
        except UserError as failure:
            error = str(failure)
        except Exception as failure:
            if world.size == 1:
                raise
            error = f"rl.rewards: {type(failure).__name__} on rank {world.rank}: {failure}"  # the others wait for it
        rewarded_s = time.perf_counter()
        if error := next(filter(None, world.gather(error)), ""):
            raise UserError(error)
        by_rank = dict(world.gather((world.dp_rank, made)))  # ranks that share rows have the same
        merged: list[Rollout] = []
        for number in range(len(questions)):
            rank, at = number % world.layout.dp, number // world.layout.dp * samples
            merged += by_rank[rank][at : at + samples]
        logged = [each for each in world.gather(extras) if each]
        extras = {name: float(np.mean([each[name] for each in logged if name in each])) for name in (logged or [{}])[0]}
        sync_s = self.generator.sync_s
        return Answers(merged, generated_s - began_s, sync_s, rewarded_s - generated_s, extras)

    def _generate(
        self, model: Decoder, world: World, precision: str, questions: Sequence[PromptRequest], samples: int,
        temperature: float, salt: str, on_step: OnStep | None,
    ) -> list[Rollout]:  # fmt: skip
        rl = self.rl
        requests: list[Request] = []
        for question in questions:
            seed = xxhash.xxh3_64_intdigest(f"{salt} {question.position}".encode(), seed=self.seed) >> 2
            sampling = Sampling(temperature, rl.top_k, rl.top_p, seed) if temperature else Sampling(0.0, seed=seed)
            ids, stops = question.ids.tolist(), self.reader.stop_ids
            requests.append(Request(ids, rl.max_tokens, sampling, stops, (), samples, 0, True))
        with self.generator.provide(model, world, precision, len(requests) * samples) as generator:
            queued = [completion for request in requests for completion in generator.submit(request)]
            while generator.step():
                if on_step is not None:
                    on_step(sum(completion.reason is not None for completion in queued), len(queued))
        made = []
        for number, completion in enumerate(queued):
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
            graded.append(RewardSample(prompt.content, sample.text, ids, *place))
        scores = score_samples(self.rewards, graded, step)
        for number, sample in enumerate(made):
            sample.reward = scores.totals[number]
            parts = {name: values[number] for name, values in scores.parts.items()}
            sample.rewards = {name: math.nan if value is None else value for name, value in parts.items()}
        return scores.extras.metrics
