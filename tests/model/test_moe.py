"""Experts against a reference that loops over tokens and experts, and against transformers' four kinds of router."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bessemer.errors import UserError
from bessemer.model.layers import ACTIVATIONS, FeedForward
from bessemer.model.moe import (
    MixtureOfExperts,
    grouped_product,
    looped_product,
    router_shares,
    routing_terms,
    update_choice_bias,
)
from bessemer.spec.shape import Moe

WIDTH = 8


def make(moe: Moe, seed: int = 0, activation: Any = "silu", gated: bool = True, width: int = WIDTH) -> MixtureOfExperts:
    """In float64, with a router and a choice bias that differ between experts."""
    torch.manual_seed(seed)
    layer = MixtureOfExperts(width, moe, activation, gated).double()
    with torch.no_grad():
        layer.router.weight.normal_()
        if layer.choice_bias is not None:
            layer.choice_bias.normal_(std=0.3)
    return layer


def rows(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_choice(moe: Moe, scores: list[float], bias: list[float]) -> list[int]:
    """Sorting, one token at a time."""
    score = [a + b for a, b in zip(scores, bias, strict=True)]
    size = moe.experts // moe.groups
    kept = 2 if moe.group_score == "top2" else 1
    groups = [sum(sorted(score[g * size : (g + 1) * size])[-kept:]) for g in range(moe.groups)]
    best = sorted(range(moe.groups), key=lambda g: -groups[g])[: moe.top_groups]
    allowed = [e for e in range(moe.experts) if moe.groups == 1 or e // size in best]
    return sorted(allowed, key=lambda e: -score[e])[: moe.top_k]


def reference(layer: MixtureOfExperts, x_NW: Tensor, counted: list[bool]) -> tuple[Tensor, Tensor, float]:
    """Output, balance and z-loss together, and the share of dropped assignments."""
    moe, N = layer.moe, len(x_NW)
    bias = [0.0] * moe.experts if layer.choice_bias is None else layer.choice_bias.tolist()
    logits_NE = x_NW @ layer.router.weight.T
    scores_NE = torch.softmax(logits_NE, -1) if moe.score == "softmax" else 1 / (1 + torch.exp(-logits_NE))
    choices = [slow_choice(moe, scores.tolist(), bias) for scores in scores_NE]
    weight: dict[tuple[int, int], Tensor] = {}
    for n, chosen in enumerate(choices):
        whole = sum(scores_NE[n, e] for e in chosen) if moe.normalise else 1.0
        weight |= {(n, e): scores_NE[n, e] / whole for e in chosen}
    seats = N if moe.capacity is None else math.ceil(moe.capacity * N * moe.top_k / moe.experts)
    served: set[tuple[int, int]] = set()
    for e in range(moe.experts):
        first = {n: (-scores_NE[n, e].item() if counted[n] else 1.0, n) for n in range(N) if e in choices[n]}
        queue = sorted(first, key=first.__getitem__)
        served |= {(n, e) for n in queue[:seats]}
    outputs = []
    for n in range(N):
        y_W = torch.zeros_like(x_NW[n]) if layer.shared is None else layer.shared(x_NW[n])
        for e in choices[n]:
            if (n, e) in served:
                inner = layer.up[e] @ x_NW[n]
                act = ACTIVATIONS["silu" if layer.gate is not None else "relu2"]
                inner = act(inner) if layer.gate is None else act(layer.gate[e] @ x_NW[n]) * inner
                y_W = y_W + moe.scale * weight[n, e] * (layer.down[e] @ inner)
        outputs.append(y_W)
    count = max(1, sum(counted))
    loss = x_NW.new_zeros(())
    for e in range(moe.experts):
        f = sum(e in choices[n] for n in range(N) if counted[n]) / (count * moe.top_k)
        p = sum((scores_NE[n, e] / scores_NE[n].sum() for n in range(N) if counted[n]), x_NW.new_zeros(())) / count
        loss = loss + moe.balance * moe.experts * f * p
    z = sum((torch.log(torch.exp(logits_NE[n]).sum()) ** 2 for n in range(N) if counted[n]), x_NW.new_zeros(()))
    lost = sum((n, e) not in served for n in range(N) if counted[n] for e in choices[n])
    return torch.stack(outputs), loss + moe.router_z * z / count, lost / (count * moe.top_k)


@st.composite
def designs(draw: st.DrawFn) -> Moe:
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    size = draw(st.integers(2, 4))
    top_groups = draw(st.integers(1, groups))
    return Moe(
        experts=groups * size, top_k=draw(st.integers(1, min(4, top_groups * size))), ffn=draw(st.integers(1, 5)),
        shared=draw(st.integers(0, 2)), score=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalise=draw(st.booleans()), scale=draw(st.sampled_from([1.0, 2.5])), groups=groups, top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "top2"])), choice_bias=draw(st.booleans()),
        capacity=draw(st.sampled_from([None, None, 0.5, 1.0, 1.5])), balance=0.3, router_z=0.2,
    )  # fmt: skip


@given(moe=designs(), gated=st.booleans(), seed=st.integers(0, 99), tokens=st.integers(1, 9), padded=st.booleans())
def test_output_loss_and_gradients_equal_the_slow_reference(moe, gated, seed, tokens, padded):
    layer = make(moe, seed, "silu" if gated else "relu2", gated)
    x_BTW, mix_BTW = rows(2, tokens, WIDTH, seed=seed).requires_grad_(), rows(2, tokens, WIDTH, seed=seed + 1)
    counted = [n % 3 != 2 or not padded for n in range(2 * tokens)]
    variables = [x_BTW, *layer.parameters()]

    y_BTW = layer(x_BTW, torch.tensor(counted).view(2, tokens) if padded else None)
    dropped = float(layer.routing.dropped)
    terms, _ = routing_terms(layer)
    assert terms is not None
    found = torch.autograd.grad((y_BTW * mix_BTW).sum() + terms, variables, allow_unused=True, materialize_grads=True)

    y_NW, slow_terms, slow_dropped = reference(layer, x_BTW.flatten(0, 1), counted)
    loss = (y_NW * mix_BTW.flatten(0, 1)).sum() + slow_terms
    wanted = torch.autograd.grad(loss, variables, allow_unused=True, materialize_grads=True)
    torch.testing.assert_close(y_BTW.flatten(0, 1), y_NW, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(terms, slow_terms, rtol=1e-11, atol=1e-12)
    assert dropped == pytest.approx(slow_dropped)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


def family(name: str, **fields: Any) -> tuple[nn.Module, Moe]:
    """transformers' block, and what we would call it."""
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 3}
    if name == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

        config = MixtralConfig(**sizes, intermediate_size=6, num_local_experts=8)
        return MixtralSparseMoeBlock(config), Moe(experts=8, top_k=3, ffn=6)
    if name == "qwen3":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=6, num_experts=8, **fields)
        return Qwen3MoeSparseMoeBlock(config), Moe(experts=8, top_k=3, ffn=6, normalise=fields["norm_topk_prob"])
    deep = {"moe_intermediate_size": 6, "n_routed_experts": 12, "n_shared_experts": 2, "routed_scaling_factor": 2.5}
    moe = Moe(experts=12, top_k=3, ffn=6, shared=2, scale=2.5, normalise=False)
    if name == "deepseek_v2":
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2Moe

        grouped = {"groups": 4, "top_groups": 2} if fields["topk_method"] != "greedy" else {}
        return DeepseekV2Moe(DeepseekV2Config(**sizes, **deep, **fields)), replace(moe, **grouped)
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    moe = replace(moe, score="sigmoid", normalise=True, choice_bias=True, group_score="top2", groups=4, top_groups=2)
    return DeepseekV3MoE(DeepseekV3Config(**sizes, **deep, n_group=4, topk_group=2, norm_topk_prob=True)), moe


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("mixtral", {}),
        ("qwen3", {"norm_topk_prob": True}),
        ("qwen3", {"norm_topk_prob": False}),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
        ("deepseek_v3", {}),
    ],
)
def test_equals_transformers(name: str, fields: dict[str, Any]) -> None:
    """In float64 but for their routers, which round to float32."""
    block, moe = family(name, **fields)
    layer = make(moe)
    pairs = {"gate.weight": layer.router.weight, "experts.down_proj": layer.down}
    if layer.shared is not None:
        assert layer.shared.gate is not None
        pairs["shared_experts.gate_proj.weight"] = layer.shared.gate.weight
        pairs["shared_experts.up_proj.weight"] = layer.shared.up.weight
        pairs["shared_experts.down_proj.weight"] = layer.shared.down.weight
    assert layer.gate is not None
    weights = {key: value.detach() for key, value in pairs.items()}
    weights["experts.gate_up_proj"] = torch.cat((layer.gate, layer.up), dim=1).detach()
    if layer.choice_bias is not None:
        weights["gate.e_score_correction_bias"] = layer.choice_bias
    block.double().load_state_dict(weights)

    x_BTW, mix_BTW = rows(3, 11, WIDTH), rows(3, 11, WIDTH, seed=2)
    mine, theirs = x_BTW.clone().requires_grad_(), x_BTW.clone().requires_grad_()
    y_BTW, wanted_BTW = layer(mine), block(theirs)
    (y_BTW * mix_BTW).sum().backward()
    (wanted_BTW * mix_BTW).sum().backward()
    torch.testing.assert_close(y_BTW, wanted_BTW, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=2e-6)
    grads = {key: parameter.grad for key, parameter in block.named_parameters()}
    for key, value in pairs.items():
        torch.testing.assert_close(value.grad, grads[key], rtol=1e-5, atol=2e-6, check_dtype=False)
    stacked = torch.cat((layer.gate.grad, layer.up.grad), dim=1)  # type: ignore[list-item]
    torch.testing.assert_close(stacked, grads["experts.gate_up_proj"], rtol=1e-5, atol=2e-6)


