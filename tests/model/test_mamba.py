"""The Mamba-2 mixer against its recurrence, one position after the other, and against transformers, in float64."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.families.bert_t5_mamba import MAMBA_NAMES
from bessemer.model.mamba import Mamba2, MambaCache, init_mamba
from bessemer.spec.shape import Mamba

WIDTH, EPS = 12, 1e-5
SMALL = Mamba(heads=4, head_dim=3, state=5, groups=2, conv=4, chunk=4)


def make(mamba: Mamba, seed: int = 0, dtype: torch.dtype = torch.float64) -> Mamba2:
    """A mixer in which every part matters: decays of all strengths, no weight at its first value."""
    generator = torch.Generator().manual_seed(seed)
    mixer = Mamba2(WIDTH, mamba, EPS).to(dtype)
    init_mamba(mixer, generator)
    with torch.no_grad():
        for parameter in mixer.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise / math.sqrt(parameter.shape[1]) if parameter.ndim == 2 else parameter + 0.5 * noise)
        mixer.step_bias.add_(3)
    return mixer


def rows(B: int, T: int, seed: int = 1) -> Tensor:
    noise = torch.randn(B, T, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise.requires_grad_()


def gradients(y: Tensor, *wanted: Tensor) -> list[Tensor]:
    """Of a loss in which every output has its own weight."""
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    return list(torch.autograd.grad((y * weights).sum(), wanted))


def recurrence(mixer: Mamba2, x_TW: Tensor) -> Tensor:
    """One document, position by position, head by head, from the formulas."""
    m = mixer.mamba
    inner, shared = m.heads * m.head_dim, m.groups * m.state
    states = [torch.zeros(m.head_dim, m.state, dtype=x_TW.dtype) for _ in range(m.heads)]
    inputs, outputs = [torch.zeros(inner + 2 * shared, dtype=x_TW.dtype)] * (m.conv - 1), []
    for x_W in x_TW:
        projected = mixer.input(x_W)
        gate, fresh, raw = projected[:inner], projected[inner : -m.heads], projected[-m.heads :]
        inputs.append(fresh)
        u = sum(mixer.conv.weight[:, 0, k] * inputs[k - m.conv] for k in range(m.conv))
        u = u + mixer.conv.bias if mixer.conv.bias is not None else u
        u = u / (1 + torch.exp(-u))
        x_HP = u[:inner].view(m.heads, m.head_dim)
        b_GN, c_GN = u[inner : inner + shared].view(m.groups, -1), u[inner + shared :].view(m.groups, -1)
        read = []
        for h in range(m.heads):
            group = h * m.groups // m.heads
            step = torch.log1p(torch.exp(raw[h] + mixer.step_bias[h])).clamp(*m.dt_limit)
            decay = torch.exp(-step * torch.exp(mixer.decay_log[h]))
            states[h] = decay * states[h] + step * torch.outer(x_HP[h], b_GN[group])
            read.append(states[h] @ c_GN[group] + mixer.skip[h] * x_HP[h])
        y = torch.cat(read) * gate / (1 + torch.exp(-gate))
        outputs.append(mixer.out(y / torch.sqrt((y * y).mean() + EPS) * mixer.norm.weight))
    return torch.stack(outputs)


@st.composite
def mambas(draw: st.DrawFn) -> Mamba:
    groups = draw(st.integers(1, 3))
    return Mamba(
        heads=groups * draw(st.integers(1, 3)), head_dim=draw(st.integers(1, 4)), state=draw(st.integers(1, 5)),
        groups=groups, conv=draw(st.integers(1, 4)), chunk=draw(st.integers(1, 6)), conv_bias=draw(st.booleans()),
        bias=draw(st.booleans()), dt_limit=draw(st.sampled_from([(0.0, math.inf), (0.5, 4.0)])),
    )  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(
    mamba=mambas(),
    B=st.integers(1, 2),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_a_packed_row_equals_the_recurrence_of_each_document(mamba: Mamba, B: int, cuts: list[int], seed: int) -> None:
    mixer, x_BTW = make(mamba, seed), rows(B, sum(cuts), seed)
    documents_BT = torch.repeat_interleave(torch.arange(len(cuts)), torch.tensor(cuts)).expand(B, -1)
    y_BTW = mixer(x_BTW, AttentionMask(documents_BT=documents_BT))
    expected = torch.stack([torch.cat([recurrence(mixer, part) for part in row.split(cuts)]) for row in x_BTW])
    torch.testing.assert_close(y_BTW, expected, atol=1e-9, rtol=1e-9)
    wanted = (x_BTW, *mixer.parameters())
    torch.testing.assert_close(gradients(y_BTW, *wanted), gradients(expected, *wanted), atol=1e-9, rtol=1e-9)


def test_a_packed_row_equals_its_documents_alone() -> None:
    mixer, x_BTW, cuts = make(SMALL), rows(1, 21), [1, 9, 2, 4, 5]  # inside a chunk, over several, at their borders
    documents_BT = torch.repeat_interleave(torch.tensor([7, 3, 4, 7, 0]), torch.tensor(cuts))[None]
    packed = mixer(x_BTW, AttentionMask(documents_BT=documents_BT))
    alone = torch.cat([mixer(part) for part in x_BTW.split(cuts, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-12, rtol=1e-12)
    wanted = (x_BTW, *mixer.parameters())
    torch.testing.assert_close(gradients(packed, *wanted), gradients(alone, *wanted), atol=1e-11, rtol=1e-11)
    assert (mixer(x_BTW) - packed).abs().max() > 1e-3  # the borders matter


@pytest.mark.parametrize("chunk", [1, 2, 5, 8, 23, 256])
def test_the_chunk_does_not_change_the_result(chunk: int) -> None:
    x_BTW = rows(2, 23)
    one, other = make(SMALL), make(replace(SMALL, chunk=chunk))
    torch.testing.assert_close(other(x_BTW), one(x_BTW), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("pieces", [[11, *[1] * 10], [1] * 21, [2, 7, 12], [21]])
def test_generation_continues_where_the_cache_ends(pieces: list[int]) -> None:
    mixer, x_BTW = make(replace(SMALL, dt_limit=(0.5, 4.0))), rows(2, 21)
    cache = mixer.new_cache()
    parts = [mixer(piece, None, cache) for piece in x_BTW.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), mixer(x_BTW), atol=1e-12, rtol=1e-12)
    assert cache.length == 21


def test_huge_steps_give_finite_gradients() -> None:
    mixer, x_BTW = make(replace(SMALL, chunk=64), dtype=torch.float32), rows(1, 64).detach().float().requires_grad_()
    with torch.no_grad():
        mixer.step_bias.fill_(30.0)
        mixer.decay_log.copy_(torch.tensor([-9.0, 0.0, 3.0, 6.0]))
    y_BTW = mixer(x_BTW)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(y_BTW, x_BTW, *mixer.parameters()))
    exact = copy.deepcopy(mixer).double()(x_BTW.double())
    torch.testing.assert_close(y_BTW.double(), exact, atol=1e-4, rtol=1e-3)


class Watched(TorchDispatchMode):
    """The types of all batched products, and the size of the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.products: set[torch.dtype] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bmm.default:
            self.products.add(out.dtype)
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def test_autocast_leaves_the_scan_in_float32() -> None:
    mixer, x_BTW = make(SMALL, dtype=torch.float32), rows(2, 30).detach().float()
    cache = MambaCache()
    with Watched() as watched, torch.autocast("cpu", torch.bfloat16):
        y_BTW = mixer(x_BTW, None, cache)
    assert y_BTW.dtype == torch.bfloat16
    assert watched.products == {torch.float32}
    assert cache.state_BGRPN is not None and cache.state_BGRPN.dtype == torch.float32
    exact = mixer(x_BTW)
    assert (y_BTW - exact).norm() < 0.02 * exact.norm()
    whole = copy.deepcopy(mixer).bfloat16()(x_BTW.bfloat16())
    assert (whole - exact).norm() < 0.03 * exact.norm()


