"""Fits the planner's time model to measured steps of other people's runs, and says how well it predicts runs that it
has not seen. Writes src/bessemer/plan/data/steptime.json.

What is fitted is physical and few: for each GPU type the share of its peak in products, of its bandwidth in their
operands and in element-wise passes, and its attention; for each framework what its host and its loss cost; for each
cluster the shares of links and network. Each has a prior (a data sheet's share, a count of passes, a measurement), and
a fit that strays from it pays. No row has a constant of its own. Beside the fit to all rows, others leave rows out: at
random, whole models, whole layouts, whole numbers of GPUs, all that share a width, a tensor degree and a micro-batch.
The worst error on what was left out is the planner's error bar. The model's form was chosen with all rows in sight.

    python benchmarks/planner_fit.py            print the accuracy of the constants that ship (make bench-planner)
    python benchmarks/planner_fit.py --fit      fit again, with cross-validation, and write them
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bessemer.plan.check import CheckCase, check, mean_absolute_error, read_rows
from bessemer.plan.cost_model.operators import Constants

HERE = Path(__file__).parent
CONSTANTS = HERE.parent / "src/bessemer/plan/data/steptime.json"
TABLES = {"vtrain_single": 0.06, "vtrain_multi": 0.07, "llmfoundry_mfu": 0.045}  # and the error to stay below
# A table's pull on the fit. vTrain's single-node times are sums of few profiled parts, so that its 720 rows say less.
WEIGHTS = {"vtrain_single": 0.35, "vtrain_multi": 2.0, "llmfoundry_mfu": 1.0}
PULL = 0.02  # residual of a constant one prior deviation away, as a relative error
SCALE = 0.03  # errors beyond this count less than by their square: some measured steps are plain outliers
MOST = 0.95  # that any share of a data sheet's rate may come to
FOLDS = 4

# What is fitted: constant -> (prior, deviation of its logarithm). The others of steptime.json stand there with their
# source.
PRIORS: dict[str, tuple[float, float]] = {
    "curves.A100.gemm": (0.80, 0.08),  # of 312 TFLOP/s: cuBLAS reaches 240 to 270
    "curves.A100.gemm_memory": (0.70, 0.4),
    "curves.A100.memory": (0.75, 0.15),  # 1.5 of 2.0 TB/s
    "curves.A100.unaligned": (0.30, 0.3),
    "curves.A100.batched": (0.35, 0.3),
    "curves.A100.triton": (0.32, 0.3),
    "curves.A100.narrow": (0.90, 0.1),
    "curves.A100.short": (150, 0.5),
    "curves.H100.gemm": (0.70, 0.1),
    "curves.H100.gemm_memory": (0.70, 0.4),
    "curves.H100.memory": (0.80, 0.15),
    "curves.H100.triton": (0.20, 0.4),
    "curves.H100.fp8": (1.5, 0.15),
    "habits.megatron.launch_s": (3.0e-3, 0.3),
    "habits.megatron.launch_tp_s": (3.0e-4, 0.7),
    "habits.megatron.head_passes": (10, 0.4),
    "habits.megatron.head_s": (1.0e-3, 0.7),
    "habits.megatron.optimizer_bytes": (30, 0.3),
    "habits.fsdp.autocast": (1.2, 0.1),
    "habits.fsdp.head_passes": (8, 0.3),
    "habits.fsdp.head_s": (1.0e-3, 0.7),
    "habits.fsdp.step_s": (5.0e-3, 0.7),
    "habits.fsdp.exposed": (0.25, 0.5),
    "shares.vtrain-node.link": (0.60, 0.3),
    "shares.vtrain-node.sync_s": (4.0e-5, 0.7),
    "shares.vtrain-512.link": (0.60, 0.3),
    "shares.vtrain-512.sync_s": (4.0e-5, 0.7),
    "shares.vtrain-512.network": (0.80, 0.2),
    "shares.mosaic-a100.link": (0.65, 0.3),
    "shares.mosaic-a100.network": (0.80, 0.2),
    "shares.mosaic-h100.link": (0.70, 0.3),
    "shares.mosaic-h100.network": (0.80, 0.2),
}


def cases() -> dict[str, list[CheckCase]]:
    return {name: read_rows(HERE / f"data/planner/{name}.csv") for name in TABLES}


def with_values(data: dict[str, Any], values: dict[str, float]) -> Constants:
    for key, value in values.items():
        table, name, part = key.split(".")
        data[table][name][part] = value
    return Constants.from_dict(data)


def _is_share(key: str) -> bool:
    return key.split(".")[-1] in ("gemm", "memory", "link", "network", "narrow")


def fit(rows: list[tuple[CheckCase, float]], data: dict[str, Any]) -> dict[str, float]:
    import numpy as np
    from scipy.optimize import least_squares

    start = np.array([math.log(prior) for prior, _ in PRIORS.values()])
    width = np.array([deviation for _, deviation in PRIORS.values()])
    data = json.loads(json.dumps(data))
    weights = np.array([weight for _, weight in rows])
    measured = np.array([case.measured_s for case, _ in rows])
    asked = [case for case, _ in rows]

    def residuals(point: Any) -> Any:
        known = with_values(data, dict(zip(PRIORS, np.exp(point).tolist(), strict=True)))
        times = np.array([one.predicted_s for one in check(asked, known)])
        return np.concatenate([weights * np.log(times / measured), PULL * (point - start) / width])

    # No link, memory or network gives more than its data sheet says.
    most = np.array([math.log(MOST) if _is_share(key) else math.inf for key in PRIORS])
    found = least_squares(
        residuals, start, bounds=(-math.inf, most), loss="soft_l1", f_scale=SCALE, xtol=1e-4, ftol=1e-4, max_nfev=30
    )
    return {key: float(f"{value:.4g}") for key, value in zip(PRIORS, np.exp(found.x), strict=True)}


# Which part of the rows a fold leaves out: what is named together is left out together.
def _model(case: CheckCase) -> object:
    return (case.setup.work.width, case.setup.work.depth)


def _layout(case: CheckCase) -> object:
    layout = case.setup.layout
    if case.kind == "megatron":
        return (layout.tp, layout.pp, layout.dp)
    return (case.setup.recompute, case.setup.context, case.cluster.gpu.name)


def _parts(case: CheckCase) -> object:
    """vTrain's single-node times are linear in what these name, as if one profile of it stood behind many rows."""
    if case.kind == "megatron":
        return (case.setup.work.width, case.setup.layout.tp, case.setup.micro_batch)
    return (case.setup.work.width, case.cluster.gpu.name)


