"""The tasks that people ask for by name, with lm-eval's own definitions on data files of a local folder.

Nothing is downloaded. `--data FOLDER` holds a folder for each task: a copy of the dataset's repository, or files named
by split, such as FOLDER/gsm8k/test.jsonl and FOLDER/mmlu/anatomy/dev.parquet. Code tasks run in the sandbox.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bessemer.errors import UserError
from bessemer.evaluate.harness import MISSING
from bessemer.evaluate.language_model import LanguageModel
from bessemer.evaluate.results import TaskResult, make_hash

DATA_VARIABLE = "BESSEMER_EVALUATION_DATA"
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
SPLITS = ("train", "validation", "dev", "test")
_ROLES = {"training_split": ("train",), "validation_split": ("validation",), "test_split": ("test",),
          "fewshot_split": ("dev", "train")}  # fmt: skip


@dataclass(frozen=True)
class SuiteTask:
    """`definitions` are files below lm_eval/tasks. `split` has the questions; with shots, the examples
    are in `examples` ("": the definition holds them)."""

    definitions: str
    repository: str
    shots: int
    split: str = "test"
    examples: str = ""
    extra: str = ""  # of pip


SUITE = {
    "mmlu": SuiteTask("mmlu/default/mmlu_*.yaml", "cais/mmlu", 5, examples="dev"),
    "hellaswag": SuiteTask("hellaswag/hellaswag.yaml", "Rowan/hellaswag", 0, split="validation"),
    "arc_easy": SuiteTask("arc/arc_easy.yaml", "allenai/ai2_arc", 0),
    "arc_challenge": SuiteTask("arc/arc_challenge.yaml", "allenai/ai2_arc", 0),
    "truthfulqa": SuiteTask("truthfulqa/truthfulqa_mc[12].yaml", "truthfulqa/truthful_qa", 0, split="validation"),
    "gsm8k": SuiteTask("gsm8k/gsm8k.yaml", "openai/gsm8k", 5, examples="train"),
    "math": SuiteTask("minerva_math/minerva_math_*.yaml", "EleutherAI/hendrycks_math", 4, extra="lm-eval[math]"),
    "bbh": SuiteTask("bbh/cot_fewshot/[a-z]*.yaml", "SaylorTwift/bbh", 3),
    "humaneval": SuiteTask("", "openai/openai_humaneval", 0),
    "mbpp": SuiteTask("", "google-research-datasets/mbpp", 3),
    "medqa": SuiteTask("medqa/medqa.yaml", "GBaker/MedQA-USMLE-4-options-hf", 0),
    "pubmedqa": SuiteTask("pubmedqa/pubmedqa.yaml", "bigbio/pubmed_qa", 0),
}
SUITES = {"standard": tuple(SUITE), "medical": ("medqa", "pubmedqa"), "code": ("humaneval", "mbpp"),
          "arc": ("arc_easy", "arc_challenge")}  # fmt: skip
CODE = ("humaneval", "mbpp")
_FOLDERS = {"arc_easy": "arc", "arc_challenge": "arc"}


def expand(names: Iterable[str]) -> list[str]:
    """Names of suites and of tasks as names of tasks."""
    named = [
        task for name in names for task in SUITES.get(name, ("arc_easy", "arc_challenge") if name == "arc" else (name,))
    ]
    return list(dict.fromkeys(named))


def data_folder(data: Path | None) -> Path:
    """--data, or the environment variable."""
    if not (place := data or os.environ.get(DATA_VARIABLE)):
        raise UserError(
            f"the suite's tasks need their data: --data FOLDER, or {DATA_VARIABLE}=FOLDER (docs/evaluate.md)"
        )
    return Path(os.path.expanduser(place))


def split_files(folder: Path, config: str | None, own_folder: bool = False) -> dict[str, list[str]]:
    """The data files of each split: in the folder of the configuration, if there is one or if it must have its own."""
    place = folder / config if config and (own_folder or (folder / config).is_dir()) else folder
    files: dict[str, list[str]] = {}
    for path in sorted(place.rglob("*")) if place.is_dir() else ():
        if path.suffix not in FORMATS or any(part.startswith(".") for part in path.relative_to(place).parts):
            continue
        words = re.split(r"[^a-z]+", "/".join(path.relative_to(place).with_suffix("").parts).lower())
        split = next((split for split in SPLITS if split in words), None)
        if split is None and "val" in words:
            split = "validation"
        if split is not None:
            files.setdefault(split, []).append(str(path))
    return files


def definition_files(task: SuiteTask) -> list[Path]:
    """The YAML files of lm-eval that define a task, without reading its other 14,000."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UserError(MISSING)
    return sorted((Path(spec.origin).parent / "tasks").glob(task.definitions))


