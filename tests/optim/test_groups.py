"""What is frozen, and the learning rate of each parameter, against groups made by hand."""

import copy

import pytest
import torch
from torch import nn

from bessemer.errors import UserError
from bessemer.model.transformer import Decoder, build_model
from bessemer.optim.choose import add_groups_to_plan, freeze, lr_scales, optimizer_for
from bessemer.plan.decision import Plan
from bessemer.spec.checks import check_parameter_groups
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

SHAPE = ModelShape(64, 32, 3, 4, 2, 8, 48)
ACCEPT, ONE = torch.zeros(()), torch.ones(())


def spec_of(model: object = "1M", memory: object = None, **optimizer: object) -> RunSpec:
    written = {"model": model, "data": {"sources": {"a": "x"}}, "optimizer": optimizer, "memory": memory or {}}
    return RunSpec.model_validate(written)


def model_of(**changes: object) -> Decoder:
    return build_model(ModelShape(**{**vars(SHAPE), **changes}), "cpu", 0)  # type: ignore[arg-type]


def frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["norm"], lambda name: name == "norm.weight"),
        (["norm.weight"], lambda name: name == "norm.weight"),
        (["blocks.1"], lambda name: name.startswith("blocks.1.")),
        (["blocks.0-1"], lambda name: name.startswith(("blocks.0.", "blocks.1."))),
        (["blocks.1-2.ffn"], lambda name: name.startswith(("blocks.1.ffn.", "blocks.2.ffn."))),
        (["*.ffn.*"], lambda name: ".ffn." in name),
        (["*norm*", "embedding"], lambda name: "norm" in name or name.startswith("embedding.")),
        ([], lambda name: False),
    ],
)
def test_names_layers_ranges_and_globs(patterns, expected):
    model = model_of()
    names = {name: parameter.numel() for name, parameter in model.named_parameters()}
    counts = freeze(model, patterns)
    assert frozen(model) == {name for name in names if expected(name)}
    still = sum(count for name, count in names.items() if expected(name))
    assert counts == (still, sum(names.values()) - still)


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (
            ["blocks.3"],
            r"'blocks.3' matches nothing: there are embedding, blocks.0 to blocks.2, norm.*; did you mean blocks",
        ),
        (["blocks.0-7"], r"'blocks.0-7' matches nothing.*blocks.0 to blocks.2"),
        (["embeding"], r"did you mean embedding"),
        (["head"], r"the head is the embedding; write embedding"),
        (["blocks.2-1"], r"'blocks.2-1' matches nothing"),
        (["*"], r"freeze every parameter"),
        (["xyz"], r"matches nothing: there are embedding, blocks.0 to blocks.2, norm"),
    ],
)
def test_what_names_nothing_or_everything_is_refused(patterns, words):
    with pytest.raises(UserError, match=words):
        freeze(model_of(tied=True), patterns)


def test_frozen_parameters_have_no_state_and_do_not_move():
    model, spec = model_of(tied=True), spec_of(freeze=["embedding", "blocks.0"])
    before = copy.deepcopy(model.state_dict())
    optimizer = optimizer_for(model, spec)
    for _ in range(2):
        model(torch.arange(16)[None]).square().sum().backward()
        optimizer.step(1e-2, ACCEPT, ONE)
    for name, tensor in model.state_dict().items():
        still = name.startswith(("embedding.", "blocks.0."))
        assert torch.equal(tensor, before[name]) == still, name
        assert any(key.startswith(f"{name}.") for key in optimizer.state()) != still


def test_layers_decay_from_the_head_down():
    model = model_of(tied=False)
    scales = lr_scales(model, spec_of(layer_decay=0.9))
    for name, scale in scales.items():
        top = name.split(".")[0]
        layer = int(name.split(".")[1]) if top == "blocks" else -1
        assert scale == pytest.approx({"embedding": 0.9**3, "blocks": 0.9 ** (2 - layer)}.get(top, 1.0)), name
    assert scales["blocks.2.ffn.up.weight"] == scales["norm.weight"] == scales["head.weight"] == 1.0
    assert set(lr_scales(model, spec_of()).values()) == {1.0}


def test_mup_scales_the_matrices_that_read_the_width():
    model = model_of(tied=False, width=64, head_dim=16)
    scales = lr_scales(model, spec_of({"preset": "1M", "init": "mup", "mup_width": 16}, layer_decay=0.5))
    assert scales["blocks.2.attention.query.weight"] == scales["blocks.2.ffn.down.weight"] == 0.25
    assert scales["blocks.1.ffn.up.weight"] == 0.125  # both at once
    assert scales["head.weight"] == scales["norm.weight"] == scales["blocks.2.ffn_norm.weight"] == 1.0
    assert scales["embedding.weight"] == 0.125  # of the decay alone
    with pytest.raises(UserError, match="mup does not support sgd: write adamw"):
        lr_scales(model, spec_of({"preset": "1M", "init": "mup"}, name="sgd"))


