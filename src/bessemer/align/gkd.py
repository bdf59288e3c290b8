"""On-policy distillation (GKD, Agarwal et al. 2024): the student answers prompts, and its next-token distribution at
each token of its own answers is compared with a frozen teacher's.

A share `distill.on_policy` of the rounds has sampled answers, the others those of the data; a hash of the seed and the
round's first step decides. Rounds are stored like those of reinforcement learning, so steps replay and resume exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from bessemer.align.held_out import HeldOutRollouts
from bessemer.align.policy import BROKEN_NATS, LEAST_NORM
from bessemer.align.prompts import Prompt, PromptRows
from bessemer.align.rollout_maker import RolloutMaker
from bessemer.align.rollout_stream import RolloutStream
from bessemer.align.rollouts import Rollout, Round, sample_numbers
from bessemer.align.sampler import Answers
from bessemer.data.stream.batches import Batch
from bessemer.data.stream.rows import Ints
from bessemer.data.tokenizer.chat import render
from bessemer.errors import UserError
from bessemer.guard.answers import JudgedAnswer
from bessemer.guard.judge import JudgedNumber
from bessemer.model.transformer import Decoder
from bessemer.parallel.shard import free_gathered_weights
from bessemer.spec.distill import DistillSpec
from bessemer.spec.rl import ADVANTAGES, GENERATOR
from bessemer.train.compile import compute_in
from bessemer.train.distill import Distill
from bessemer.train.engine import PipelineRunner
from bessemer.train.evaluate import Validation
from bessemer.train.job import Job
from bessemer.train.objective import Objective
from bessemer.train.objectives import ObjectiveBatch
from bessemer.train.trained import TextReader

ON_POLICY = "on_policy"


class Gkd(Distill):
    """The divergence at the tokens of answers. `clip_norm` is the limit of the gradient norm."""

    def __init__(self, spec: DistillSpec, clip_norm: float = 1.0, dropout_seed: int | None = None) -> None:
        super().__init__(spec, dropout_seed=dropout_seed)
        self.counts_inputs = True
        # Rounds of both kinds differ in their loss, which approaches zero.
        self.judged = JudgedNumber("loss", row=BROKEN_NATS, level=1.0, least_norm=LEAST_NORM * clip_norm, examine=False)

    def inputs(self, batch: Batch) -> ObjectiveBatch:
        read = (batch.tokens != 0) | (batch.targets != 0) | (batch.weights > 0)
        return ObjectiveBatch(
            batch.tokens, batch.targets, batch.weights, batch.documents, batch.tokens, in_place=True, read=read
        )


class GkdMaker(RolloutMaker):
    """Makes rounds of sampled answers, or of the data's. Rewards are logged; nothing is trained on them."""

    spec: DistillSpec = DistillSpec()
    answers: Mapping[str, list[Ints]] = {}

    def is_on_policy(self, first: int) -> bool:
        """Whether the student answers the prompts of the round that begins with a step."""
        drawn = xxhash.xxh3_64_intdigest(f"on policy {first}".encode(), seed=self.sampler.seed) / 2**64
        return drawn < self.spec.on_policy

    def _make(self, job: Job, stream: RolloutStream, first: int, positions: Any) -> Round:
        began_s, sampled = time.perf_counter(), self.is_on_policy(first)
        answers = self._ask(job, stream, first, positions, "") if sampled else self._of_data(stream, positions)
        samples = answers.samples
        used = np.array([s.tokens.size > 0 and (s.finished or not self.rl.mask_truncated) for s in samples])
        made = Round(first, samples, self.rl.samples, used, drawn=len(positions))
        made.arrays[GENERATOR] = np.concatenate([sample.logps for sample in samples])
        made.arrays[ADVANTAGES] = np.ones(int(made.starts[-1]), np.float32)  # marks a complete round
        times = {"generate_s": round(answers.generate_s, 4), "reward_s": round(answers.reward_s, 4)}
        made.numbers |= {ON_POLICY: float(sampled), **times, **answers.extras}
        job.recorder.progress.elapsed_s += time.perf_counter() - began_s
        return made

    def _of_data(self, stream: RolloutStream, positions: Ints) -> Answers:
        """The answers that the data has to the prompts at these positions."""
        questions = self.sampler.questions(stream.names, self.sources, positions, *stream.resolve(positions))
        samples = []
        for question in questions:
            tokens = self.answers[stream.names[question.source]][question.sequence]
            place = question.position, question.source, question.sequence, question.ids
            end = -1 if tokens[-1] in self.sampler.reader.stop_ids else None
            text = self.sampler.reader.decode(tokens[:end].tolist())
            samples.append(Rollout(*place, tokens, np.zeros(tokens.size, np.float32), True, 0, text))
        return Answers(samples)

    def _step_numbers(self, made: Round, stream: RolloutStream, step: int) -> dict[str, float]:
        share = len(made.samples) // made.group // self.rl.minibatches * made.group
        at = (step - made.first) % self.rl.minibatches * share
        numbers = sample_numbers(made.samples[at : at + share], made.group) | {ON_POLICY: made.numbers[ON_POLICY]}
        if not self.rl.rewards:
            numbers = {name: value for name, value in numbers.items() if "reward" not in name and "groups" not in name}
        if step == made.first:
            numbers |= made.numbers
        return {name: round(value, 6) for name, value in numbers.items() if np.isfinite(value)}

    def _scored_answers(self, stream: RolloutStream, made: Round) -> list[JudgedAnswer]:
        return []  # no reward can be hacked


