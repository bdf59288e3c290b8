"""Several scored models on the same questions: paired tests against the first, corrected for their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bessemer.errors import UserError
from bessemer.evaluate.results import Evaluation, TaskResult
from bessemer.evaluate.statistics import PairedTest, detectable_difference, holm
from bessemer.statistics import format_p

LEVEL = 0.05


def comparison(evaluations: Sequence[Evaluation], names: Sequence[str], best_by: str = "") -> dict[str, Any]:
    """For each metric that all models have on the same questions: scores, intervals, and differences to the first model
    with their tests. Refuses other prompts: their scores answer other questions."""
    first, *others = evaluations
    rows: list[dict[str, Any]] = []
    for result in first.results:
        matching = [_same(result, evaluation, name) for evaluation, name in zip(others, names[1:], strict=True)]
        compared = [each for each in matching if each is not None]
        if not result.values or len(compared) < len(others):
            continue
        tests = [PairedTest.of(result.values, other.values, result.groups) for other in compared]
        errors = [test.error for test in tests if test.error > 0]
        rows.append({
            "metric": result.name, "task": result.task, "higher_is_better": result.higher_is_better,
            "questions": len(result.ids), "scores": [each.reported for each in (result, *compared)],
            "intervals": [each.interval[0] for each in (result, *compared)],
            "tests": [test.to_json() for test in tests],
            "detectable_difference": detectable_difference(
                len(result.ids), max((error**2 * len(result.ids) for error in errors), default=0.0)
            ),
        })  # fmt: skip
    if not rows:
        raise UserError("compare: the results have no metric on the same questions: score the same tasks and --limit")
    tests_of_all = [test for row in rows for test in row["tests"]]
    for test, p in zip(tests_of_all, holm([test["p"] for test in tests_of_all]), strict=True):
        test["p_holm"], test["differs"] = p, p < LEVEL
    chosen = rows[0] if not best_by else _chosen(rows, best_by)
    order = max if chosen["higher_is_better"] else min
    number = order(range(len(names)), key=lambda i: chosen["scores"][i])
    best = {"model": names[number], "metric": chosen["metric"], "score": chosen["scores"][number]}
    return {"models": list(names), "rows": rows, "best": best}


def _same(result: TaskResult, evaluation: Evaluation, name: str) -> TaskResult | None:
    for other in evaluation.results:
        if (other.task, other.metric, other.filter) == (result.task, result.metric, result.filter):
            if other.ids != result.ids:
                raise UserError(f"{name}: {other.name} has other questions: score all models with the same --limit")
            if other.template != result.template:
                raise UserError(
                    f"{name}: {other.name} was asked with another prompt or other shots (template {other.template}, "
                    f"not {result.template}): score all models with the same settings"
                )
            return other
    return None


def _chosen(rows: Sequence[dict[str, Any]], name: str) -> dict[str, Any]:
    task, _, metric = name.partition(".")
    for row in rows:
        if row["task"] == task and metric in ("", row["metric"].split()[1]):
            return row
    raise UserError(f"--metric {name}: is not in all results; there are {', '.join(row['metric'] for row in rows)}")


def comparison_lines(facts: dict[str, Any]) -> list[list[str]]:
    """A table: a row for each model and metric."""
    lines = [["metric", "model", "score", "95 % interval", "difference", "p (Holm)", "verdict"]]
    for row in facts["rows"]:
        for number, name in enumerate(facts["models"]):
            low, high = row["intervals"][number]
            line = [
                row["metric"] if not number else "",
                name,
                f"{row['scores'][number]:.1%}",
                f"{low:.1%} to {high:.1%}",
            ]
            if not number:
                points = 100 * row["detectable_difference"]
                lines.append(
                    [*line, "", "", f"{row['questions']:,} questions show differences from {points:.1f} points"]
                )
                continue
            test = row["tests"][number - 1]
            change = f"{100 * test['difference']:+.1f} ({100 * test['low']:+.1f} to {100 * test['high']:+.1f})"
            better = (test["difference"] > 0) == row["higher_is_better"]
            verdict = ("better" if better else "worse") if test["differs"] else "no difference shown"
            lines.append([*line, change, format_p(test["p_holm"]), f"{verdict} ({test['test']})"])
    return lines
