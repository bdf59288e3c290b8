"""The memory of further models of a run, in the plan of a cluster and of this machine."""

from dataclasses import replace

import pytest

from bessemer.errors import UserError
from bessemer.plan.cost_model.memory import OtherModel, reserve_memory
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine, parse_cluster
from bessemer.plan.request import request_from_options
from bessemer.plan.search.proposal import propose
from bessemer.spec.shape import PRESETS

ONE_B = replace(PRESETS["1B"], vocab=32_000)


def test_frozen_and_trained_models_take_their_bytes() -> None:
    spec = request_from_options("1b", 10**9, ["precision=bf16"]).spec
    machine, plan = Machine("cuda", "H100", 80 << 30, 1), Plan()
    others = [OtherModel("reference", ONE_B, False), OtherModel("critic", ONE_B, True)]
    left = reserve_memory(spec, others, machine, 4, plan).memory_bytes
    assert machine.memory_bytes - left == pytest.approx((2 + 18) * ONE_B.parameters / 4, rel=0.12)
    assert "divided among 4 processes" in plan.decisions["memory.models.critic"].reason
    with pytest.raises(UserError, match=r"models: they need .* of 1.0 GB|models: they need"):
        reserve_memory(spec, others, replace(machine, memory_bytes=1 << 30), 1, Plan())


def test_a_plan_of_a_cluster_leaves_room_for_them() -> None:
    request = request_from_options("1b", 10**9)
    alone, cluster = propose(request, parse_cluster("1xH100")), parse_cluster("1xH100")
    beside = propose(replace(request, others=(OtherModel("reference", ONE_B, False),)), cluster)
    assert beside.goal.cluster.gpu.memory_bytes < alone.goal.cluster.gpu.memory_bytes
    assert "memory.models.reference" in beside.plan.decisions
    enormous = OtherModel("teacher", replace(ONE_B, layers=ONE_B.layers * 60), False)
    with pytest.raises(UserError, match="models: they need"):
        propose(replace(request, others=(enormous,)), cluster)
