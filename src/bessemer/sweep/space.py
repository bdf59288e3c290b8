"""The values of a sweep: from the ranges of its spec to Optuna's distributions, and from a draw to settings.

The draw of a trial is a pure function of the sweep's section and the results of earlier trials: the sampler is built
for each trial and seeded by its number, so that a sweep that was killed draws what it would have drawn.
"""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bessemer.errors import UserError
from bessemer.spec.load import accepts, yaml_text
from bessemer.spec.sweep import ParameterSpec, SweepSpec

TPE_STARTUP = 10  # random trials before TPE, Optuna's default; at most half of the trials
Values = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """What a finished trial tells the sampler. Without a value it diverged."""

    values: Values
    value: float | None


def import_optuna() -> Any:
    """The package, quiet. UserError if it is missing."""
    try:
        import optuna
    except ImportError:
        raise UserError("bessemer sweep needs Optuna: pip install 'bessemer[sweep]'") from None
    optuna.logging.set_verbosity(logging.ERROR)
    return optuna


def is_integer(key: str, parameter: ParameterSpec) -> bool:
    """Whether a range is one of whole numbers: the key refuses a number between them."""
    assert parameter.min is not None
    lowest = math.floor(parameter.min)
    return accepts(key, lowest) and not accepts(key, lowest + 0.5)


def distribution(key: str, parameter: ParameterSpec) -> Any:
    """The parameter as Optuna describes it. Values in a list are chosen by their YAML text."""
    kinds = import_optuna().distributions
    if parameter.values is not None:
        return kinds.CategoricalDistribution([yaml_text(value) for value in parameter.values])
    assert parameter.min is not None and parameter.max is not None
    if is_integer(key, parameter):
        return kinds.IntDistribution(math.ceil(parameter.min), math.floor(parameter.max), log=parameter.log)
    return kinds.FloatDistribution(float(parameter.min), float(parameter.max), log=parameter.log)


def grid(sweep: SweepSpec) -> list[Values]:
    """Every combination, the last key varying fastest."""
    axes = [_axis(key, parameter) for key, parameter in sweep.parameters.items()]
    return [dict(zip(sweep.parameters, chosen, strict=True)) for chosen in itertools.product(*axes)]


def _axis(key: str, parameter: ParameterSpec) -> list[Any]:
    if parameter.values is not None:
        return [yaml_text(value) for value in parameter.values]
    assert parameter.min is not None and parameter.max is not None and parameter.points is not None
    shares = [i / (parameter.points - 1) for i in range(parameter.points)]
    low, high = float(parameter.min), float(parameter.max)
    numbers = [low * (high / low) ** s if parameter.log else low + s * (high - low) for s in shares]
    rounded = [float(f"{number:.6g}") for number in numbers]
    return list(dict.fromkeys(round(number) for number in rounded)) if is_integer(key, parameter) else rounded


def count_trials(sweep: SweepSpec) -> int:
    """Configurations that the sweep tries."""
    if sweep.strategy == "grid":
        return min(len(grid(sweep)), sweep.trials or 10**9)
    return sweep.count


def draw(sweep: SweepSpec, number: int, results: Sequence[Result]) -> Values:
    """The values of a trial, from those of earlier ones and their results."""
    if sweep.strategy == "grid":
        return grid(sweep)[number]
    optuna = import_optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multivariate TPE is marked as experimental
        study = fill_study(sweep, results)
        seed = (1_000_003 * sweep.seed + number) % 2**32
        if sweep.strategy == "tpe":
            startup = min(TPE_STARTUP, (count_trials(sweep) + 1) // 2)
            study.sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=startup)
        else:
            study.sampler = optuna.samplers.RandomSampler(seed=seed)
        return dict(study.ask(_distributions(sweep)).params)


def _distributions(sweep: SweepSpec) -> dict[str, Any]:
    return {key: distribution(key, parameter) for key, parameter in sweep.parameters.items()}


def fill_study(sweep: SweepSpec, results: Sequence[Result]) -> Any:
    """A study in memory that holds these results. A trial that diverged counts as worse than all others."""
    optuna = import_optuna()
    study, kinds = optuna.create_study(direction=sweep.goal), _distributions(sweep)
    states = optuna.trial.TrialState
    for result in results:
        state = states.PRUNED if result.value is None else states.COMPLETE
        study.add_trial(
            optuna.trial.create_trial(state=state, value=result.value, params=result.values, distributions=kinds)
        )
    return study


def importance(sweep: SweepSpec, results: Sequence[Result]) -> dict[str, float]:
    """The share of each key in what separates the better half of the trials from the rest (PED-ANOVA), largest first.
    Empty with fewer than 4 results, or if there is nothing to tell apart."""
    finished = [result for result in results if result.value is not None]
    if len(finished) < 4 or len({result.value for result in finished}) < 2 or len(sweep.parameters) < 2:
        return {}
    optuna = import_optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.5)
        shares = optuna.importance.get_param_importances(fill_study(sweep, finished), evaluator=evaluator)
    return {key: float(share) for key, share in shares.items()}


def at_the_edge(sweep: SweepSpec, values: Values) -> list[str]:
    """Keys whose value is within 5 % of an end of its range: the best may be outside."""
    edges = []
    for key, parameter in sweep.parameters.items():
        if parameter.values is not None:
            numbers = [value for value in parameter.values if isinstance(value, (int, float))]
            ends = {yaml_text(end(numbers)) for end in (min, max)} if len(numbers) == len(parameter.values) > 2 else ()
            if values[key] in ends:
                edges.append(key)
            continue
        assert parameter.min is not None and parameter.max is not None
        scale = math.log if parameter.log else float
        low, high, at = (scale(float(x)) for x in (parameter.min, parameter.max, values[key]))
        if min(at - low, high - at) < 0.05 * (high - low):
            edges.append(key)
    return edges


def to_settings(values: Values) -> list[str]:
    """The values as `--set` takes them."""
    return [f"{key}={value}" for key, value in values.items()]