def moved(width: int, init: str) -> float:
    """How far the hidden states move in three steps of AdamW, of a model of that width."""
    shape = ModelShape(64, width, 2, 4, 4, width // 4, 2 * width, tied=False)
    model = build_model(shape, "cpu", 0, init)
    optimizer = optimizer_for(model, spec_of({"preset": "1M", "init": init, "mup_width": 32}, freeze=["embedding"]))
    tokens = torch.arange(48).view(2, 24)
    first = model(tokens).detach()
    for _ in range(3):
        nn.functional.cross_entropy(
            model.logits(model(tokens))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        optimizer.step(5e-4, ACCEPT, ONE)
    return float((model(tokens) - first).detach().square().mean().sqrt())


def test_with_mup_one_learning_rate_moves_all_widths_alike():
    """The coordinate check of the muP paper. Without it, eight times the width moves the hidden states much further."""
    assert 0.6 < moved(256, "mup") / moved(32, "mup") < 1.5  # 0.72
    assert moved(256, "gpt") / moved(32, "gpt") > 4  # 7.8


@pytest.mark.parametrize("veto", ["fused", "host", "select"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_are_those_of_torch_with_groups_made_by_hand(name, veto):
    model = model_of()
    theirs = copy.deepcopy(model)
    optimizer = optimizer_for(model, spec_of(name=name, veto=veto, layer_decay=0.8, weight_decay=0.1))
    groups = []
    for key, parameter in theirs.named_parameters():
        top, _, rest = key.partition(".")
        scale = 0.8 ** (2 - int(rest[0])) if top == "blocks" else 0.8**3 if top == "embedding" else 1.0
        decay = 0.1 if parameter.ndim >= 2 else 0.0
        groups.append({"params": [parameter], "lr": 3e-3 * scale, "weight_decay": decay})
    kinds = {
        "adamw": lambda: torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=veto == "fused"),
        "sgd": lambda: torch.optim.SGD(groups, lr=1.0, momentum=0.9, fused=veto == "fused"),
    }
    reference = kinds[name]()
    for step in range(3):
        tokens = torch.arange(16)[None] + step
        for one in (model, theirs):
            one(tokens).square().mean().backward()
        optimizer.step(3e-3, ACCEPT, ONE)
        reference.step()
        reference.zero_grad()
    for (key, mine), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), key


def test_moments_are_known_by_name_whatever_the_groups():
    with_groups = optimizer_for(model_of(), spec_of(layer_decay=0.8)).state()
    without = optimizer_for(model_of(), spec_of()).state()
    assert {name: tensor.shape for name, tensor in with_groups.items()} == {
        name: tensor.shape for name, tensor in without.items()
    }


def test_the_plan_says_what_trains():
    plan, spec = Plan(), spec_of(freeze=["embedding", "blocks.0-1"], layer_decay=0.5)
    model = model_of(tied=True)
    _, trained = freeze(model, spec.optimizer.freeze)
    add_groups_to_plan(model, spec, plan)
    frozen_rows = plan.decisions["optimizer.freeze"]
    assert frozen_rows.value == "embedding, blocks.0-1"
    assert "parameters train; the head is the embedding, and frozen with it" in frozen_rows.reason
    assert frozen_rows.reason.startswith(f"{trained:,} of 25.3K")
    assert plan.value("learning rates") == "x1 to x1"  # what is left is the last block and the norm
    nothing = Plan()
    add_groups_to_plan(model_of(), spec_of(), nothing)
    assert not nothing.decisions


def test_the_plan_says_what_little_memory_costs():
    plan = Plan()
    memory = {"weights": "kahan", "moments": "8bit", "offload_optimizer": True, "update": "in_backward"}
    add_groups_to_plan(model_of(), spec_of(memory=memory), plan)
    state, update = plan.decisions["optimizer state"], plan.decisions["memory.update"]
    assert state.value == "weights kahan, moments 8bit"
    assert state.reason == "2 bytes per parameter on the device instead of 18, and 4.03 on the host"
    assert "judged after its update" in update.reason and "no clipping" in update.reason


def test_a_run_s_optimizer_makes_its_matrices_bf16():
    model = model_of()
    optimizer_for(model, spec_of(memory={"weights": "stochastic"}))
    assert {p.dtype for p in model.parameters() if p.ndim > 1} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters() if p.ndim < 2} == {torch.float32}


GROUPS = {
    "blocks.2": {"lr_factor": 0.5, "weight_decay": 0.3, "decay_segments": [{"from_step": 3, "to": 0.5, "length": 2}]},
    "embedding": {"lr_factor": 0.25, "betas": [0.5, 0.9]},
    "vectors": {"weight_decay": 0.05, "segments": [{"from_step": 2, "to": 0.0, "length": 4}]},
    "matrices": {"train_from": 2, "train_until": 4},
}


def test_groups_are_torch_s_groups_made_by_hand():
    """Rate, decay, betas, a factor that falls from step 2 to 6, a decay that falls to a half from step 3 to 5, and
    matrices that train in steps 2 and 3 only."""
    model = model_of(tied=True)
    theirs = copy.deepcopy(model)
    optimizer = optimizer_for(model, spec_of(groups=GROUPS, weight_decay=0.1))
    groups = []
    for name, parameter in theirs.named_parameters():
        group = {"params": [parameter], "betas": (0.9, 0.95), "scale": 1.0, "weight_decay": 0.1, "kind": "matrices"}
        if name.startswith("blocks.2."):
            group |= {"scale": 0.5, "weight_decay": 0.3, "kind": "layer"}
        elif name.startswith("embedding."):
            group |= {"scale": 0.25, "betas": (0.5, 0.9), "kind": "embedding"}
        elif parameter.ndim < 2:
            group |= {"weight_decay": 0.05, "kind": "vectors"}
        groups.append(group)
    reference = torch.optim.AdamW(groups, fused=True)
    for step in range(6):
        factor = min(1.0, 1 - (step - 2) / 4) if step >= 2 else 1.0
        for one in (model, theirs):
            one(torch.arange(16)[None] + step).square().mean().backward()
        for group in reference.param_groups:
            if group["kind"] == "layer":
                group["weight_decay"] = 0.3 * (1.0, 1.0, 1.0, 1.0, 0.75, 0.5)[step]
            group["lr"] = 3e-3 * group["scale"] * (factor if group["kind"] == "vectors" else 1.0)
            if group["kind"] == "matrices" and step not in (2, 3):
                group["params"][0].grad = None
        optimizer.at_step(step)
        optimizer.drop_held_gradients()
        held = [p for p in theirs.parameters() if p.grad is not None]
        expected = torch.nn.utils.get_total_norm([p.grad for p in held])
        assert float(optimizer.grad_norm()) == pytest.approx(float(expected), rel=1e-6), "of what trains"
        optimizer.step(3e-3, ACCEPT, ONE)
        reference.step()
        reference.zero_grad()
        for (key, mine), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other), (step, key)


