"""A look inside the model against the same numbers computed by hand, in float64, one query and one unit at a time."""

import math

import pytest
import torch
import torch.nn.functional as F

from bessemer.guard.layer_stats import LayerStats, attention_numbers, layer_of
from bessemer.model.attention import AttentionInputs
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.layers import rotate
from bessemer.model.transformer import build_model
from bessemer.spec.shape import ModelShape, Rope

DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 2]])
TOKENS = torch.tensor([[1, 5, 9, 2, 3, 3, 7], [4, 4, 8, 6, 0, 1, 2]])


def random_model(dtype=torch.float64, **fields):
    sizes = {"vocab": 11, "width": 12, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 20}
    model = build_model(ModelShape(**(sizes | {"rope": Rope(theta=50.0)} | fields)), "cpu", 0).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 1.5 * noise / math.sqrt(parameter.shape[1]))
    return model


def norm(x, module):
    return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight


def turned(x_TD, theta):
    """Components j and j + D/2 are one complex number, turned by t theta^(-2j/D)."""
    T, D = x_TD.shape
    number = torch.complex(x_TD[:, : D // 2], x_TD[:, D // 2 :])
    speed = torch.tensor([theta ** (-2 * j / D) for j in range(D // 2)], dtype=torch.float64)
    number = number * torch.exp(1j * torch.arange(T, dtype=torch.float64)[:, None] * speed)
    return torch.cat((number.real, number.imag), -1)


def attention_by_hand(attention, shape, x_BTW, documents):
    """(largest logit, mean share of entropy), one query after the other."""
    logits, shares = [], []
    for x_TW, numbers in zip(x_BTW, documents, strict=True):
        for head in range(shape.heads):
            D, kv = shape.head_dim, head // (shape.heads // shape.kv_heads)
            q = x_TW @ attention.query.weight[head * D : (head + 1) * D].T
            k = x_TW @ attention.key.weight[kv * D : (kv + 1) * D].T
            if shape.qk_norm != "none":
                q, k = norm(q, attention.query_norm), norm(k, attention.key_norm)
            q, k = turned(q, shape.rope.theta), turned(k, shape.rope.theta)
            for t in range(len(x_TW)):
                row = [q[t] @ k[s] / math.sqrt(D) for s in range(t + 1) if numbers[s] == numbers[t]]
                logits += [abs(float(value)) for value in row]
                if len(row) > 1:
                    p = torch.softmax(torch.stack(row), 0)
                    shares.append(float(-(p * p.log()).sum()) / math.log(len(row)))
    return max(logits), sum(shares) / len(shares)


def blocks_by_hand(model, tokens_BT, documents):
    """For each block: what a look should say."""
    x = model.embedding.weight[tokens_BT]
    place = AttentionInputs(AttentionMask(documents), model.rotary.get(tokens_BT.shape[1], x.device, x.dtype))
    for block in model.blocks:
        inner = norm(x, block.attention_norm)
        logit, entropy = attention_by_hand(block.attention, model.shape, inner, documents)
        x = x + block.attention(inner, place)
        inner = norm(x, block.ffn_norm)
        gate, up = inner @ block.ffn.gate.weight.T, inner @ block.ffn.up.weight.T
        h = gate / (1 + torch.exp(-gate)) * up
        x = x + h @ block.ffn.down.weight.T
        largest = [float(h[..., f].abs().max()) for f in range(h.shape[-1])]
        usual = sorted(largest)[17]  # 9 of 10 units are at or below it
        units = [largest[f] <= 1e-3 * usual or gate[..., f].max() <= -8 for f in range(h.shape[-1])]
        open_ = [bool(gate[..., f].min() >= 8) for f in range(h.shape[-1])]
        yield {
            "rms": math.sqrt(float((x**2).mean())), "largest": float(x.abs().max()), "logit": logit, "entropy": entropy,
            "dead": sum(map(bool, units)) / len(units), "saturated": sum(open_) / len(open_),
        }  # fmt: skip


@pytest.mark.parametrize("qk_norm", ["none", "head"])
def test_activations_and_attention_are_those_of_the_formulas(qk_norm):
    model = random_model(qk_norm=qk_norm)
    with torch.no_grad():
        expected = list(blocks_by_hand(model, TOKENS, DOCUMENTS))
    found = LayerStats(model).sample(model, TOKENS, AttentionMask(DOCUMENTS)).read()["layers"]
    assert list(found) == ["blocks.0", "blocks.1"]
    for i, values in enumerate(expected):
        assert found[f"blocks.{i}"] == pytest.approx(values, rel=1e-10)


def test_without_a_mask_attention_is_causal():
    model = random_model()
    one = torch.zeros_like(DOCUMENTS)
    plain, masked = (LayerStats(model).sample(model, TOKENS, sight).read() for sight in (None, AttentionMask(one)))
    for name, values in plain["layers"].items():
        assert values == pytest.approx(masked["layers"][name], rel=1e-12)


def test_long_rows_are_sampled():
    model = random_model()
    tokens = torch.randint(0, 11, (1, 200))
    values = LayerStats(model).sample(model, tokens).read()["layers"]["blocks.1"]
    assert 0 < values["entropy"] < 1 and values["logit"] > 0


def test_dead_and_saturated_units_are_counted():
    """A constant direction in the norm's output opens or shuts a gate for good, whatever the tokens."""
    model = random_model(tied=False)
    with torch.no_grad():
        model.embedding.weight[:, 0] = 100.0  # after the norm its first component is about sqrt(12)
        for block in model.blocks:
            block.attention.out.weight.zero_()
            block.ffn_norm.weight.fill_(1.0)
            block.ffn.down.weight.zero_()
            block.ffn.gate.weight[:5, 0] = -20.0
            block.ffn.gate.weight[5:8, 0] = 20.0
            block.ffn.gate.weight[8:, 0] = 1.0
            block.ffn.up.weight[19] = 0.0
    for values in LayerStats(model).sample(model, TOKENS).read()["layers"].values():
        assert values["dead"] == pytest.approx(6 / 20) and values["saturated"] == pytest.approx(3 / 20)


def test_gradients_weights_and_updates_by_layer():
    model = random_model(tied=False)
    inside = LayerStats(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.logits(model(TOKENS)).square().mean().backward()
    groups = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(layer_of(name), []).append(parameter)
    gradients = {name: math.sqrt(sum(float((p.grad**2).sum()) for p in ps)) for name, ps in groups.items()}
    before = {name: math.sqrt(sum(float((p.detach() ** 2).sum()) for p in ps)) for name, ps in groups.items()}
    inside.record_gradients()
    optimizer.step()
    inside.record_updates()
    layers = inside.sample(model, TOKENS).read()["layers"]
    assert list(groups) == ["embedding", "blocks.0", "blocks.1", "norm", "head"]
    for name, parameters in groups.items():
        after = math.sqrt(sum(float((p.detach() ** 2).sum()) for p in parameters))
        assert layers[name]["grad_norm"] == pytest.approx(gradients[name], rel=1e-12)
        assert layers[name]["weight_norm"] == pytest.approx(after, rel=1e-12)
        # Small parameters are sampled in full, and the step of SGD is lr * gradient.
        assert layers[name]["update_ratio"] == pytest.approx(0.1 * gradients[name] / before[name], rel=1e-9)


def test_the_change_of_a_large_parameter_is_estimated_from_a_sample():
    model = random_model(vocab=20_001)
    inside = LayerStats(model)
    inside.record_gradients()
    weight = model.embedding.weight.detach()
    noise = 0.01 * torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    exact = float(noise.norm() / weight.norm())
    weight += noise
    inside.record_updates()
    found = inside.sample(model, TOKENS).read()["layers"]["embedding"]["update_ratio"]
    assert found == pytest.approx(exact, rel=0.05)


def test_a_vetoed_step_shows_no_update():
    model = random_model()
    inside = LayerStats(model)
    model(TOKENS).sum().backward()
    inside.record_gradients()
    inside.record_updates()
    assert all(v["update_ratio"] == 0 for v in inside.sample(model, TOKENS).read()["layers"].values())


def test_nothing_stays_behind():
    """No hook, no gradient, the same loss and gradients as without a look."""
    model = random_model()
    expected = model(TOKENS)
    LayerStats(model).sample(model, TOKENS)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(model(TOKENS), expected)

    def broken(*_):
        raise RuntimeError("inside the model")

    handle = model.norm.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="inside the model"):
        LayerStats(model).sample(model, TOKENS)
    handle.remove()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_look_under_bf16_and_a_nan_in_a_layer():
    model = random_model(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = LayerStats(model).sample(model, TOKENS).read()["layers"]
    full = LayerStats(model).sample(model, TOKENS).read()["layers"]
    assert low["blocks.1"]["rms"] == pytest.approx(full["blocks.1"]["rms"], rel=0.05)
    with torch.no_grad():
        model.blocks[1].ffn.up.weight[0, 0] = float("nan")
    layers = LayerStats(model).sample(model, TOKENS).read()["layers"]
    assert math.isfinite(layers["blocks.0"]["rms"]) and math.isnan(layers["blocks.1"]["rms"])


def test_logits_are_not_rounded_by_autocast():
    model = random_model(torch.float32)
    attention, shape = model.blocks[0].attention, model.shape
    x, rotary = torch.randn(1, 30, 12), model.rotary.get(30, torch.device("cpu"), torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logit, _ = attention_numbers(attention, x, AttentionInputs(AttentionMask(), rotary))
        q = rotate(attention.query(x).view(1, 30, shape.heads, -1), *rotary)[0].double()
        k = rotate(attention.key(x).view(1, 30, shape.kv_heads, -1), *rotary)[0].double()
    k = k.repeat_interleave(2, dim=1)
    expected = max(abs(float(q[t, h] @ k[s, h])) for h in range(4) for t in range(30) for s in range(t + 1))
    assert float(logit) == pytest.approx(expected / math.sqrt(6), rel=1e-6)


def test_silu_is_saturated_at_eight():
    gate = torch.tensor([-8.0, 8.0], dtype=torch.float64)
    assert float(F.silu(gate)[0]) == pytest.approx(0, abs=0.003)
    assert float(F.silu(gate)[1] / 8) == pytest.approx(1, abs=0.003)
