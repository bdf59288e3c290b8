"""Makes the round of rollouts that the next steps train on: samples, rewards, log-probabilities, values, advantages.

The loop calls `begin_round` before a round's first step, with the weights of that moment. A round that began before the
step at which a run is resumed is read from disk; one that begins there is made again, with the same seeds and weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bessemer.align import ahead
from bessemer.align.advantages import (
    best_and_worst,
    equal_groups,
    gae,
    group_advantages,
    overlong_penalty,
    reinforce_pp_advantages,
    rloo_advantages,
    token_rewards,
    whiten,
)
from bessemer.align.policy import PolicyGradient
from bessemer.align.policy_losses import KL_ESTIMATORS, KlController
from bessemer.align.prompts import PromptRows
from bessemer.align.rollout_stream import CurrentRounds, RolloutStream
from bessemer.align.rollouts import Floats, Rollout, Round, positions_key, sample_numbers
from bessemer.align.sampler import Answers, Sampler
from bessemer.errors import UserError
from bessemer.guard.answers import JudgedAnswer
from bessemer.parallel.shard import free_gathered_weights
from bessemer.parallel.world import World
from bessemer.spec.rl import ADVANTAGES, GENERATOR, OLD, ONLINE_DPO, REF, RETURNS, VALUES, RlSpec
from bessemer.train.compile import compute_in, use_tf32
from bessemer.train.engine import Engine
from bessemer.train.job import Job

FURTHER_DRAWS = 3  # rounds of further prompts with dynamic sampling
FURTHER_POSITIONS = 1 << 40  # where these begin: no stream gets there
WEIGHTS_STEP, OVERLONG = "weights_step", "overlong"  # a number of rounds sampled ahead; a part of the reward
SCALES = {"group_std": "group", "group": "none", "batch_std": "batch"}


@dataclass
class RolloutMaker:
    """Owns the current round of a run. `sources` are the prompts to train on."""

    objective: str
    rl: RlSpec
    sampler: Sampler
    sources: dict[str, PromptRows]
    rounds: CurrentRounds
    numbers_of_step: dict[int, dict[str, float]] = field(default_factory=dict)
    pending: ahead.PendingRound | None = None  # the next round, with `rl.ahead`

    def begin_round(self, job: Job, step: int) -> str | None:
        """Provides the round of a step. Returns why the run ends, if the KL limit is exceeded."""
        stream = job.data.stream
        assert isinstance(stream, RolloutStream)
        first, positions = stream.first_step(step), stream.round_positions(step)
        key = positions_key(positions)
        made = self._stored(job, first, key) if step > first else None
        if made is None or ADVANTAGES not in made.arrays:  # a round that was sampled ahead and not begun
            made = self._make(job, stream, first, positions)
            if job.world.main:
                later = self.rl.round_steps > 1 or self.rl.kl.target is not None  # a step that reads it again
                self.rounds.store.save(made, key, self._rows(stream, made), durable=later)
            if job.spec.guard.enabled:
                job.guard.detectors.round(self._scored_answers(stream, made))
        self.rounds.set(made, key)
        if self.rl.ahead and step == first:
            self._begin_ahead(job, stream, first)
        self.numbers_of_step = {
            number: self._step_numbers(made, stream, number) for number in range(first, first + self.rl.round_steps)
        }
        kl, limit = made.numbers.get("answer_kl"), self.rl.kl.limit
        if kl is not None and limit is not None and not kl <= limit:
            return f"rl.kl.limit: answers are {kl:.2f} nats from the reference, more than {limit:g}"
        return None

    def reserve(self, engine: Engine, world: World) -> None:
        """Builds the generator that a GPU keeps, so that its memory counts where a step's is measured."""
        generator, precision = self.sampler.generator, engine.plan.precision
        if world.device.type != "cuda":
            return
        generator.compiled = engine.is_compiled
        try:
            with use_tf32(precision), generator.provide(engine.model, world, precision, self.rl.slots):
                pass
        except torch.OutOfMemoryError:
            generator.give_up()
        finally:
            engine.model.train()

    def settle(self, job: Job) -> None:
        """Before a checkpoint: the samples of the next round are on disk."""
        if self.pending is None or (self.pending.local is None and self.pending.thread is None):
            return
        answers, _ = ahead.finish(job, self.sampler, self.pending, lambda: None)
        pending, self.pending = self.pending, None
        made = self._round(pending.first, answers, pending.weights_step, pending.questions)
        made.numbers |= {"generate_s": round(answers.generate_s, 4), "reward_s": round(answers.reward_s, 4)}
        made.numbers |= answers.extras
        if job.world.main:
            self.rounds.store.save(made, pending.key, [])

    def stop(self) -> None:
        """The run ends, or stops to be repaired by others."""
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None

    def _begin_ahead(self, job: Job, stream: RolloutStream, first: int) -> None:
        """Start with the samples of the next round, if there is one."""
        self.stop()
        following = first + self.rl.round_steps
        if following >= job.plan.total_steps:
            return
        positions = stream.round_positions(following)
        questions = self.sampler.questions(stream.names, self.sources, positions, *stream.resolve(positions))
        self.pending = ahead.PendingRound(following, positions_key(positions), first, len(questions))
        job.guard.phase_tracker.enter_phase("generate")
        ahead.begin(job, self.sampler, self.pending, questions)

    def _sampled_ahead(self, job: Job, first: int, key: str) -> tuple[Answers, float] | None:
        """The answers of a round that was sampled with the weights of the round before: from the thread, or from disk
        if the run was resumed in between. None: there are none of these prompts and weights."""
        pending = self.pending
        if pending is not None and (pending.first, pending.key) == (first, key):
            result = ahead.finish(job, self.sampler, pending, job.check_interrupt)
            self.pending = None
            return result
        stored = self._stored(job, first, key)
        if stored is None or stored.numbers.get(WEIGHTS_STEP) != first - self.rl.round_steps:
            return None
        for sample in stored.samples:
            if OVERLONG in sample.rewards:  # it is added again
                sample.reward -= sample.rewards.pop(OVERLONG)
        seconds = stored.numbers.get("generate_s", 0.0), stored.numbers.get("reward_s", 0.0)
        return Answers(stored.samples, generate_s=seconds[0], reward_s=seconds[1]), 0.0

    def _round(self, first: int, answers: Answers, weights_step: int, drawn: int) -> Round:
        """A round of answers, before anything is computed from them."""
        made = Round(first, answers.samples, self.rl.samples, np.ones(len(answers.samples), np.bool_), drawn=drawn)
        made.arrays[GENERATOR] = np.concatenate([sample.logps for sample in answers.samples])
        if self.rl.ahead:
            made.numbers[WEIGHTS_STEP] = float(weights_step)
        return made

    def begins_round(self, job: Job, step: int) -> bool:
        """Whether the round of a step has to be provided."""
        stream = job.data.stream
        assert isinstance(stream, RolloutStream)
        current, key = self.rounds.current, positions_key(stream.round_positions(step))
        return stream.first_step(step) == step or current is None or self.rounds.key != key

    def numbers(self, step: int) -> dict[str, float]:
        """What the record of a step says about its rollouts."""
        return self.numbers_of_step.get(step, {})

    def _stored(self, job: Job, first: int, key: str | None) -> Round | None:
        """The round on disk, which rank 0 reads for all."""
        made: Round | UserError | None = None
        if job.world.main:
            try:
                made = self.rounds.store.load(first, key)
            except UserError as error:
                made = error
        made = job.world.agree(made)
        if isinstance(made, UserError):
            raise made
        return made

    def _make(self, job: Job, stream: RolloutStream, first: int, positions: Any) -> Round:
        rl, began_s = self.rl, time.perf_counter()
        weights_step, drawn, waited_s = first, len(positions), 0.0
        sampled = self._sampled_ahead(job, first, positions_key(positions)) if self.rl.ahead else None
        if sampled is not None:
            (answers, waited_s), weights_step = sampled, first - rl.round_steps
        else:
            answers, drawn = self._sample(job, stream, first, positions)
        samples = answers.samples
        if all(np.isnan(sample.reward) for sample in samples):
            names = ", ".join(samples[0].rewards)
            raise UserError(
                f"rl.rewards: no reward ({names}) applied to any of the {len(samples)} answers: each gave None"
            )
        if rl.overlong.buffer is not None:
            lengths = torch.tensor([sample.tokens.size for sample in samples])
            penalties = rl.overlong.penalty * overlong_penalty(lengths, rl.max_tokens, rl.overlong.buffer)
            for sample, penalty in zip(samples, penalties.tolist(), strict=True):
                sample.reward += penalty
                sample.rewards[OVERLONG] = penalty
        used = np.array([
            sample.tokens.size > 0 and not np.isnan(sample.reward) and (sample.finished or not rl.mask_truncated)
            for sample in samples
        ])  # fmt: skip
        made = self._round(first, answers, weights_step, drawn)
        made.used = used
        if rl.ahead:
            made.numbers["wait_s"] = round(waited_s, 4)
        scored_s = time.perf_counter()
        made.arrays |= self._score(job, stream, made)
        made.numbers |= {
            "generate_s": round(answers.generate_s, 4), "sync_s": round(answers.sync_s, 4),
            "reward_s": round(answers.reward_s, 4),
            "score_s": round(time.perf_counter() - scored_s, 4), **answers.extras,
        }  # fmt: skip
        self._add_advantages(made, self._beta(job, first))
        job.recorder.progress.elapsed_s += time.perf_counter() - began_s
        return made

    def _sample(self, job: Job, stream: RolloutStream, first: int, positions: Any) -> tuple[Answers, int]:
        """Answers to the prompts at these positions, and how many prompts were sampled. With dynamic sampling, groups
        whose rewards are all equal are replaced as far as a limited number of further prompts has others."""
        answers, drawn = self._ask(job, stream, first, positions, ""), len(positions)
        if not self.rl.dynamic_sampling:
            return answers, drawn
        group = self.rl.samples
        groups = [answers.samples[at : at + group] for at in range(0, len(answers.samples), group)]
        useful = [each for each in groups if not _all_equal(each)]
        rest = [each for each in groups if _all_equal(each)]
        for attempt in range(FURTHER_DRAWS):
            if not (missing := len(positions) - len(useful)):
                break
            further = FURTHER_POSITIONS * (attempt + 1) + positions[:missing]
            more = self._ask(job, stream, first, further, f"further {attempt}")
            drawn += missing
            answers.generate_s += more.generate_s
            answers.sync_s += more.sync_s
            answers.reward_s += more.reward_s
            made = [more.samples[at : at + group] for at in range(0, len(more.samples), group)]
            useful += [each for each in made if not _all_equal(each)]
        chosen = [*useful, *rest][: len(positions)]
        answers.samples = [sample for each in chosen for sample in each]
        return answers, drawn

    def _ask(self, job: Job, stream: RolloutStream, first: int, positions: Any, salt: str) -> Answers:
        questions = self.sampler.questions(stream.names, self.sources, positions, *stream.resolve(positions))
        engine, recorder = job.engine, job.recorder
        if self.sampler.generator.kept is None:
            engine.release_memory()
        else:  # it takes no further memory, and the next step finds its own again
            engine.discard_gradients()
        job.guard.phase_tracker.enter_phase("generate")
        if job.guard.watchdog:
            job.guard.watchdog.beat(first - 1, long=True)

        def on_step(done: int, total: int) -> None:
            recorder.view.activity(f"sampling answers for step {first:,}", done, total)
            job.check_interrupt()

        try:
            with use_tf32(engine.plan.precision):
                return self.sampler.answer(
                    engine.model, job.world, engine.plan.precision, questions, self.rl.samples, self.rl.temperature,
                    first, salt, on_step,
                )  # fmt: skip
        finally:
            engine.model.train()

    def _score(self, job: Job, stream: RolloutStream, made: Round) -> dict[str, Floats]:
        """Log-probabilities of the run's model and of the reference, and the critic's values, for every answer token,
        as far as the round needs them. Each rank computes its share of the rows."""
        engine, world = job.engine, job.world
        objective = engine.objective
        assert isinstance(objective, PolicyGradient)
        names = objective.scored
        if not names:
            return {}
        job.guard.phase_tracker.enter_phase("score")
        numbers = list(range(len(made.samples)))
        rows, batches = stream.rows_of(made, numbers, engine.plan.micro_rows, world.dp_rank, world.layout.dp)
        local: dict[int, dict[str, Floats]] = {}
        engine.model.eval()
        try:
            with torch.no_grad(), use_tf32(engine.plan.precision):
                for batch, own in zip(batches, rows, strict=True):
                    with compute_in(engine.plan.precision, engine.device):
                        scored = objective.score(engine.model, objective.feed(batch, engine.device))
                    for name, values_BT in scored.items():
                        for number, values in stream.values_of(made, own, values_BT.float().cpu().numpy()):
                            local.setdefault(number, {})[name] = values
        finally:
            engine.model.train()
            free_gathered_weights(engine.model)
        by_sample = {number: values for each in world.gather(local) for number, values in each.items()}
        return {name: np.concatenate([by_sample[number][name] for number in numbers]) for name in names}

    def _add_advantages(self, made: Round, beta: float) -> None:
        """Advantages and, with a critic, returns; and the numbers of the KL penalty."""
        rl, (_, name, _) = self.rl, self.rl.resolved(self.objective)
        rewards_PG, mask_BT = made.rewards(), _padded(made, None)
        used_BT = mask_BT * torch.from_numpy(made.used)[:, None]
        penalty_BT = torch.zeros_like(mask_BT)
        if REF in made.arrays and OLD in made.arrays:
            made.numbers["answer_kl"] = float(((_padded(made, OLD) - _padded(made, REF)) * mask_BT).sum(1).mean())
        if rl.kl_in_reward(self.objective):
            estimate = KL_ESTIMATORS[rl.kl_estimator(self.objective)]
            penalty_BT = beta * estimate(_padded(made, OLD), _padded(made, REF)) * mask_BT
        if rl.kl.needs_reference:
            controller = KlController(beta, rl.kl.target, rl.kl.horizon)
            controller.update(made.numbers.get("answer_kl", 0.0), len(made.samples))
            made.numbers |= {"beta": beta, "next_beta": controller.beta}
        if name in ("global", "global_baseline"):
            advantages_BT = reinforce_pp_advantages(rewards_PG, used_BT, penalty_BT, baseline=name == "global_baseline")
        elif name == "gae":
            advantages_BT = self._with_critic(made, rewards_PG, mask_BT, used_BT, penalty_BT)
        else:
            penalized_PG = rewards_PG - penalty_BT.sum(1).view_as(rewards_PG)
            advantages_PG = self._group(made, name, penalized_PG)
            advantages_BT = advantages_PG.reshape(-1, 1) * mask_BT
        made.arrays[ADVANTAGES] = _flat(made, advantages_BT)

    def _group(self, made: Round, name: str, rewards_PG: Tensor) -> Tensor:
        """Advantages of answers, (P, G). For RAFT 1; which answers are imitated is in `made.used`."""
        if self.objective == "raft":
            known_PG = torch.nan_to_num(rewards_PG, nan=-torch.inf)
            best_PG = torch.argsort(known_PG, dim=1, descending=True, stable=True)
            chosen_PG = torch.zeros_like(rewards_PG, dtype=torch.bool)
            chosen_PG.scatter_(1, best_PG[:, : self.rl.raft.top], True)
            chosen_PG &= torch.isfinite(rewards_PG)
            if self.rl.raft.least is not None:
                chosen_PG &= rewards_PG >= self.rl.raft.least
            made.used &= chosen_PG.flatten().numpy()
            return torch.ones_like(rewards_PG)
        if self.objective == ONLINE_DPO:
            unused_PG = ~torch.from_numpy(made.used).view_as(rewards_PG)
            chosen_PG = best_and_worst(rewards_PG.masked_fill(unused_PG, torch.nan))
            made.used &= (chosen_PG != 0).flatten().numpy()
            return chosen_PG
        if name == "rloo":
            return rloo_advantages(rewards_PG)
        return group_advantages(rewards_PG, SCALES[name])  # type: ignore[arg-type]

    def _with_critic(
        self, made: Round, rewards_PG: Tensor, mask_BT: Tensor, used_BT: Tensor, penalty_BT: Tensor
    ) -> Tensor:
        """Generalised advantages. Answers without a loss (`used_BT` 0) do not enter the statistics."""
        ppo, values_BT = self.rl.ppo, _padded(made, VALUES)
        turns_BT = turn_rewards(made.samples, mask_BT)  # counted in the reward: moved to the ends of their turns
        rewards_BT = token_rewards(rewards_PG.flatten() - turns_BT.sum(1), mask_BT, penalty_BT) + turns_BT
        advantages_BT, returns_BT = gae(rewards_BT, values_BT, mask_BT, ppo.gamma, ppo.lam)
        made.arrays[RETURNS] = _flat(made, returns_BT)
        returns, values = returns_BT[used_BT > 0].numpy(), values_BT[used_BT > 0].numpy()
        spread = returns.var() if returns.size else 0.0
        made.numbers["explained_variance"] = float(1 - (returns - values).var() / spread) if spread else 0.0
        return whiten(advantages_BT, used_BT) if ppo.whiten else advantages_BT

    def _beta(self, job: Job, first: int) -> float:
        """The KL coefficient of a round; an adaptive one follows from the round before."""
        beta, before = self.rl.kl.beta, first - self.rl.round_steps
        if self.rl.kl.target is None or before < 0:
            return beta
        earlier = self.rounds.current
        if earlier is None or earlier.first != before:
            earlier = self._stored(job, before, None)
        return earlier.numbers.get("next_beta", beta) if earlier is not None else beta

    def _step_numbers(self, made: Round, stream: RolloutStream, step: int) -> dict[str, float]:
        """Numbers of a step's answers; those of the round are in its first step's record."""
        share = len(made.samples) // made.group // self.rl.minibatches * made.group
        at = (step - made.first) % self.rl.minibatches * share
        numbers = sample_numbers(made.samples[at : at + share], made.group)
        advantages = made.arrays[ADVANTAGES][made.starts[at] : made.starts[at + share]]
        numbers["advantage_mean"] = float(advantages.mean(dtype=np.float64)) if advantages.size else 0.0
        if step == made.first:
            numbers |= {name: value for name, value in made.numbers.items() if name != "next_beta"}
            if self.rl.dynamic_sampling:
                numbers["prompts_drawn"] = float(made.drawn)
        return {name: round(value, 6) for name, value in numbers.items()}

    def _scored_answers(self, stream: RolloutStream, made: Round) -> list[JudgedAnswer]:
        """The round as the guard reads it."""
        return [
            JudgedAnswer(
                number // made.group, self.sources[stream.names[sample.source]].prompts[sample.sequence].text,
                sample.text, int(sample.tokens.size), sample.reward,
            )
            for number, sample in enumerate(made.samples)
        ]  # fmt: skip

    def _rows(self, stream: RolloutStream, made: Round) -> list[dict[str, Any]]:
        """The samples for people who read the file."""
        return [
            sample_row(stream.names, self.sources, sample, bool(made.used[n])) for n, sample in enumerate(made.samples)
        ]