def test_nothing_is_lost_when_all_go_to_the_same_experts() -> None:
    layer = make(Moe(experts=6, top_k=2, ffn=5))
    dense = FeedForward(WIDTH, 5, "silu", True).double()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[1], layer.router.weight[4] = 3.0, 2.0
        for stacked, linear in ((layer.gate, dense.gate), (layer.up, dense.up), (layer.down, dense.down)):
            stacked.copy_(linear.weight.expand_as(stacked))  # type: ignore[union-attr]
    x_BTW = rows(2, 50, WIDTH).abs()
    torch.testing.assert_close(layer(x_BTW), dense(x_BTW), rtol=1e-12, atol=1e-12)
    assert layer.routing is not None
    assert layer.routing.load_E.tolist() == [0, 0.5, 0, 0, 0.5, 0] and layer.routing.dropped == 0


def test_capacity_drops_the_lowest_scores_in_training_only() -> None:
    moe = Moe(experts=4, top_k=1, ffn=5, normalise=False)
    layer, x_BTW = make(moe), rows(1, 40, WIDTH)
    whole_BTW = layer(x_BTW)
    weights_N, choice_N = torch.softmax(x_BTW[0] @ layer.router.weight.T, -1).max(-1)
    layer.moe = replace(moe, capacity=0.6)  # 6 of 10
    got_N = layer(x_BTW)[0].abs().sum(-1) > 0
    for expert in range(4):
        mine = (choice_N == expert).nonzero()[:, 0]
        best = mine[weights_N[mine].argsort(descending=True)][:6]
        assert set(got_N.nonzero()[:, 0].tolist()) & set(mine.tolist()) == set(best.tolist())
    assert layer.routing is not None
    assert float(layer.routing.dropped) == pytest.approx(1 - float(got_N.double().mean()))
    layer.moe = replace(moe, capacity=4.0)
    torch.testing.assert_close(layer(x_BTW), whole_BTW)
    layer.moe = replace(moe, capacity=0.1)
    torch.testing.assert_close(layer.eval()(x_BTW), whole_BTW)


