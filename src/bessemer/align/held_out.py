"""Evaluation of a reinforcement-learning run: answers to held-out prompts, their rewards, and a file of samples.

The loss of such a validation is minus the mean reward, so that the best checkpoint is the one with the highest reward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from bessemer.align.policy import PolicyGradient
from bessemer.align.policy_losses import k3
from bessemer.align.prompts import PromptRows
from bessemer.align.rollout_maker import sample_row
from bessemer.align.rollout_stream import RolloutStream
from bessemer.align.rollouts import Rollout, Round, sample_numbers
from bessemer.align.sampler import Sampler
from bessemer.data.stream.order import MixturePhase, StreamOrder
from bessemer.errors import UserError
from bessemer.model.transformer import Decoder
from bessemer.parallel.shard import free_gathered_weights
from bessemer.parallel.world import World
from bessemer.spec.mixture import quantise
from bessemer.spec.rl import REFERENCE
from bessemer.storage import write_atomic
from bessemer.train.compile import compute_in
from bessemer.train.engine import PipelineRunner
from bessemer.train.evaluate import Evaluator, Validation
from bessemer.train.objective import Objective

SAMPLES_FOLDER = "samples"
_SHOWN = 200  # answers in a file of samples


class HeldOutRollouts(Evaluator):
    """Answers the same prompts at every evaluation, `prompts` of them: of each source in proportion to its size.
    `verified` are the parts of the reward that are 0 or 1, whose mean is an accuracy."""

    def __init__(
        self, held_out: Mapping[str, PromptRows], prompts: int, sampler: Sampler, stream: RolloutStream,
        verified: tuple[str, ...], micro_rows: int, precision: str, device: torch.device, world: World, folder: Path,
    ) -> None:  # fmt: skip
        super().__init__({}, sampler.context, 0, micro_rows, precision, device, world)
        self.rows = {name: rows for name, rows in held_out.items() if rows.count}
        self.sampler, self.stream, self.verified, self.folder = sampler, stream, verified, folder
        self.micro_rows, self.names = micro_rows, tuple(self.rows)
        total = sum(rows.count for rows in self.rows.values())
        positions: list[tuple[int, int]] = []
        for number, (name, rows) in enumerate(self.rows.items()):
            wanted = min(rows.count, max(1, prompts * rows.count // total))
            order = StreamOrder([MixturePhase(0, quantise({name: 1.0}))], {name: rows.count}, seed=0)
            positions += [(number, int(row)) for row in order.resolve(np.arange(wanted))[1]]
        self.chosen = np.array(positions, np.int64).reshape(-1, 2)
        # The forgetting guard watches sources by name.
        self.parts = dict.fromkeys(self.names)  # type: ignore[assignment]
        self.step = 0

    @property
    def available(self) -> bool:
        return bool(self.rows)

    def begin(self, step: int) -> None:
        self.step = step

    @torch.no_grad()
    def evaluate(
        self, model: Decoder, objective: Objective, pipeline: PipelineRunner | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Validation:  # fmt: skip
        """Answers all chosen prompts once. `on_batch` gets the finished answers and their total."""
        assert isinstance(objective, PolicyGradient)
        model.eval()
        try:
            samples = self.answer_held_out(model, on_batch)
            kl = self._reference_kl(model, objective, samples) if REFERENCE in objective.needs_models else {}
        finally:
            model.train()
            free_gathered_weights(model)
        if self.world.main:
            self._write(samples)
        return self._summarise_samples(samples, kl)

    def answer_held_out(self, model: Decoder, on_batch: Callable[[int, int], None] | None) -> list[Rollout]:
        """One answer to each chosen prompt, with its reward."""
        sources, sequences = self.chosen.T
        positions = np.arange(len(self.chosen))
        questions = self.sampler.questions(self.names, self.rows, positions, sources, sequences)
        heat = self.sampler.rl.held_out_temperature
        return self.sampler.answer(
            model, self.world, self.precision, questions, 1, heat, 0, "held out", on_batch
        ).samples

    def _summarise_samples(self, samples: list[Rollout], kl: dict[str, float]) -> Validation:
        numbers = sample_numbers(samples, 1)
        verified = [numbers[f"reward_{name}"] for name in self.verified]
        if len(verified) == 1:
            numbers["accuracy"] = verified[0]
        rewards = np.array([sample.reward for sample in samples])
        if np.isnan(rewards).all():
            raise UserError("rl.rewards: no reward applied to a held-out answer: each gave None")
        per_source = {}
        for number, name in enumerate(self.names):
            own = [sample.reward for sample in samples if sample.source == number and not np.isnan(sample.reward)]
            if own:
                per_source[name] = 0.0 - float(np.mean(own))
        loss = 0.0 - float(np.nanmean(rewards))  # not -0.0
        metrics = {name: round(value, 6) for name, value in (numbers | kl).items()}
        return Validation(loss, metrics, int(sum(sample.tokens.size for sample in samples)), per_source)

    def _reference_kl(self, model: Decoder, objective: PolicyGradient, samples: list[Rollout]) -> dict[str, float]:
        """The mean k3 of the answers' tokens to the reference."""
        made = Round(0, samples, 1, np.ones(len(samples), np.bool_))
        made.arrays = {name: np.zeros(int(made.starts[-1]), np.float32) for name in self.stream.arrays}
        world, total, count = self.world, 0.0, 0.0
        _, batches = self.stream.rows_of(made, range(len(samples)), self.micro_rows, world.dp_rank, world.layout.dp)
        for batch in batches:
            with compute_in(self.precision, self.device):
                inputs = objective.feed(batch, self.device)
                hidden_BTW = model(inputs.tokens_BT, inputs.attention_mask, **inputs.more)
                logps_BT = objective.logps(model, hidden_BTW, inputs)
                other_BTU = objective.other_hidden(REFERENCE, inputs)
                ref_BT = objective.logps(objective.models[REFERENCE], other_BTU, inputs)
            used_BT = inputs.weights_BT > 0
            total += float(k3(logps_BT, ref_BT).where(used_BT, 0.0).double().sum())
            count += float(used_BT.sum())
        copies = world.size // world.layout.dp
        total, count = (number / copies for number in world.sums([total, count]))
        return {"kl": total / max(1.0, count)}

    def _write(self, samples: list[Rollout]) -> None:
        """The first answers, for people; a failed write must not end the run."""
        rows = [sample_row(self.names, dict(self.rows), sample) for sample in samples[:_SHOWN]]
        lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        path = self.folder / SAMPLES_FOLDER / f"step-{self.step:08}.jsonl"
        write_atomic(path, lines.encode("utf-8", "replace"), parents=True, durable=False)