def turn_rewards(samples: Sequence[Rollout], mask_BT: Tensor) -> Tensor:
    """The rewards of an environment at the last tokens of the turns that they were given for."""
    rewards_BT = torch.zeros_like(mask_BT)
    for number, sample in enumerate(samples):
        if sample.turn_rewards:
            rewards_BT[number, sample.turn_ends] = torch.tensor(sample.turn_rewards, dtype=mask_BT.dtype)
    return rewards_BT


def sample_row(
    names: Sequence[str], sources: dict[str, PromptRows], sample: Rollout, used: bool = True
) -> dict[str, Any]:
    """One answer as a line of a .jsonl file."""
    prompt = sources[names[sample.source]].prompts[sample.sequence]
    return {
        "prompt": prompt.content, "answer": sample.text, "reward": _or_null(sample.reward),
        "rewards": {name: _or_null(value) for name, value in sample.rewards.items()},
        "tokens": int(sample.tokens.size), "finished": sample.finished, "used": used, "position": sample.position,
        "source": names[sample.source], "origin": prompt.place, "seed": sample.seed,
        **({"turn_rewards": sample.turn_rewards} if sample.turn_rewards else {}),
    }  # fmt: skip


def _or_null(number: float) -> float | None:
    """NaN is no JSON."""
    return None if np.isnan(number) else number


def _all_equal(group: Sequence[Rollout]) -> bool:
    return bool(equal_groups(torch.tensor([[sample.reward for sample in group]], dtype=torch.float64))[0])


def _padded(made: Round, name: str | None) -> Tensor:
    """(N, T) of a flat array, or the mask of the tokens that the model wrote, in float64."""
    lengths_N = torch.from_numpy(made.lengths)
    mask_BT = torch.arange(max(1, int(lengths_N.max()))) < lengths_N[:, None]
    if name is None:
        return torch.zeros(mask_BT.shape, dtype=torch.float64).masked_scatter(
            mask_BT, torch.from_numpy(made.learned).double()
        )
    return torch.zeros(mask_BT.shape, dtype=torch.float64).masked_scatter(
        mask_BT, torch.from_numpy(made.arrays[name]).double()
    )


def _flat(made: Round, values_BT: Tensor) -> Floats:
    """The inverse of `_padded`."""
    mask_BT = torch.arange(values_BT.shape[1]) < torch.from_numpy(made.lengths)[:, None]
    return values_BT[mask_BT].float().numpy()