def test_even_router_costs_the_weight_and_a_collapsed_one_more() -> None:
    layer = make(Moe(experts=4, top_k=2, ffn=2, balance=0.25))
    x_BTW = torch.cat((torch.eye(4), torch.eye(4).roll(1, 0)), dim=1).double()[None]
    with torch.no_grad():
        layer.router.weight.zero_()[:, :4] = 20 * torch.eye(4)
        layer.router.weight[:, 4:] = 20 * torch.eye(4)  # token n goes to experts n and n - 1, half each
    layer(x_BTW)
    loss, numbers = routing_terms(layer)
    assert loss.item() == pytest.approx(0.25) and float(numbers["router_max_load"]) == pytest.approx(1.0)
    assert float(numbers["router_min_share"]) == 0.25 and numbers["router_dead"] == 0
    assert float(numbers["router_entropy"]) == pytest.approx(0.5, abs=1e-6)  # log 2 of log 4
    with torch.no_grad():
        layer.router.weight[:2] = 40.0
    layer(x_BTW)
    loss, numbers = routing_terms(layer)
    assert loss.item() == pytest.approx(0.25 * 4 * (0.5 * 0.5 + 0.5 * 0.5))
    assert numbers["router_dead"] == 2 and float(numbers["router_max_load"]) == pytest.approx(2.0)