def test_held_parameters_keep_every_bit():
    model = model_of(tied=True)
    optimizer = optimizer_for(model, spec_of(groups={"blocks.0-1": {"train_from": 1}}))
    before = {name: tensor.clone() for name, tensor in [*model.state_dict().items(), *optimizer.state().items()]}
    for step in range(2):
        model(torch.arange(16)[None]).square().mean().backward()
        optimizer.at_step(step)
        optimizer.drop_held_gradients()
        optimizer.step(1e-2, ACCEPT, ONE)
        after = {**model.state_dict(), **optimizer.state()}
        moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
        held = {name for name in before if name.startswith(("blocks.0.", "blocks.1."))}
        assert (held & moved == set()) == (step == 0)


def test_a_group_that_holds_nothing_is_refused():
    with pytest.raises(UserError, match=r"optimizer.groups: 'blocks.7' holds no parameter"):
        optimizer_for(model_of(), spec_of(groups={"blocks.7": {"lr_factor": 0.1}}))
    with pytest.raises(UserError, match="the narrower ones first"):
        optimizer_for(model_of(), spec_of(groups={"*": {"lr_factor": 0.1}, "blocks.0": {"lr_factor": 0.2}}))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"optimizer": {"name": "sgd", "groups": {"head": {"betas": [0.9, 0.9]}}}}, "groups.head.betas"),
        ({"optimizer": {"groups": {"head": {"train_from": 9, "train_until": 9}}}}, "groups.head.train_until"),
        ({"optimizer": {"groups": {"head": {}}}, "memory": {"update": "in_backward"}}, "groups"),
        ({"optimizer": {"groups": {"head": {}}}, "parallel": {"engine": "deepspeed"}}, "groups"),
        ({"optimizer": {"groups": {"head": {"segments": [{"from_step": 9, "to": "0%"}]}}}}, "head.segments.0.length"),
    ],
    ids=str,
)
def test_groups_that_cannot_work_are_named(changes, place):
    spec = RunSpec.model_validate({"model": "1M", "data": {"sources": {"a": "x"}}, **changes})
    assert any(".".join(map(str, path)).endswith(place) for path, _ in check_parameter_groups(spec))
