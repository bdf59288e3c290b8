"""Scores sampled answers: the parts of the reward by name, and their weighted sum.

A part is a number, or None where it does not apply to an answer; the sum leaves it out, as in TRL. Functions have TRL's
signature: `f(prompts, completions, completion_ids, **columns) -> list`, also `async def`. Prompts and completions are
texts, or lists of messages where the prompt is a conversation.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from bessemer.align.reward_model import RewardModel
from bessemer.align.rewards.judge import Judgement
from bessemer.align.rewards.verifiers import make_verifier
from bessemer.data.curate.scores.user_function import line_in, load_function
from bessemer.errors import UserError
from bessemer.spec.rewards import RewardSpec


@dataclass(frozen=True)
class Sample:
    """A sampled answer. `columns` are further columns of the prompt's row, `place` is its file:row."""

    prompt: str | Sequence[Mapping[str, Any]]
    completion: str
    completion_ids: Sequence[int] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = True
    place: str = ""

    def column(self, name: str, key: str) -> Any:
        """A value of the row; `key` is the setting that names the column."""
        if name not in self.columns:
            names = ", ".join(self.columns) or "no further columns"
            raise UserError(f"{key}: {self.place} has no column {name!r} (it has {names}); name one that every row has")
        return self.columns[name]


Part = list[float | None]
ScoreSamples = Callable[[Sequence[Sample]], Sequence[float | None]]


@dataclass
class Extras:
    """What functions log with TRL's `log_metric` and `log_extra`."""

    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Scores:
    """The parts of every sample by name, and their weighted sums: NaN where no part applies."""

    parts: dict[str, Part]
    totals: list[float]
    extras: Extras


@dataclass(frozen=True)
class Reward:
    """One part of the reward. `waits` if it spends its time waiting, so that others run at the same time."""

    name: str
    weight: float
    function: Callable[[Sequence[Sample], int, Extras], Any]
    waits: bool = False

    def score(self, samples: Sequence[Sample], step: int = 0, extras: Extras | None = None) -> Part:
        """A finite number or None for each sample; anything else is an error that names the sample's row."""
        if not samples:
            return []
        values = self.function(samples, step, Extras() if extras is None else extras)
        try:
            values = list(values)
        except TypeError:
            raise UserError(f"{_key(self.name)} gave {type(values).__name__}, not a list of numbers") from None
        if len(values) != len(samples):
            problem = f"{_key(self.name)} gave {len(values)} rewards for {len(samples)} answers"
            raise UserError(f"{problem}; give one for each, or None where it does not apply")
        return [self._number(value, sample) for value, sample in zip(values, samples, strict=True)]

    def _number(self, value: Any, sample: Sample) -> float | None:
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
        problem = f"{_key(self.name)} gave {value!r:.60} for an answer to {sample.place or 'a prompt'}"
        raise UserError(f"{problem}; give a finite number, or None where it does not apply")


def make_rewards(specs: Mapping[str, RewardSpec], device: str = "auto") -> list[Reward]:
    """The rewards of a spec. Files, functions and reward models are read now, the latter to the device: each process
    holds all of a reward model, which is in no checkpoint and not in the plan."""
    return [_make_reward(name, spec, device) for name, spec in specs.items()]


def score_samples(rewards: Sequence[Reward], samples: Sequence[Sample], step: int = 0) -> Scores:
    """All parts of all samples. Judges and `async` functions run while the others compute."""
    extras = Extras()
    waiting = [reward for reward in rewards if reward.waits]
    with ThreadPoolExecutor(max(1, len(waiting))) as pool:
        futures = {reward.name: pool.submit(reward.score, samples, step, extras) for reward in waiting}
        computed = {reward.name: reward.score(samples, step, extras) for reward in rewards if not reward.waits}
        parts = {r.name: futures[r.name].result() if r.waits else computed[r.name] for r in rewards}
    weights = {reward.name: reward.weight for reward in rewards}
    totals = []
    for i in range(len(samples)):
        terms = [weights[name] * value for name, part in parts.items() if (value := part[i]) is not None]
        totals.append(math.fsum(terms) if terms else math.nan)
    return Scores(parts, totals, extras)


def _make_reward(name: str, spec: RewardSpec, device: str) -> Reward:
    if spec.function is not None:
        function = load_function(spec.function, _key(name))
        waits = inspect.iscoroutinefunction(function)
        return Reward(name, spec.weight, partial(_call_user, name, spec.function, function), waits)
    if spec.judge is not None:
        return Reward(name, spec.weight, _plain(Judgement(spec.judge, _key(name)).score), waits=True)
    if spec.model is not None:
        return Reward(name, spec.weight, _plain(_load_model(spec.model, _key(name), device)))
    return Reward(name, spec.weight, _plain(make_verifier(spec, _key(name))))


def _load_model(path: str, key: str, device: str) -> ScoreSamples:
    try:
        model = RewardModel.load(path, device=device)
    except UserError as error:
        raise UserError(f"{key}.model: {error}") from None
    return lambda samples: model.score([s.prompt for s in samples], [s.completion for s in samples])


def _plain(score: ScoreSamples) -> Callable[[Sequence[Sample], int, Extras], Any]:
    return lambda samples, step, extras: score(samples)


def _key(name: str) -> str:
    return f"rl.rewards.{name}"


def _call_user(
    name: str, reference: str, function: Callable[..., Any], samples: Sequence[Sample], step: int, extras: Extras
) -> Any:
    arguments = _accepted(function, trl_arguments(samples, step, extras))
    try:
        result = function(**arguments)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    except UserError:
        raise
    except Exception as error:  # user code may raise anything
        where = f"{_key(name)}: {reference}{line_in(error, function)}"
        of = f"{len(samples)} answers from {samples[0].place or 'the first prompt'} on"
        raise UserError(f"{where} failed on {of}: {type(error).__name__}: {error}") from error


async def _awaited(result: Any) -> Any:
    return await result


def trl_arguments(samples: Sequence[Sample], step: int, extras: Extras) -> dict[str, Any]:
    """The keyword arguments that TRL passes to a reward function. A column that some rows lack is None there."""
    columns = dict.fromkeys(name for sample in samples for name in sample.columns)
    return {
        **{name: [sample.columns.get(name) for sample in samples] for name in columns},
        "prompts": [s.prompt if isinstance(s.prompt, str) else [dict(m) for m in s.prompt] for s in samples],
        "completions": [
            s.completion if isinstance(s.prompt, str) else [{"role": "assistant", "content": s.completion}]
            for s in samples
        ],
        "completion_ids": [list(sample.completion_ids) for sample in samples],
        "trainer_state": SimpleNamespace(global_step=step),
        "log_metric": extras.metrics.__setitem__,
        "log_extra": extras.columns.__setitem__,
    }


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the function has names for; all of them with **kwargs, which TRL requires."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}
