"""lm-eval's tasks on our models, through its own API, without its changes to global state.

`simple_evaluate` reseeds every global generator, so `evaluate` is called below it; few-shot examples are drawn with a
seed per task, as it would. Tasks come from files (YAML), from its built-in definitions, or from the named suite.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bessemer.errors import UserError
from bessemer.evaluate.language_model import LanguageModel
from bessemer.evaluate.results import TaskResult, make_hash, plain_json

FEWSHOT_SEED = 1234  # lm-eval's
MISSING = "lm-eval's tasks need the extra `evaluate`: pip install 'bessemer[evaluate]'"


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Python's, numpy's and torch's global generators are afterwards what they were before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if devices:
            torch.cuda.set_rng_state_all(devices)


def make_lm(model: LanguageModel) -> Any:
    """The model as lm-eval's `TemplateLM`."""
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError:
        raise UserError(MISSING) from None

    class NativeLM(TemplateLM):  # type: ignore[misc]
        """Each rank shows lm-eval a world of one, and divides the work below it."""

        @property
        def eot_token_id(self) -> int:
            return model.loaded.tokenizer.eos_id

        @property
        def prefix_token_id(self) -> int:
            return model.loaded.format.start

        @property
        def tokenizer_name(self) -> str:
            return model.loaded.tokenizer.fingerprint

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return model.loaded.template

        def apply_chat_template(
            self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return model.chat_text(chat_history, add_generation_prompt)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return model.encode([string], add_special_tokens is not False)[0].tolist()

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return [(each.logp, each.greedy) for each in model.score_pairs([request.args for request in requests])]

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            scores = model.scorer.score([request[1:] for request in requests], model.report)
            return [(each.logp, each.greedy) for each in scores]

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            return model.score_texts([request.args[0] for request in requests])

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return model.answer([request.args for request in requests])

    return NativeLM()


def load_tasks(names: Sequence[str], folders: Sequence[Path] = (), shots: int | None = None,
               seed: int = FEWSHOT_SEED) -> dict[str, Any]:  # fmt: skip
    """Tasks by name from folders of YAML files, or built-in ones if no folder is given (half a minute: it reads all
    14,000 definitions)."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError(MISSING) from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=[str(folder) for folder in folders] or None, include_defaults=not folders)
    known = set(manager.all_tasks) | set(manager.all_groups) | set(manager.all_tags)
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--tasks {unknown[0]}: lm-eval has no such task in {_places(folders)}")
    try:
        loaded = manager.load(list(names))
    except Exception as error:  # of datasets, or of a task's own code
        fix = "correct the file, or give the data with --data"
        raise UserError(f"--tasks {', '.join(names)}: cannot be loaded ({_first_line(error)}): {fix}") from None
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if shots is not None and own != 0:  # 0 in a definition: its prompt holds the examples already
            task.set_config(key="num_fewshot", value=shots)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=seed)
    return dict(loaded)


def run_harness(
    model: LanguageModel, loaded: Mapping[str, Any], limit: int | None = None
) -> tuple[list[TaskResult], dict[str, Any]]:
    """The scores per question of each task and metric, and lm-eval's own result."""
    from lm_eval.evaluator import evaluate

    # Some versions return nothing where LOCAL_RANK is not 0; every rank is a world of one here.
    local_rank = os.environ.pop("LOCAL_RANK", None)
    try:
        raw = evaluate(
            make_lm(model), dict(loaded), limit=limit, bootstrap_iters=0, log_samples=True,
            apply_chat_template=model.chat, fewshot_as_multiturn=model.chat,
        )  # fmt: skip
    finally:
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank
    assert raw is not None
    plain = plain_json(raw)
    results = []
    for name, task in loaded["tasks"].items():
        results += task_results(name, task.dump_config(), plain)
    return results, plain


def task_results(name: str, config: Mapping[str, Any], raw: Mapping[str, Any]) -> list[TaskResult]:
    """One result for each filter and metric of a task."""
    rows = sorted(raw["samples"][name], key=lambda row: (row["filter"], row["doc_id"]))
    results = []
    for filter_name in dict.fromkeys(row["filter"] for row in rows):
        own = [row for row in rows if row["filter"] == filter_name]
        for metric in own[0]["metrics"]:
            reported = raw["results"][name].get(f"{metric},{filter_name}")
            if not isinstance(reported, float | int):
                continue
            values = [row[metric] for row in own]
            per_question = all(isinstance(value, bool | int | float) for value in values)
            result = TaskResult(
                task=name, metric=metric, filter=filter_name, reported=float(reported),
                values=[float(value) for value in values] if per_question else [], shots=int(config["num_fewshot"]),
                template=make_hash([config.get(key) for key in _TEMPLATE]), prompt=_prompt_of(own[0]),
                ids=[str(row["doc_id"]) for row in own], higher_is_better=_higher(raw, name, metric),
            )  # fmt: skip
            if per_question and len(values) and abs(np.mean(result.values) - result.reported) > 1e-6:
                result.values = []  # not a mean: no interval can be computed from the questions
            result.samples = own
            results.append(result)
    return results


_TEMPLATE = (
    "doc_to_text", "doc_to_target", "doc_to_choice", "description", "target_delimiter", "fewshot_delimiter",
    "fewshot_config", "gen_prefix", "generation_kwargs", "num_fewshot",
)  # fmt: skip


def _prompt_of(row: Mapping[str, Any]) -> str:
    arguments = row["arguments"]
    first = arguments[0] if isinstance(arguments, list) else next(iter(arguments.values()))
    return str(first[0]) if isinstance(first, list | tuple) else str(first)


def _higher(raw: Mapping[str, Any], name: str, metric: str) -> bool:
    return bool(raw.get("higher_is_better", {}).get(name, {}).get(metric, True))


def _places(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders)) if folders else "its definitions; for a file of yours give its path"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
