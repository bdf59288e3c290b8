"""Each named check at its edge: the last spec that passes, the first that does not, and a fix that works."""

import copy
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.spec.checks import CHECKS, check_spec
from bessemer.spec.schema import RunSpec

GOOD: dict[str, Any] = {"model": "10M", "data": {"sources": {"web": "data/", "code": "src/"}}}


def spec_with(**changes: Any) -> RunSpec:
    """GOOD with dotted keys set; `__` stands for the dot."""
    data = copy.deepcopy(GOOD)
    for key, value in changes.items():
        *sections, last = key.split("__")
        target = data
        for section in sections:
            target = target.setdefault(section, {})
        target[last] = value
    return RunSpec.model_validate(data)


def found(**changes: Any) -> dict[str, str]:
    return {".".join(map(str, path)): message for path, message in check_spec(spec_with(**changes))}


def test_nothing_is_wrong_with_a_plain_spec() -> None:
    assert found() == {}


def phase(start: int, **weights: float) -> dict[str, Any]:
    return {"start": start, "weights": weights}


def change(step: int, batch: int = 4096) -> dict[str, Any]:
    return {"from_step": step, "batch": batch}


STRETCHED = {"scaling": "yarn", "factor": 4.0, "original": 256}
PASSES: list[dict[str, Any]] = [
    {"budget__tokens": 5},
    {"budget__steps": 5},
    {"budget__steps": 51, "schedule__warmup": 50},
    {"budget__epochs": 0.5},
    {"model": {"width": 64, "layers": 1, "heads": 2}},
    {"model": {"width": 63, "layers": 1, "heads": 2, "head_dim": 32}},
    {"model": {"preset": "1M", "kv_heads": 4}},
    {"model": {"preset": "1M", "kv_heads": 1}},
    {"tokenizer__vocab": 257},
    {"tokenizer__path": "t.json"},
    {"data__context": 2},
    {"data__context": 1024, "budget__batch": 1024},
    {"data__context": 1024, "budget__batch_changes": [change(5, 1024)]},
    {"data__context": 1024, "budget__batch": 8192, "budget__micro_batch": 8},
    {"budget__batch_changes": [change(1), change(2)]},
    {"data__phases": [phase(1, web=1), phase(2, code=1, web=0)]},
    {"data__curriculum": {"by": "length"}, "data__packing": "pad"},
    {"data__noise": {"mask_spans": 0.1, "mask": ["<mask>"]}},
    {"data__sources": {"a": {"path": "x", "weight": 0}, "b": {"path": "x", "weight": 1e-9}}},
    {"data__sources": {"a.b-c_1": "x", "2024": "y", "größe": "z"}},
    {"data__validation": 0.5},
    {"data__validation": 0, "budget__stop__time": "1h"},
    {"budget__stop__patience": 1, "budget__stop__validation_loss": 2.0},
    {"parallel__tp": 1},
    {"model": {"preset": "1M", "rope": STRETCHED}, "data__context": 1024},
    {"model": {"preset": "1M", "rope": {**STRETCHED, "scaling": "dynamic", "factor": 1.0}}, "data__context": 4096},
    {"model": {"hf": "x", "rope": {"scaling": "yarn", "factor": 4.0}}, "data__context": 4096},
    {"model": {"hf": "x", "wrap": True}},
]


@pytest.mark.parametrize("changes", PASSES, ids=str)
def test_the_last_that_passes(changes: dict[str, Any]) -> None:
    assert found(**changes) == {}


