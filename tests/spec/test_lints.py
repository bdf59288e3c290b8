"""Every rule meets one bad spec and says so with a number; it is quiet about the same spec mended, or silenced."""

import copy
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bessemer.spec.lints import RULES, lint_spec
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.stages import has_stages, load_chain

ROOT = Path(__file__).resolve().parents[2]
GOOD: dict[str, Any] = {"model": "125M", "data": {"sources": {"mine": "nowhere/"}}}
WEB = {"sources": {"fineweb": "nowhere/"}}


def spec_with(changes: dict[str, Any]) -> RunSpec:
    """GOOD with dotted keys set."""
    data = copy.deepcopy(GOOD)
    for key, value in changes.items():
        *sections, last = key.split(".")
        target = data
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = copy.deepcopy(value)
    return RunSpec.model_validate(data)


# rule -> (a spec that makes the mistake, the change that mends it)
BAD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp16_on_new_hardware": ({"precision": "fp16"}, {"precision": "bf16"}),
    "no_warmup": ({"schedule.warmup": 0}, {"schedule.warmup": "2%"}),
    "warmup_is_the_run": ({"schedule.warmup": 30, "budget.steps": 20}, {"schedule.warmup": 19}),
    "rate_of_a_smaller_model": ({"model": "70B", "optimizer.lr": 3e-4}, {"optimizer.lr": 1.5e-4}),
    "lion_at_adams_rate": ({"model": "1B", "optimizer.name": "lion", "optimizer.lr": 4e-4}, {"optimizer.lr": 8e-5}),
    "continued_at_the_peak": ({"model": "8B", "start_from": "x", "optimizer.lr": 3e-4}, {"optimizer.lr": 5e-5}),
    "batch_too_small": ({"model": "70B", "budget.batch": "256K"}, {"budget.batch": "4M"}),
    "nobody_watches": ({"guard.enabled": False}, {"guard.enabled": True}),
    "no_clipping": ({"optimizer.clip": 1e6}, {"optimizer.clip": 1.0}),
    "no_dedup": ({"data": WEB}, {"data.clean": ["dedup_minhash"]}),
    "contaminated_evaluation": (
        {"data": {"sources": {"tasks": "data/gsm8k/test.jsonl"}}},
        {"data": {"sources": {"tasks": "data/gsm8k/train.jsonl"}}},
    ),
    "no_validation": ({"data.validation": 0.0}, {"data.validation": "1%"}),
    "tokenizer_not_audited": (
        {"tokenizer.path": "t.json", "data": {"sources": {"multilingual": "x/"}}},
        {"tokenizer": {"vocab": "32K"}},
    ),
    "vocabulary_outweighs_the_model": ({"model": "10M", "tokenizer.vocab": "128K"}, {"tokenizer.vocab": "4K"}),
    "too_many_epochs": ({"budget.epochs": 20.0}, {"budget.epochs": 4.0}),
    "too_few_tokens": ({"model": "1B", "budget.tokens": "500M"}, {"model": "60M"}),
    "rotary_base_too_small": ({"model": "7B", "data.context": 32768}, {"data.context": 4096}),
    "decay_in_the_gradient": ({"optimizer.name": "adam", "optimizer.weight_decay": 0.1}, {"optimizer.name": "adamw"}),
    "sgd_on_a_transformer": ({"optimizer.name": "sgd"}, {"optimizer.name": "adamw"}),
    "slow_second_moment": ({"model": "8B", "optimizer.betas": [0.9, 0.999]}, {"optimizer.betas": [0.9, 0.95]}),
    "loss_scale_without_fp16": ({"precision": "bf16", "loss_scale": 1024.0}, {"loss_scale": "dynamic"}),
    "hasty_stop": ({"budget.stop.patience": 1}, {"budget.stop.patience": 5}),
    "rare_saves": ({"checkpoint.every": "15h"}, {"checkpoint.every": "1h"}),
    "sft_from_scratch": ({"objective": "sft"}, {"start_from": "runs/base/checkpoints/step-00001000.a1"}),
}


def rules(spec: RunSpec, **more: Any) -> set[str]:
    return {found.rule for found in lint_spec(spec, **more)}


def test_every_rule_has_its_bad_spec() -> None:
    assert set(BAD) == set(RULES)


@pytest.mark.parametrize("rule", BAD)
def test_rule(rule: str) -> None:
    bad, mended = BAD[rule]
    said = [found for found in lint_spec(spec_with(bad)) if found.rule == rule]
    assert len(said) == 1
    assert re.search(r"\d", said[0].message) and ": " in said[0].message and "\n" not in said[0].message
    assert rule not in rules(spec_with(bad | mended))
    assert rule not in rules(spec_with(bad | {"lints": {"silence": [rule]}}))


def test_a_plain_spec_is_fine() -> None:
    assert rules(spec_with({})) == set()


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_are_fine(recipe: Path) -> None:
    specs = [stage.spec for stage in load_chain(recipe).stages] if has_stages(recipe) else [load_spec(recipe)]
    assert [line for spec in specs for line in lint_spec(spec, folder=ROOT)] == []


def test_published_models_are_fine() -> None:
    """What Llama 2, Llama 3 and GPT-3 were trained with."""
    for model, lr, batch in (("7B", 3e-4, "4M"), ("70B", 1.5e-4, "4M"), ("8B", 3e-4, "8M"), ("125M", 6e-4, "500K")):
        changes = {"model": model, "optimizer.lr": lr, "budget.batch": batch, "data.context": 4096}
        assert rules(spec_with(changes)) == set()


def test_fp16_is_right_where_there_is_nothing_else() -> None:
    assert rules(spec_with({"precision": "fp16"}), gpu="Tesla V100-SXM2-32GB") == set()
    assert "NVIDIA H100" in lint_spec(spec_with({"precision": "fp16"}), gpu="NVIDIA H100")[0].message


@pytest.mark.parametrize("packed", [False, True])
def test_repeated_rows_are_counted(tmp_path: Path, packed: bool) -> None:
    texts = [f"document {i % 60}" for i in range(100)] + ["not json"]
    rows = "\n".join([json.dumps({"text": text}) for text in texts[:-1]] + texts[-1:])
    folder = tmp_path / "mine"
    folder.mkdir()
    if packed:
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    else:
        (folder / "a.jsonl").write_text(rows)
    spec = spec_with({"data": {"sources": {"mine": "mine"}}})
    found = lint_spec(spec, folder=tmp_path)
    assert [one.rule for one in found] == ["no_dedup"] and "40% of its first 100 rows" in found[0].message
    mended = spec_with({"data": {"sources": {"mine": "mine"}, "clean": ["dedup_exact"]}})
    assert lint_spec(mended, folder=tmp_path) == []


def test_large_runs_want_dedup_and_decontamination() -> None:
    large = {"model": "8B", "budget.tokens": "200B", "data": WEB}
    assert rules(spec_with(large)) == {"no_dedup", "contaminated_evaluation"}
    assert rules(spec_with({"model": "1B", "budget.tokens": "20B"})) == {"no_dedup"}


def test_an_unknown_rule_is_told() -> None:
    found = lint_spec(spec_with({"lints": {"silence": ["no_warm_up"]}}))
    assert [one.rule for one in found] == ["unknown_rule"] and "no_warmup" in found[0].message