def test_balance_is_transformers_by_top_k() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layer, x_BTW = make(Moe(experts=8, top_k=3, ffn=2, balance=1.0)), rows(2, 30, WIDTH)
    mask_BT = torch.arange(60).view(2, 30) % 4 != 0
    for counted in (None, mask_BT):
        layer(x_BTW, counted)
        logits = (x_BTW @ layer.router.weight.T).flatten(0, 1)
        wanted = load_balancing_loss_func((logits,), 8, 3, counted)
        assert routing_terms(layer)[0].item() == pytest.approx(wanted.item() / 3, rel=1e-6)


def test_nothing_counted_teaches_nothing() -> None:
    layer = make(Moe(experts=4, top_k=2, ffn=2, router_z=1.0, choice_bias=True))
    layer(rows(1, 5, WIDTH), torch.zeros(1, 5))
    loss, numbers = routing_terms(layer)
    assert loss == 0 and numbers["router_dead"] == 0 and float(numbers["router_max_load"]) == 1
    before = layer.choice_bias.clone()
    update_choice_bias(layer, 0.1)
    assert torch.equal(layer.choice_bias, before)


def two_layers(moe: Moe) -> nn.ModuleDict:
    blocks = [nn.ModuleDict({"ffn": make(moe, seed)}) for seed in range(2)]
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks)})


def test_terms_are_summed_over_layers_and_cleared() -> None:
    model, x_BTW = two_layers(Moe(experts=4, top_k=2, ffn=2, router_z=0.1)), rows(2, 9, WIDTH)
    layers = [block["ffn"] for block in model["blocks"]]
    parts = []
    for layer in layers:
        layer(x_BTW)
        parts.append((layer.routing.balance + layer.routing.z).item())
    loss, numbers = routing_terms(model)
    assert loss.item() == pytest.approx(sum(parts)) and loss.requires_grad
    assert not any(number.requires_grad for number in numbers.values())
    assert routing_terms(model) == (None, {})
    for layer in layers:
        layer(x_BTW)
    shares = router_shares(model)
    assert list(shares) == ["blocks.0", "blocks.1"] and routing_terms(model) == (None, {})
    assert all(float(share.sum()) == pytest.approx(1.0) for share in shares.values())
    layers[0].eval()(x_BTW)
    assert layers[0].routing is None


def test_bias_moves_against_the_load_of_all_micro_batches() -> None:
    model = two_layers(Moe(experts=4, top_k=1, ffn=2, choice_bias=True, score="sigmoid"))
    layer = model["blocks"][0]["ffn"]
    layer.choice_bias.zero_()
    before, counts = layer.choice_bias.clone(), torch.zeros(4)
    for seed in range(3):
        x_BTW = rows(1, 8, WIDTH, seed=seed)
        layer(x_BTW)
        counts += torch.bincount((x_BTW[0] @ layer.router.weight.T).argmax(-1), minlength=4)
        routing_terms(model)
    reduced: list[Tensor] = []
    update_choice_bias(model, 0.01, reject=torch.ones(()), reduce=reduced.append)
    assert torch.equal(layer.choice_bias, before) and reduced[0].tolist() == [counts.tolist()]
    update_choice_bias(model, 0.01)  # the counts went with the vetoed step
    assert torch.equal(layer.choice_bias, before)
    layer(x_BTW)
    routing_terms(model)
    update_choice_bias(model, 0.01, reduce=lambda total: total.copy_(torch.tensor([[9.0, 0.0, 5.0, 6.0]])))
    assert layer.choice_bias.tolist() == pytest.approx([-0.01, 0.01, 0.0, -0.01])
    assert "choice_bias" in layer.state_dict()


def test_bias_evens_a_skewed_router() -> None:
    layer = make(Moe(experts=8, top_k=2, ffn=2, choice_bias=True, score="sigmoid"))
    with torch.no_grad():
        layer.choice_bias.zero_()
        layer.router.weight[0] += 1.0  # with inputs that lean this way, expert 0 is everybody's
    worst = []
    for step in range(300):
        layer(rows(1, 256, WIDTH, seed=step) + 0.5)
        worst.append(float(routing_terms(layer)[1]["router_max_load"]))
        update_choice_bias(layer, 0.01)
    assert worst[0] > 2.4 and max(worst[-20:]) < 1.6


