"""Questions of your own: a .jsonl file with a question in each row.

    {"prompt": "Which metal melts first?", "choices": ["iron", "tin"], "answer": 1}
    {"prompt": "12 * 12 =", "answer": "144", "metric": "numeric", "max_tokens": 8}

`answer` is the number of the right choice (from 0) or its text; without choices it is a text, or a list of them of
which the best counts, and `metric` is exact, contains, numeric, f1 or regex. Optional: `id`, `cluster` (questions that
share a text have the same), `stop`, and `shot: true` for examples, which are shown before questions and not asked.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.evaluate.language_model import LanguageModel
from bessemer.evaluate.question_metrics import METRICS
from bessemer.evaluate.results import TaskResult, make_hash
from bessemer.spec.load import read_text

KEYS = ("prompt", "choices", "answer", "metric", "max_tokens", "stop", "id", "cluster", "shot")
FORMATS = {
    "plain": "{prompt}",
    "question": "Question: {prompt}\nAnswer:",
    "letters": "Q: {prompt}\nA:",
    "line": "{prompt}\nAnswer:",
    "capitals": "QUESTION: {prompt}\nANSWER:",
    "problem": "Problem: {prompt}\nSolution:",
    "gap": "Question: {prompt}\n\nAnswer:",
    "brackets": "[Question] {prompt}\n[Answer]",
    "hashes": "### Question\n{prompt}\n### Answer\n",
    "dashes": "Question - {prompt}\nAnswer -",
}
MAX_TOKENS = 64
_STOP = ("\n",)


@dataclass(frozen=True)
class TaskQuestion:
    """One row. `answers` are texts; of multiple choice the right one is `choices[right]`."""

    place: str
    id: str
    prompt: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    right: int = -1
    metric: str = "exact"
    max_tokens: int = MAX_TOKENS
    stop: tuple[str, ...] = _STOP
    cluster: str | None = None
    shot: bool = False

    @property
    def text(self) -> str:
        """Prompt and right answer, for the search in training data."""
        return f"{self.prompt}\n{self.answers[0]}"


def read_questions(path: Path) -> list[TaskQuestion]:
    """All rows, checked."""
    questions: list[TaskQuestion] = []
    for number, line in enumerate(read_text(path, "a .jsonl file of questions").split("\n"), 1):
        if line.strip():
            questions.append(_question(f"{path}:{number}", line, len(questions)))
    if not any(not question.shot for question in questions):
        raise UserError(f'{path}: has no questions: write a row such as {{"prompt": ..., "answer": ...}}')
    if len(kinds := {(bool(q.choices), "" if q.choices else q.metric) for q in questions if not q.shot}) > 1:
        names = sorted("choices" if choices else metric for choices, metric in kinds)
        raise UserError(f"{path}: mixes {' and '.join(names)}: write a file for each, since each has its own score")
    return questions


def _question(place: str, line: str, number: int) -> TaskQuestion:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{place}: is not JSON ({error}); correct or delete the row") from None
    if not isinstance(row, dict):
        raise UserError(f"{place}: is a {type(row).__name__}, not an object; correct or delete the row")
    if unknown := [key for key in row if key not in KEYS]:
        raise UserError(f"{place}: unknown key {unknown[0]!r}; there are {', '.join(KEYS)}")
    if not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise UserError(f"{place}: has no prompt; write a text")
    if "answer" not in row:
        raise UserError(f"{place}: has no answer; write a text, or the number of the right choice")
    max_tokens = row.get("max_tokens", MAX_TOKENS)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise UserError(f"{place}: max_tokens is {max_tokens!r}; write a number of at least 1")
    stop = row.get("stop", list(_STOP))
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise UserError(f"{place}: stop is {stop!r}; write a text or a list of texts")
    cluster = row.get("cluster")
    question = TaskQuestion(
        place, str(row.get("id", number)), row["prompt"], (), max_tokens=max_tokens, stop=tuple(stop),
        cluster=None if cluster is None else str(cluster), shot=bool(row.get("shot")),
    )  # fmt: skip
    return _with_choices(question, row) if "choices" in row else _with_answers(question, row)


def _with_choices(question: TaskQuestion, row: dict[str, Any]) -> TaskQuestion:
    place, choices, answer = question.place, row["choices"], row["answer"]
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c.strip() for c in choices):
        raise UserError(f"{place}: choices is {choices!r}; write a list of at least two texts")
    if "metric" in row:
        raise UserError(f"{place}: a question with choices has no metric; remove one of them")
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        last = len(choices) - 1
        raise UserError(f"{place}: answer is {answer!r}; write the number of a choice, 0 to {last}, or its text")
    return replace(question, choices=tuple(choices), right=answer, answers=(choices[answer],))


def _with_answers(question: TaskQuestion, row: dict[str, Any]) -> TaskQuestion:
    place, answer, metric = question.place, row["answer"], row.get("metric", "exact")
    answers = answer if isinstance(answer, list) else [answer]
    if not answers or not all(isinstance(a, str | int | float) and not isinstance(a, bool) for a in answers):
        raise UserError(f"{place}: answer is {answer!r}; write a text or a list of texts")
    if metric not in METRICS:
        raise UserError(f"{place}: metric {metric!r}; write {', '.join(METRICS)}")
    texts = tuple(str(a) for a in answers)
    if metric == "regex":
        for text in texts:
            try:
                re.compile(text)
            except re.error as error:
                raise UserError(f"{place}: the pattern {text!r} is not valid ({error}); correct it") from None
    return replace(question, answers=texts, metric=metric)


def run_questions(
    model: LanguageModel, name: str, questions: Sequence[TaskQuestion], shots: int | None = None, seed: int = 0,
    limit: int | None = None, formats: int = 1,
) -> list[TaskResult]:  # fmt: skip
    """The scores of a file's questions. `formats` above 1 scores them with that many equivalent prompt formats and
    notes the range; the score is that of the first format, the prompt as written in the file."""
    examples = [question for question in questions if question.shot]
    scored = [question for question in questions if not question.shot][:limit]
    count = len(examples) if shots is None else shots
    if count > len(examples):
        raise UserError(
            f'--shots {count}: {name} has {len(examples)} rows with "shot": true; add more or ask for fewer'
        )
    chosen = random.Random(seed).sample(examples, count) if count < len(examples) else examples
    used = list(FORMATS)[: max(1, formats)]
    by_format = {key: _score(model, scored, chosen, FORMATS[key]) for key in used}
    results = []
    for metric, (values, rows) in by_format[used[0]].items():
        results.append(
            TaskResult(
                name, metric, values, [question.id for question in scored], sum(values) / len(values), count,
                make_hash([FORMATS[used[0]], model.chat, count, seed, [q.text for q in chosen], scored[0].stop]),
                rows[0]["arguments"][0][0], clusters=_clusters(scored), samples=rows,
                formats={key: sum(got := by_format[key][metric][0]) / len(got) for key in used} if formats > 1 else {},
            )
        )  # fmt: skip
    return results


def _clusters(questions: Sequence[TaskQuestion]) -> list[str] | None:
    if all(question.cluster is None for question in questions):
        return None
    return [question.cluster or f"{question.place} alone" for question in questions]


def _prompt(model: LanguageModel, question: TaskQuestion, examples: Sequence[TaskQuestion], form: str) -> str:
    if model.chat:
        turns: list[dict[str, str]] = []
        for shot in examples:
            turns += [{"role": "user", "content": form.format(prompt=shot.prompt)},
                      {"role": "assistant", "content": shot.answers[0]}]  # fmt: skip
        return model.chat_text([*turns, {"role": "user", "content": form.format(prompt=question.prompt)}])
    shown = [form.format(prompt=shot.prompt) for shot in examples]
    shown = [text + _gap(text) + shot.answers[0] for text, shot in zip(shown, examples, strict=True)]
    return "\n\n".join([*shown, form.format(prompt=question.prompt)])


def _gap(prompt: str) -> str:
    return "" if prompt[-1:].isspace() else " "


def _score(
    model: LanguageModel, scored: Sequence[TaskQuestion], examples: Sequence[TaskQuestion], form: str
) -> dict[str, tuple[list[float], list[dict[str, Any]]]]:
    """Values and logged samples by metric."""
    prompts = [_prompt(model, question, examples, form) for question in scored]
    if not scored[0].choices:
        settings = [{"until": list(q.stop), "max_gen_toks": q.max_tokens} for q in scored]
        answers = model.answer(list(zip(prompts, settings, strict=True)))
        metric = METRICS[scored[0].metric]
        values = [max(metric(text, each) for each in q.answers) for text, q in zip(answers, scored, strict=True)]
        rows = [
            _row(question, number, [[prompt, given]], [text], {question.metric: value})
            for number, (question, prompt, given, text, value) in enumerate(
                zip(scored, prompts, settings, answers, values, strict=True)
            )
        ]
        return {scored[0].metric: (values, rows)}
    gaps = ["" if model.chat else _gap(prompt) for prompt in prompts]
    pairs = [
        (prompt, gap + choice)
        for question, prompt, gap in zip(scored, prompts, gaps, strict=True) for choice in question.choices
    ]  # fmt: skip
    scores = iter(model.score_pairs(pairs))
    right, right_by_length, rows = [], [], []
    for number, (question, prompt, gap) in enumerate(zip(scored, prompts, gaps, strict=True)):
        likelihoods = [next(scores) for _ in question.choices]
        sums = [each.logp for each in likelihoods]
        means = [logp / len(choice.encode()) for logp, choice in zip(sums, question.choices, strict=True)]
        right.append(float(_best(sums) == question.right))
        right_by_length.append(float(_best(means) == question.right))
        arguments = [[prompt, gap + choice] for choice in question.choices]
        values_here = {"acc": right[-1], "acc_norm": right_by_length[-1]}
        rows.append(_row(question, number, arguments, [list(each) for each in likelihoods], values_here))
    return {"acc": (right, rows), "acc_norm": (right_by_length, rows)}


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _row(
    question: TaskQuestion, number: int, arguments: list[Any], responses: list[Any], values: dict[str, float]
) -> dict[str, Any]:
    """A logged sample in lm-eval's shape."""
    doc = {"prompt": question.prompt, "answers": list(question.answers), "choices": list(question.choices)}
    target = question.right if question.choices else question.answers[0]
    return {"doc_id": number, "doc": doc, "place": question.place, "target": target, "arguments": arguments,
            "filtered_resps": responses, "filter": "none", "metrics": list(values), **values}  # fmt: skip