FAILS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"budget__tokens": 5, "budget__steps": 5}, {"budget.steps": "by tokens and steps: keep one"}),
    (
        {"sweep": {"parameters": {"optimizer.lr": {"min": 1e-2, "max": 1e-3}}}},
        {"sweep.parameters.optimizer.lr.max": "0.001 is not above min: 0.01"},
    ),
    ({"budget__steps": 50, "schedule__warmup": 50}, {"schedule.warmup": "50 steps are the whole run of 50: write 2%"}),
    ({"budget__steps": 5, "budget__epochs": 1.0}, {"budget.epochs": "by steps and epochs: keep one"}),
    (
        {"budget__tokens": 5, "budget__steps": 5, "budget__epochs": 1.0},
        {"budget.steps": "keep one", "budget.epochs": "keep one"},
    ),
    ({"model": {"width": 64}}, {"model": "missing layers, heads"}),
    ({"model": {}}, {"model": "missing width, layers, heads"}),
    ({"model": {"width": 320, "layers": 1, "heads": 6}}, {"model.heads": "write heads: 5"}),
    # 2 heads would divide 10 too, but leave an odd head size of 5.
    ({"model": {"width": 10, "layers": 1, "heads": 4}}, {"model.heads": "write heads: 1, or set head_dim"}),
    ({"model": {"width": 63, "layers": 1, "heads": 2}}, {"model.heads": "set head_dim, such as head_dim: 64"}),
    ({"model": {"width": 63, "layers": 1, "heads": 3}}, {"model.head_dim": "21 is odd.*write head_dim: 22"}),
    ({"model": {"preset": "1M", "head_dim": 33}}, {"model.head_dim": "write head_dim: 34"}),
    ({"model": {"preset": "1M", "mixers": ["mamba"]}}, {"model.mamba": r"mamba: \{heads: 24\}"}),
    (
        {"model": {"preset": "1M", "mixers": ["mamba"], "mamba": {"heads": 4, "groups": 3}, "causal": False}},
        {"model.causal": "always causal", "model.mamba.groups": r"3 does not divide heads \(4\)"},
    ),
    ({"model": {"preset": "1M", "ffn": 0, "parallel": "one_norm"}}, {"model.ffn": "set ffn"}),
    ({"model": {"preset": "1M", "moe": {"experts": 4}}}, {"model.moe": "needs experts and top_k"}),
    ({"model": {"preset": "1M", "moe": {"experts": 4, "top_k": 5}}}, {"model.moe.top_k": "5 exceeds the 4"}),
    (
        {"model": {"preset": "1M", "mla": {"kv_rank": 8, "nope_dim": 8, "rope_dim": 3, "value_dim": 8}}},
        {"model.mla.rope_dim": "3 is odd"},
    ),
    ({"tasks": [{"kind": "masked"}], "data__cross_documents": True}, {"data.cross_documents": "write false"}),
    ({"tasks": [{"kind": "infill", "sources": ["no"]}]}, {"tasks.0.sources": "no source 'no'"}),
    ({"model": {"preset": "1M", "kv_heads": 3}}, {"model.kv_heads": r"does not divide heads \(4\): write kv_heads: 2"}),
    ({"model": {"preset": "1M", "kv_heads": 8}}, {"model.kv_heads": "write kv_heads: 4"}),
    (
        {"model": {"preset": "10M", "width": 512}},
        {"model.heads": "width 512 is not divisible by 5 heads: write heads: 4"},
    ),
    ({"tokenizer__vocab": 256}, {"tokenizer.vocab": "256 is too small"}),
    ({"model": {"hf": "base"}, "tokenizer__vocab": 300}, {"tokenizer.vocab": "model.hf has a fixed size"}),
    ({"tokenizer__vocab": 100, "tokenizer__path": "t.json"}, {"tokenizer.vocab": "has a fixed size: remove vocab"}),
    ({"data__context": 1}, {"data.context": "too short"}),
    (
        {"data__context": 1024, "budget__batch": 1023},
        {"budget.batch": "1023 tokens are less than one sequence of 1024"},
    ),
    (
        {"data__context": 1024, "budget__batch_changes": [change(5, 2048), change(6, 1023)]},
        {"budget.batch_changes.1.batch": "less than one sequence of 1024"},
    ),
    (
        {"data__context": 1024, "budget__batch": 8192, "budget__micro_batch": 9},
        {"budget.micro_batch": "9 sequences exceed the batch of 8 sequences of 1024 tokens: write 8 or less"},
    ),
    (
        {"budget__batch_changes": [change(5), change(5), change(9), change(8)]},
        {
            "budget.batch_changes.1.from_step": "5 must be after 5",
            "budget.batch_changes.3.from_step": "8 must be after",
        },
    ),
    (
        {"data__phases": [phase(1, books=1)]},
        {"data.phases.0.weights.books": "no source 'books': sources are web, code"},
    ),
    ({"data__phases": [phase(1, web=0)]}, {"data.phases.0.weights": "at least one source needs a weight above 0"}),
    ({"data__phases": [phase(1)]}, {"data.phases.0.weights": "at least one source"}),
    ({"data__phases": [phase(2, web=1), phase(2, code=1)]}, {"data.phases.1.start": "2 must be after 2"}),
    ({"data__sources": {"a": {"path": "x", "weight": 0}}}, {"data.sources": "needs a weight above 0"}),
    ({"data__sources": {"a/b": "x", ".c": "x"}}, {"data.sources.a/b": "not a valid name", "data.sources..c": "not"}),
    ({"data__sources": {"a": [], "b": ""}}, {"data.sources.a.path": "no file", "data.sources.b.path": "no file"}),
    ({"data__validation": 0.51}, {"data.validation": "write validation: 1%"}),
    ({"guard__forget": {"sources": ["code"]}}, {"guard.forget": "cannot forget: add start_from or model.hf"}),
    (
        {"start_from": "x", "data__validation": 0, "guard__forget": {"sources": ["cod"]}},
        {"guard.forget": "write data.validation: 1%", "guard.forget.sources": "no source 'cod': sources are "},
    ),
    ({"model": {"hf": "x", "init": "mup"}}, {"model.init": "of trained weights: remove init, or hf"}),
    (
        {"data__validation": 0, "budget__stop__patience": 1, "budget__stop__validation_loss": 2.0},
        {"budget.stop.patience": "needs held-out", "budget.stop.validation_loss": "needs held-out"},
    ),
    (
        {"data__curriculum": {"by": "length"}, "data__packing": "pad", "data__padding": {"buckets": 2}},
        {"data.padding.buckets": "buckets: 1"},
    ),
    (
        {
            "data__sources": {"chat": {"path": "c", "messages_field": "m", "clean": ["dedup_paragraphs"]}},
            "data__clean": ["dedup_exact", "dedup_substrings"],
        },
        {"data.sources.chat.clean.0": "not possible in conversations", "data.clean.1": "other sources"},
    ),
    ({"data__noise": {"mask_spans": 0.1}}, {"data.noise.mask_spans": "special: "}),
    ({"optimizer__name": "lion", "optimizer__eps": 1e-8}, {"optimizer.eps": "lion has no eps"}),
    ({"optimizer__name": "lion", "optimizer__veto": "fused"}, {"optimizer.veto": "no fused lion"}),
    ({"schedule__kind": "exponential", "schedule__floor": 0.0}, {"schedule.floor": "never reaches 0: write floor: 1%"}),
    ({"optimizer__sam": 0.05, "memory__update": "in_backward"}, {"optimizer.sam": "does not work with memory.update"}),
    ({"model": {"preset": "1M", "rope": {"factor": 4.0}}}, {"model.rope.factor": "has no effect without scaling"}),
    ({"model": {"preset": "1M", "rope": {**STRETCHED, "original": None}}}, {"model.rope": "yarn needs original"}),
    ({"model": {"preset": "1M", "rope": {**STRETCHED, "factor": 1.0}}}, {"model.rope": "with factor 1 has no effect"}),
    (
        {"model": {"preset": "1M", "rope": STRETCHED}, "data__context": 1025},
        {"data.context": "1025 tokens exceed original 256 x factor 4 = 1024: write factor: 5"},
    ),
    (
        {"model": {"preset": "1M", "wrap": True}},
        {"model.wrap": "add hf: PATH", "model.preset": "folder defines a wrapped model"},
    ),
    (
        {
            "model": {"hf": "x", "wrap": True},
            "optimizer": {"name": "muon", "layer_decay": 0.9},
            "dropout__residual": 0.1,
        },
        {"optimizer.name": "muon needs", "optimizer.layer_decay": "order of layers", "dropout": "without dropout"},
    ),
    (
        {"memory__update": "in_backward", "budget__batch_changes": [{"from_step": 9, "batch": "1M"}]},
        {"memory.update": "remove budget.batch_changes"},
    ),
    ({"models": {"reference": "runs/base"}}, {"models.reference": "objective: pretrain uses no other model"}),
    ({"sft": {"neftune": 5.0}}, {"sft": "has no effect with objective: pretrain"}),
    (
        {
            "objective": "sft",
            "sft": {"neftune": 5.0},
            "parallel__tp": 2,
            "tasks": ["infill"],
            "model": {"preset": "10M", "causal": False},
        },
        {
            "sft.neftune": "parallel.tp does not have",
            "tasks": "those of pre-training",
            "model": "it needs a causal decoder",
        },
    ),
    ({"distill": {"loss": "js"}}, {"distill": "has no effect with objective: pretrain"}),
    ({"objective": "distill"}, {"models": "distillation needs a teacher"}),
    (
        {"objective": "distill", "models": {"teacher": {"path": "x", "train": True}}},
        {"models.teacher.train": "is frozen"},
    ),
    ({"dpo": {"loss": "ipo"}}, {"dpo": "has no effect with objective: pretrain"}),
    (
        {
            "objective": "dpo",
            "data__sources": {"rows": {"path": "rows.jsonl", "messages_field": "m"}},
            "parallel__cp": 2,
            "tasks": ["infill"],
        },
        {
            "data.sources.rows": "dpo compares two answers",
            "parallel.cp": "complete rows",
            "tasks": "those of pre-training",
        },
    ),
    ({"reward__heads": 2}, {"reward": "has no effect with objective: pretrain"}),
    ({"rl__prompts": 8}, {"rl": "has no effect with objective: pretrain"}),
    (
        {"data__sources": {"rows": {"path": "rows.jsonl", "columns": {"prompt": "question"}}}},
        {"data.sources.rows.columns": "a prompt needs completion"},
    ),
    ({"adapter": "lora"}, {"adapter": "needs trained weights to adapt"}),
    ({"classify": {"labels": ["a", "b"]}}, {"classify": "has no effect with objective: pretrain"}),
    ({"objective": "classify"}, {"classify": "missing: write for example"}),
    (
        {
            "objective": "classify",
            "classify": {"labels": ["a", "b"]},
            "data__packing": "concat",
            "data__padding": {"long": "split"},
            "data__cross_documents": True,
            "loss__z": 1e-4,
            "data__sources": {"rows": {"path": "rows.jsonl"}},
            "tasks": ["infill"],
        },
        {
            "data.sources.rows.columns": "does not name the column of label",
            "data.packing": "write pad or best_fit",
            "data.padding.long": "write truncate",
            "data.cross_documents": "its own document",
            "tasks": "pre-training",
            "loss": "pre-training",
        },
    ),
    ({"checkpoint__archive_model_only": True}, {"checkpoint.archive_model_only": "keep_every: 10000"}),
    ({"recipe": "compatible", "model": {"preset": "10M", "init": "mup"}}, {"recipe": "for dense models"}),
]