def test_bias_changes_the_choice_but_not_the_weights() -> None:
    layer, x_BTW = make(Moe(experts=4, top_k=4, ffn=2, choice_bias=True)), rows(1, 6, WIDTH)
    first = layer(x_BTW)
    layer.choice_bias += torch.tensor([5.0, 0.0, -5.0, 1.0])
    torch.testing.assert_close(layer(x_BTW), first)


@pytest.mark.parametrize("counts", [[3, 0, 4, 1], [0, 0, 8, 0], [0, 8, 0, 0]])
def test_grouped_product_is_the_looped_one(counts: list[int]) -> None:
    x, weight, mix = (rows(*shape, seed=5).float() for shape in ((8, 16), (4, 24, 16), (8, 24)))
    found = []
    for product in (grouped_product(torch.tensor(counts).cumsum(0).int()), looped_product(torch.tensor(counts))):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = product(a, b)
        (y * mix).sum().backward()
        found.append((y.detach(), a.grad, b.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_router_stays_exact_under_autocast() -> None:
    layer, x_BTW = make(Moe(experts=8, top_k=2, ffn=16, router_z=1.0, shared=1)).float(), rows(2, 16, WIDTH).float()
    exact_BTW, exact = layer(x_BTW), layer.routing
    with torch.autocast("cpu", torch.bfloat16):
        rough_BTW = layer(x_BTW)
    assert rough_BTW.dtype == torch.bfloat16 and layer.routing is not None and exact is not None
    assert torch.equal(layer.routing.z, exact.z) and torch.equal(layer.routing.load_E, exact.load_E)
    torch.testing.assert_close(rough_BTW.float(), exact_BTW, rtol=0.05, atol=0.02)


def test_recomputed_layers_count_once() -> None:
    layer, x_BTW = make(Moe(experts=4, top_k=2, ffn=3, choice_bias=True)), rows(1, 12, WIDTH).requires_grad_()
    grads = []
    for again in (False, True):
        y_BTW = checkpoint(layer, x_BTW, use_reentrant=False) if again else layer(x_BTW)
        loss = y_BTW.square().sum() + routing_terms(layer)[0]
        grads.append(torch.autograd.grad(loss, [x_BTW, *layer.parameters()]))
        assert float(torch.stack(layer.assigned).sum()) == 24
        update_choice_bias(layer, 0.0)
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"top_k": 9}, "moe.top_k 9: choose from 1 to the 8 experts"),
        ({"groups": 3}, "moe.groups 3: choose a divisor of the 8 experts"),
        ({"groups": 4, "top_k": 3, "top_groups": 1}, "moe.top_groups 1: choose from 2 to 4"),
        ({"groups": 8, "top_groups": 2, "group_score": "top2"}, "moe.group_score top2: use at most 4 groups"),
        ({"capacity": 0.0}, "moe.capacity 0.0: choose more than 0, or null"),
    ],
)
def test_impossible_routers_are_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        MixtureOfExperts(WIDTH, Moe(**({"experts": 8, "top_k": 2, "ffn": 4} | fields)), "silu", True)


@pytest.mark.gpu
@pytest.mark.parametrize("capacity", [None, 1.25])
def test_on_a_gpu_grouped_and_looped_agree_and_repeat(capacity: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    moe = Moe(experts=16, top_k=4, ffn=96, shared=1, capacity=capacity)
    layer = make(moe, width=64).float().cuda()
    x_BTW = rows(4, 128, 64).float().cuda()

    def run() -> list[Tensor]:
        x = x_BTW.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y_BTW = layer(x)
        loss = y_BTW.float().square().mean() + routing_terms(layer)[0]
        return [y_BTW.float(), *torch.autograd.grad(loss, [x, *layer.parameters()])]

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    monkeypatch.setattr(F, "grouped_mm", lambda *_, **__: pytest.fail("not asked for"))
    monkeypatch.setattr(
        "bessemer.model.moe.grouped_product", lambda ends: looped_product(ends.diff(prepend=ends.new_zeros(1)))
    )
    for mine, theirs in zip(first, run(), strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.01 * scale)