def _gpus(case: CheckCase) -> object:
    return (case.cluster.count, case.cluster.gpu.name)


SCHEMES: dict[str, Callable[[CheckCase], object]] = {
    "random rows": lambda case: case.number, "models": _model, "layouts": _layout, "GPU counts": _gpus,
    "shared parts": _parts,
}  # fmt: skip


def folds(tables: dict[str, list[CheckCase]], scheme: str) -> list[set[tuple[str, int]]]:
    """Groups of rows, dealt to FOLDS so that each table's groups are spread evenly."""
    out: list[set[tuple[str, int]]] = [set() for _ in range(FOLDS)]
    for name, rows in tables.items():
        groups: dict[object, list[CheckCase]] = {}
        for case in rows:
            groups.setdefault(SCHEMES[scheme](case), []).append(case)
        order = sorted(groups, key=lambda key: zlib.crc32(repr(key).encode()))
        for place, key in enumerate(order):
            out[place % FOLDS] |= {(name, case.number) for case in groups[key]}
    return out


def held_out(task: tuple[str, int]) -> tuple[str, dict[str, list[tuple[int, float]]]]:
    """Errors on the rows of one fold by constants that were fitted to the others."""
    scheme, fold = task
    tables, data = cases(), json.loads(CONSTANTS.read_text())
    left = folds(tables, scheme)[fold]
    rows = [(case, WEIGHTS[name]) for name in tables for case in tables[name] if (name, case.number) not in left]
    known = with_values(json.loads(json.dumps(data)), fit(rows, data))
    found: dict[str, list[tuple[int, float]]] = {}
    for name, all_rows in tables.items():
        asked = [case for case in all_rows if (name, case.number) in left]
        found[name] = [(one.case.number, one.error) for one in check(asked, known)]
    return scheme, found