@pytest.mark.parametrize(("changes", "told"), FAILS, ids=str)
def test_the_first_that_does_not(changes: dict[str, Any], told: dict[str, str]) -> None:
    messages = found(**changes)
    assert messages.keys() == told.keys()
    for key, words in told.items():
        assert re.search(words, messages[key]), messages[key]


def test_every_check_is_tried_above() -> None:
    hit = {named for changes, _ in FAILS for named, _ in CHECKS if list(named(spec_with(**changes)))}
    assert hit == {named for named, _ in CHECKS}


def test_a_check_is_left_out_where_what_it_reads_is_wrong_itself() -> None:
    spec = spec_with(data__context=1024, budget__batch=8, tokenizer__vocab=100)
    both = {("budget", "batch"), ("tokenizer", "vocab")}
    assert {path for path, _ in check_spec(spec)} == both
    assert {path for path, _ in check_spec(spec, [("data", "context")])} == {("tokenizer", "vocab")}
    assert {path for path, _ in check_spec(spec, [("budget",)])} == {("tokenizer", "vocab")}
    assert {path for path, _ in check_spec(spec, [("budget", "tokens"), ("seed",)])} == both


@given(width=st.integers(8, 600), heads=st.integers(1, 40), kv_heads=st.none() | st.integers(1, 40))
def test_following_the_advice_on_heads_leads_to_a_good_shape(width: int, heads: int, kv_heads: int | None) -> None:
    model: dict[str, Any] = {"width": width, "layers": 1, "heads": heads, "kv_heads": kv_heads}
    for _ in range(3):
        problems = found(model=model)
        if not problems:
            break
        advice = re.search(r"(heads|kv_heads|head_dim): (\d+)", next(iter(problems.values())))
        assert advice, problems
        model[advice[1]] = int(advice[2])
    assert found(model=model) == {}
