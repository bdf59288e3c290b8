"""What is proposed to one GPU on which a model does not fit: the cheapest that fits, in keys that a spec takes."""

import re
from pathlib import Path
from typing import Any

import pytest

from bessemer.errors import UserError
from bessemer.plan.cost_model.memory import Passes, estimate_memory
from bessemer.plan.hardware import parse_cluster
from bessemer.plan.request import request_from_spec
from bessemer.plan.search.proposal import MEMORY_FALLBACKS, _with_settings, memory_fallbacks, propose
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import PRESETS

from ..plans import plan_on

PLAIN = RunSpec.model_validate({"model": "7B", "data": {"sources": {"text": "data/"}}})


def refusal(model: str, gpus: str, **more: Any) -> str:
    with pytest.raises(UserError) as fault:
        plan_on(model, gpus, tokens=10**8, **more)
    assert "\n" not in str(fault.value)
    return str(fault.value)


def proposed(message: str) -> list[str]:
    found = re.search(r"This one GPU holds it with (.*) \(", message)
    assert found, message
    return [pair.replace(": ", "=") for pair in found[1].split(", ")]


@pytest.mark.parametrize("size", ["1B", "7B", "70B"])
def test_each_rung_needs_less_than_the_one_before(size: str) -> None:
    keys: dict[str, Any] = {}
    totals = []
    for rung in MEMORY_FALLBACKS:
        keys |= rung
        passes = Passes(4096, 1, "bf16", "full", compiled=True, several="memory.update" not in keys)
        totals.append(estimate_memory(_with_settings(PLAIN, keys), PRESETS[size], passes).total)
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == len(totals)


@pytest.mark.parametrize(
    ("model", "gpus", "first", "last"),
    [
        ("13b", "1xH200", "memory.weights=kahan", "memory.moments=8bit"),
        ("7b", "1xL40S", "memory.weights=stochastic", "memory.offload_optimizer=true"),
        ("7b", "1xRTX4090", "memory.weights=stochastic", "budget.batch=4096"),
    ],
)
def test_what_a_refusal_proposes_is_not_refused(model: str, gpus: str, first: str, last: str, tmp_path: Path) -> None:
    keys = proposed(refusal(model, gpus))
    assert (keys[0], keys[-1]) == (first, last)
    file = tmp_path / "run.yaml"
    file.write_text(f"name: a\nmodel: {model.upper()}\ndata: {{sources: {{text: data/}}, context: 4096}}\n")
    spec = load_spec(file, [*keys, "tokenizer.vocab=32000", "budget.tokens=100M"])
    assert propose(request_from_spec(spec), parse_cluster(gpus)).best.needs.total > 0


def test_a_70b_model_is_at_the_edge_of_one_h200_and_says_what_it_takes_of_the_host() -> None:
    message = refusal("70b", "1xH200")
    assert "optimizer.name=lion" in proposed(message) and "budget.batch=4096" in proposed(message)
    assert re.search(
        r"\(145 GB for one row of 4,096 tokens; 71\.7 GB on the host; no step can be vetoed; at the edge\)$", message
    )


def test_nothing_is_proposed_where_nothing_helps() -> None:
    assert refusal("405b", "1xH200").endswith("or an adapter")
    assert refusal("405b", "2xH200").endswith("or an adapter")
    assert refusal("70b", "1xH200", precision="fp32").endswith("or an adapter")
    muon = PLAIN.model_copy(update={"optimizer": PLAIN.optimizer.model_copy(update={"name": "muon"})})
    assert not memory_fallbacks(muon, PRESETS["7B"], 4096, "bf16", 40e9, int(42e9))
    assert memory_fallbacks(PLAIN, PRESETS["7B"], 4096, "bf16", 40e9, int(42e9))