def cross_validate() -> dict[str, dict[str, list[tuple[int, float]]]]:
    tasks = [(scheme, fold) for scheme in SCHEMES for fold in range(FOLDS)]
    found: dict[str, dict[str, list[tuple[int, float]]]] = {scheme: {name: [] for name in TABLES} for scheme in SCHEMES}
    with multiprocessing.Pool(2) as pool:
        for scheme, errors in pool.imap(held_out, tasks):
            for name, values in errors.items():
                found[scheme][name] += values
            print(f"  {scheme}: one fold done", flush=True)
    return found


def mean(errors: list[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


def accuracy(known: Constants | None = None) -> dict[str, float]:
    return {name: mean_absolute_error(check(rows, known)) for name, rows in cases().items()}


def refit() -> None:
    tables, data = cases(), json.loads(CONSTANTS.read_text())
    values = fit([(case, WEIGHTS[name]) for name in tables for case in tables[name]], data)
    known = with_values(data, values)
    print("fitted to all rows:", {name: f"{error:.2%}" for name, error in accuracy(known).items()}, flush=True)
    found = cross_validate()
    table = {
        scheme: {name: mean([e for _, e in errors]) for name, errors in by.items()} for scheme, by in found.items()
    }
    data["held_out"] = {scheme: {name: round(e, 4) for name, e in by.items()} for scheme, by in table.items()}
    data["errors"] |= _error_bars(tables, found)
    data["fitted"] = {"date": datetime.date.today().isoformat(), "command": "python benchmarks/planner_fit.py --fit"}
    CONSTANTS.write_text(json.dumps(data, indent=1) + "\n")


def _error_bars(tables: dict[str, list[CheckCase]], found: dict[str, Any]) -> dict[str, Any]:
    """The worst way of leaving rows out, by kind of configuration."""
    kinds: dict[str, dict[str, list[float]]] = {}
    for scheme, by in found.items():
        for name, errors in by.items():
            rows = {case.number: case for case in tables[name]}
            for number, error in errors:
                case = rows[number]
                where = "several nodes" if case.cluster.nodes > 1 else "one node"
                kinds.setdefault(f"{case.kind}, {where}", {}).setdefault(scheme, []).append(error)
    out = {}
    for kind, schemes in sorted(kinds.items()):
        worst = max(schemes, key=lambda scheme: mean(schemes[scheme]))
        ranked = sorted(map(abs, schemes[worst]))
        out[kind] = {
            "mean_absolute_error": round(mean(schemes[worst]), 3),
            "p90": round(ranked[int(0.9 * (len(ranked) - 1))], 3),
            "of": f"{len(ranked)} measured runs ({kind}), {worst} left out of the fit",
        }
    return out


def report() -> None:
    data = json.loads(CONSTANTS.read_text())
    print(f"{'table':<18}{'rows':>6}{'error':>9}{'bound':>9}   left out of the fit: {', '.join(SCHEMES)}")
    for name, error in accuracy().items():
        left = "".join(f"{data['held_out'][scheme][name]:>9.2%}" for scheme in SCHEMES)
        print(f"{name:<18}{len(cases()[name]):>6}{error:>9.2%}{TABLES[name]:>9.2%}   {left}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fit", action="store_true", help="fit again and write the constants (some minutes)")
    if parser.parse_args().fit:
        refit()
    report()