class GkdHeldOut(HeldOutRollouts):
    """Answers held-out prompts and compares student and teacher on these answers: their divergence is the validation
    loss. Rewards are logged beside it."""

    @torch.no_grad()
    def evaluate(
        self, model: Decoder, objective: Objective, pipeline: PipelineRunner | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Validation:  # fmt: skip
        sums: dict[int, list[float]] = {}
        model.eval()
        try:
            samples = self.answer_held_out(model, on_batch)
            by_source = enumerate([s for s in samples if s.source == n] for n in range(len(self.names)))
            for number, own in by_source:
                if own:
                    sums[number] = self._compare(model, objective, own)
        finally:
            model.train()
            free_gathered_weights(model)
        if self.world.main:
            self._write(samples)
        losses = {self.names[number]: total / max(1.0, count) for number, (total, _, count) in sums.items()}
        total, nll, count = (sum(column) for column in zip(*sums.values(), strict=True))
        numbers = sample_numbers(samples, 1) | {"nll": nll / max(1.0, count), "divergence": total / max(1.0, count)}
        metrics = {name: round(value, 6) for name, value in numbers.items() if np.isfinite(value)}
        return Validation(total / max(1.0, count), metrics, int(count), losses)

    def _compare(self, model: Decoder, objective: Objective, samples: list[Rollout]) -> list[float]:
        """Sums of the loss and of the cross-entropy, and the number of tokens, over all ranks."""
        assert isinstance(objective, Gkd)
        made, world = Round(0, samples, 1, np.ones(len(samples), np.bool_)), self.world
        sums = [0.0, 0.0, 0.0]
        _, batches = self.stream.rows_of(made, range(len(samples)), self.micro_rows, world.dp_rank, world.layout.dp)
        for batch in batches:
            with compute_in(self.precision, self.device):
                inputs = objective.feed(batch, self.device)
                terms = objective.loss(model, inputs, 1.0)
            parts = (terms.nll, terms.metrics["nll"][0], torch.tensor(inputs.count))
            sums = [total + float(part) for total, part in zip(sums, parts, strict=True)]
        copies = world.size // world.layout.dp
        return [total / copies for total in world.sums(sums)]


@dataclass
class AnswerEncoder:
    """The ids of the data's answers, with the end that the student is to learn. `context` is of prompt and answer."""

    reader: TextReader
    context: int
    column: Mapping[str, str] = field(default_factory=dict)  # by source

    def encode(self, sources: Mapping[str, PromptRows]) -> dict[str, list[Ints]]:
        return {
            name: [self._encode(name, p, ids.size) for p, ids in zip(rows.prompts, rows.ids, strict=True)]
            for name, rows in sources.items()
        }

    def _encode(self, source: str, prompt: Prompt, prompt_tokens: int) -> Ints:
        text = prompt.columns.get(self.column[source])
        if not isinstance(text, str) or not text:
            raise UserError(f"{prompt.place}: {self.column[source]!r} holds no answer: write a text, or remove the row")
        messages = prompt.content if isinstance(prompt.content, list) else [{"role": "user", "content": prompt.content}]
        template = self.reader.template or "none"
        ids, mask = render([*messages, {"role": "assistant", "content": text}], self.reader.tokenizer, template, "last")
        tokens = ids[mask > 0].astype(np.int64)
        if self.reader.template is None and tokens[-1] not in self.reader.stop_ids:
            tokens = np.append(tokens, np.int64(self.reader.tokenizer.eos_id))
        if prompt_tokens + tokens.size > self.context:
            raise UserError(
                f"{prompt.place}: prompt and answer of {prompt_tokens + tokens.size:,} tokens exceed data.context "
                f"{self.context:,}: raise the context, or remove the row"
            )
        return tokens
