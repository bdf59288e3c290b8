"""`adapter: auto`: full fine-tuning, LoRA or QLoRA by the estimated memory of a step."""

from typing import Any

import pytest

from bessemer.plan.adapter_choice import KEY, choose_adapter
from bessemer.plan.cost_model.memory import Passes, estimate_memory
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.request import request_from_options
from bessemer.spec.adapter import NF4_BYTES, quantized_parameters
from bessemer.spec.schema import RunSpec
from bessemer.spec.trained import parameter_bytes

DATA = {"sources": {"a": "a.jsonl"}}


def spec_of(adapter: Any = "auto", **parts: Any) -> RunSpec:
    data = {"model": {"hf": "folder"}, "data": DATA, "precision": "bf16", "adapter": adapter}
    return RunSpec.model_validate(data | parts)


def choose(size: str, gigabytes: float, previous: Plan | None = None, processes: int = 1, **parts: Any) -> Any:
    machine, plan = Machine("cuda", "a GPU", int(gigabytes * 1e9), 1), Plan()
    spec = choose_adapter(spec_of(**parts), request_from_options(size).shape, 2048, machine, plan, previous, processes)
    return spec.adapter, plan


@pytest.mark.parametrize(
    ("size", "gigabytes", "kind"),
    [("1B", 80, "full"), ("8B", 80, "lora"), ("8B", 24, "lora"), ("8B", 12, "qlora"), ("70B", 80, "qlora")],
)
def test_the_first_that_fits(size: str, gigabytes: float, kind: str) -> None:
    adapter, plan = choose(size, gigabytes)
    decision = plan.decisions[KEY]
    assert decision.value == kind and f"{kind} needs" in decision.reason and "estimate" in decision.source
    assert (kind == "full") == ("would need" not in decision.reason)
    held = None if adapter is None else (adapter.kind, adapter.base)
    assert held == {"full": None, "lora": ("lora", "full"), "qlora": ("lora", "nf4")}[kind]


def test_what_changes_the_choice() -> None:
    assert choose("8B", 80, processes=4)[1].value(KEY) == "full"  # divided among them
    parallel = {"dp_replicate": 4, "dp_shard": 1}
    assert choose("8B", 80, processes=4, parallel=parallel)[1].value(KEY) == "lora"
    # A reference that is the base needs an adapter.
    adapter, plan = choose("1B", 80, models={"reference": "base"})
    assert adapter is not None and "needs an adapter" in plan.decisions[KEY].reason
    assert "hardly fits" in choose("70B", 24)[1].decisions[KEY].reason
    settings = {"kind": "auto", "rank": 7, "modules_to_save": ["embedding"]}
    adapter, _ = choose("70B", 80, adapter=settings)
    assert adapter.rank == 7 and adapter.modules_to_save == ["embedding"]


def test_a_resumed_run_keeps_its_choice() -> None:
    _, first = choose("8B", 80)
    adapter, plan = choose("8B", 800, previous=first)
    assert adapter.kind == "lora" and plan.decisions[KEY] == first.decisions[KEY]
    adapter, plan = choose("8B", 8, adapter="dora")  # not open
    assert adapter.kind == "dora" and KEY not in plan.decisions


def test_the_bytes_of_a_quantized_base() -> None:
    assert pytest.approx(4.127, abs=1e-4) == 8 * NF4_BYTES
    shape = request_from_options("8B").shape
    spec = spec_of("qlora", memory={"weights": "kahan"})
    each, inner = parameter_bytes(spec, shape, "bf16"), quantized_parameters(shape)
    ends = shape.parameters - inner  # embedding, head and norms
    assert each.held * shape.parameters == pytest.approx(inner * NF4_BYTES + 2 * ends)
    lora = spec_of("lora", memory={"weights": "kahan"})
    sizes = [estimate_memory(s, shape, Passes(2048, 1, "bf16", "full", True)) for s in (spec, lora)]
    largest = 2 * shape.width * shape.ffn
    assert sizes[1].total - sizes[0].total == pytest.approx((2 - NF4_BYTES) * inner - largest, rel=0.01)


@pytest.mark.parametrize(
    ("adapter", "problem"),
    [
        ({"kind": "qlora", "base": "full"}, "qlora has base: nf4"), ({"kind": "auto", "base": "nf4"}, "remove base"),
        ({"kind": "auto", "path": "folder"}, "remove path"),
    ],
)  # fmt: skip
def test_conflicting_words_are_refused(adapter: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        spec_of(adapter)


def test_qlora_is_a_word_for_two_keys() -> None:
    for written in ("qlora", {"kind": "qlora"}, {"kind": "lora", "base": "nf4"}):
        assert spec_of(written) == spec_of({"kind": "lora", "base": "nf4"})