def write_definitions(names: Sequence[str], data: Path, folder: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Definitions that read local files, written to `folder`: lm-eval's tasks by name of the suite, and a line for each
    task whose data is missing."""
    tasks: dict[str, list[str]] = {}
    missing: list[str] = []
    for name in names:
        task, place = SUITE[name], data / _FOLDERS.get(name, name)
        made, lacking = [], []
        texts = {path: path.read_text(encoding="utf-8") for path in definition_files(task)}
        configs = {yaml_key(text, "dataset_name") for text in texts.values()} - {None}
        for path, text in texts.items():
            task_name, config = yaml_key(text, "task"), yaml_key(text, "dataset_name")
            if task_name is None or yaml_key(text, "group"):
                continue
            files = split_files(place, config, len(configs) > 1 or name in _FOLDERS)
            needed = {task.split, *([task.examples] if task.examples else [])}
            if lack := needed - files.keys():
                lacking.append(f"{config or name}: {', '.join(sorted(lack))}")
                continue
            (folder / f"{task_name}.yaml").write_text(_definition(path, task_name, files), encoding="utf-8")
            made.append(task_name)
        if lacking:
            shown = "; ".join(lacking[:3]) + (f"; {len(lacking) - 3} more" if len(lacking) > 3 else "")
            missing.append(f"{name}: no data ({shown}): {how_to_get(name, place)}")
        else:
            tasks[name] = made
    return tasks, missing


def how_to_get(name: str, place: Path) -> str:
    task = SUITE[name]
    splits = ", ".join([task.split, *([task.examples] if task.examples else [])])
    return (
        f"put {task.repository} (splits {splits}; .jsonl, .parquet or .csv) into {place}, for example with "
        f"`hf download {task.repository} --repo-type dataset --local-dir {place}`"
    )


class _Loader(yaml.SafeLoader):
    """Reads definitions without running what their tags name."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def yaml_key(text: str, key: str) -> str | None:
    """A key of a task definition."""
    content = yaml.load(text, _Loader)
    value = content.get(key) if isinstance(content, dict) else None
    return None if value is None else str(value)


def definition_data(text: str) -> list[Path]:
    """The local data files that a task definition names."""
    content = yaml.load(text, _Loader)
    options = content.get("dataset_kwargs") if isinstance(content, dict) else None
    files = options.get("data_files") if isinstance(options, dict) else None
    parts = files.values() if isinstance(files, dict) else [files]
    names = [name for part in parts for name in (part if isinstance(part, list) else [part])]
    return [Path(name) for name in names if isinstance(name, str) and Path(name).is_file()]


def task_data(name: str, data: Path) -> list[Path]:
    """The data files of a task of the suite."""
    place = data / _FOLDERS.get(name, name)
    return sorted(path for path in place.rglob("*") if path.suffix in FORMATS and path.is_file())


def _definition(path: Path, name: str, files: Mapping[str, list[str]]) -> str:
    """A definition that includes the built-in one. Splits without files must not be named."""
    kind = FORMATS[Path(next(iter(files.values()))[0]).suffix]
    lines = {"include": str(path), "task": name, "dataset_path": kind, "dataset_name": None,
             "dataset_kwargs": {"data_files": dict(files)}}  # fmt: skip
    for role, splits in _ROLES.items():
        wanted = _inherited(path, role)
        if wanted is not None and wanted not in files:
            lines[role] = next((split for split in splits if split in files), None)
    return "\n".join(f"{key}: {json.dumps(value)}" for key, value in lines.items()) + "\n"


def _inherited(path: Path, key: str) -> str | None:
    """A key of a definition or of those that it includes."""
    text = path.read_text(encoding="utf-8")
    if (value := yaml_key(text, key)) is not None:
        return value
    include = yaml_key(text, "include")
    return None if include is None else _inherited(path.parent / include, key)


def pool(name: str, parts: Sequence[TaskResult]) -> list[TaskResult]:
    """The score of a task over its parts, in which each question counts the same."""
    pooled = []
    for metric, kind in dict.fromkeys((part.metric, part.filter) for part in parts):
        own = [part for part in parts if (part.metric, part.filter) == (metric, kind)]
        values = [value for part in own for value in part.values]
        if len(own) < 2 or not values:
            continue
        ids = [f"{part.task}/{id}" for part in own for id in part.ids]
        pooled.append(
            TaskResult(
                name, metric, values, ids, sum(values) / len(values), own[0].shots,
                make_hash([part.template for part in own]), own[0].prompt, kind,
                higher_is_better=own[0].higher_is_better, samples=[row for part in own for row in part.samples],
            )
        )  # fmt: skip
    return pooled


def run_code_suite(model: LanguageModel, name: str, place: Path, limit: int | None, shots: int | None) -> TaskResult:
    """pass@1 of greedy answers to HumanEval or MBPP, run in the sandbox."""
    from bessemer.evaluate.code_tasks import STOPS, code_sample, score_code

    rows = _code_rows(name, place)
    count = SUITE[name].shots if shots is None else shots
    examples = [row for row in rows if row.get("task_id") in (2, 3, 4)][:count] if name == "mbpp" else []
    numbered = name == "mbpp" and any(int(row["task_id"]) > 10 for row in rows)
    chosen = [row for row in rows if not numbered or 11 <= int(row["task_id"]) <= 510][:limit]
    if name == "mbpp":
        shown = "".join(f"{_mbpp_prompt(row)}{row['code']}\n[DONE]\n\n" for row in examples)
        prompts, stops = [shown + _mbpp_prompt(row) for row in chosen], ["[DONE]"]
    else:
        prompts, stops = [str(row["prompt"]) for row in chosen], list(STOPS)
    settings = {"until": stops, "max_gen_toks": 512, "do_sample": False}
    answers = model.answer([(prompt, settings) for prompt in prompts])
    samples = [code_sample(row, answer) for row, answer in zip(chosen, answers, strict=True)]
    values = [float(passed) for passed in score_code(samples)]
    logged = [
        {"doc_id": i, "doc": row, "arguments": [[prompt, settings]], "filtered_resps": [answer], "filter": "none",
         "metrics": ["pass@1"], "pass@1": value}
        for i, (row, prompt, answer, value) in enumerate(zip(chosen, prompts, answers, values, strict=True))
    ]  # fmt: skip
    return TaskResult(
        name, "pass@1", values, [str(row.get("task_id", i)) for i, row in enumerate(chosen)], sum(values) / len(values),
        len(examples), make_hash([name, stops, len(examples)]), prompts[0], samples=logged,
    )  # fmt: skip


def _mbpp_prompt(row: Mapping[str, Any]) -> str:
    tests = "\n".join(row["test_list"])
    text = row.get("text") or row.get("prompt")
    return (
        f"You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n"
        f"{tests}\n[BEGIN]\n"
    )


def _code_rows(name: str, place: Path) -> list[dict[str, Any]]:
    place = place / "full" if (place / "full").is_dir() else place  # MBPP's configuration of all its rows
    paths = [path for path in sorted(place.rglob("*")) if path.suffix in (".jsonl", ".json", ".parquet")]
    paths = [path for path in paths if not any(part.startswith(".") for part in path.relative_to(place).parts)]
    if not paths:
        raise UserError(f"{name}: no data: {how_to_get(name, place)}")
    rows: list[dict[str, Any]] = []
    for path in paths:
        if path.suffix == ".parquet":
            import pyarrow.parquet as pq

            rows += pq.read_table(path).to_pylist()
        else:
            rows += [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return rows