def test_memory_grows_with_the_length_not_its_square() -> None:
    mixer, largest = make(replace(SMALL, chunk=32)), []
    for T in (512, 2048):
        with Watched() as watched, torch.no_grad():
            mixer(rows(1, T))
        largest.append(watched.largest)
    assert largest[1] == 4 * largest[0]


def test_initial_values_are_those_of_the_paper() -> None:
    mamba = Mamba(heads=2000, head_dim=1, state=1)
    mixers = [Mamba2(2, mamba, EPS) for _ in range(2)]
    for mixer in mixers:
        init_mamba(mixer, torch.Generator().manual_seed(5))
    mixer = mixers[0]
    torch.testing.assert_close(mixer.decay_log.exp(), torch.arange(1.0, 2001.0))
    steps = F.softplus(mixer.step_bias)
    assert 0.999e-3 < steps.min() < 1.1e-3 and 0.09 < steps.max() < 0.1001
    assert abs(steps.log10().mean() + 2) < 0.05 and abs((steps < 0.01).float().mean() - 0.5) < 0.05
    assert (mixer.skip == 1).all() and (mixer.norm.weight == 1).all() and (mixer.conv.bias == 0).all()
    assert 0.49 < mixer.conv.weight.abs().max() <= 0.5
    for name in ("step_bias", "conv.weight"):
        assert torch.equal(mixer.get_parameter(name), mixers[1].get_parameter(name))


def test_heads_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(UserError, match="5 heads cannot share 2 groups"):
        Mamba2(WIDTH, replace(SMALL, heads=5), EPS)


# Against transformers -------------------------------------------------------------------------------------------------


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' module, whose casts to float32 are casts to float64 for the time of a test."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    wide = {name: getattr(torch, name) for name in dir(torch)} | {"float32": torch.float64}
    monkeypatch.setattr(modeling, "torch", SimpleNamespace(**wide))
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    return modeling


def peer_config(modeling: Any, mamba: Mamba, **fields: Any) -> Any:
    return modeling.Mamba2Config(
        num_heads=mamba.heads, head_dim=mamba.head_dim, state_size=mamba.state, n_groups=mamba.groups,
        conv_kernel=mamba.conv, chunk_size=mamba.chunk, use_conv_bias=mamba.conv_bias, use_bias=mamba.bias,
        time_step_limit=mamba.dt_limit, hidden_size=WIDTH, expand=mamba.heads * mamba.head_dim // WIDTH,
        layer_norm_epsilon=EPS, vocab_size=31, num_hidden_layers=2, **fields,
    )  # fmt: skip


def peer_name(name: str) -> str:
    first, *rest = name.split(".")
    return ".".join([MAMBA_NAMES[first], *rest])


def copied(theirs: nn.Module, mamba: Mamba) -> Mamba2:
    """Ours with their weights; strict, so that nothing is left over on either side."""
    mixer, weights = Mamba2(WIDTH, mamba, EPS).double(), theirs.state_dict()
    assert len(weights) == len(mixer.state_dict())
    mixer.load_state_dict({name: weights[peer_name(name)] for name in mixer.state_dict()})
    return mixer


@pytest.mark.parametrize(
    "mamba",
    [
        SMALL,
        replace(SMALL, groups=4, head_dim=6, conv=2, conv_bias=False, bias=True),
        replace(SMALL, groups=1, chunk=7, dt_limit=(0.2, 1.5)),
    ],
)
def test_equals_the_mixer_of_transformers(peer: Any, mamba: Mamba) -> None:
    theirs = peer.Mamba2Mixer(peer_config(peer, mamba), layer_idx=0).double()
    mixer = make(mamba)
    theirs.load_state_dict({peer_name(name): weight for name, weight in mixer.state_dict().items()})
    x_BTW = rows(2, 17)
    ours_y, theirs_y = mixer(x_BTW), theirs(x_BTW)
    torch.testing.assert_close(ours_y, theirs_y, atol=1e-10, rtol=1e-10)
    names = [name for name, _ in mixer.named_parameters()]
    ours_g = gradients(ours_y, x_BTW, *(mixer.get_parameter(name) for name in names))
    theirs_g = gradients(theirs_y, x_BTW, *(theirs.get_parameter(peer_name(name)) for name in names))
    torch.testing.assert_close(ours_g, theirs_g, atol=1e-10, rtol=1e-10)


class InTheirPlace(nn.Module):
    def __init__(self, mixer: Mamba2) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return self.mixer(hidden_states)


def test_a_language_model_of_transformers_runs_with_our_mixer(peer: Any) -> None:
    torch.manual_seed(0)
    theirs = peer.Mamba2ForCausalLM(peer_config(peer, SMALL, residual_in_fp32=False)).double()
    ours = copy.deepcopy(theirs)
    for layer in ours.backbone.layers:
        layer.mixer = InTheirPlace(copied(layer.mixer, SMALL))
    tokens_BT = torch.randint(31, (2, 19))
    results = [model(tokens_BT, labels=tokens_BT, use_cache=False) for model in (ours, theirs)]
    torch.testing.assert_close(results[0].logits, results[1].logits, atol=1e-10, rtol=1e-10)
    for result in results:
        result.loss.backward()
    for mine, other in zip(ours.backbone.layers, theirs.backbone.layers, strict=True):
        for name, parameter in mine.mixer.mixer.named_parameters():
            expected = other.mixer.get_parameter(peer_name(name)).grad
            torch.testing.assert_close(parameter.grad, expected, atol=1e-11, rtol=1e-8)
            assert expected.abs().max() > 0
