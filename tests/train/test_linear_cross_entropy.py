"""The chunked loss head against F.cross_entropy: values, both gradients, weights, chunks, precision."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from bessemer.train import loss as loss_module
from bessemer.train.loss import kept_gradients, linear_cross_entropy, token_losses


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """16 rows at a time, the fewest there are, so that small inputs have many chunks."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 1)
    monkeypatch.setattr(loss_module, "CHUNK_BYTES_GPU", 1)


def inputs(rows, vocab, width, seed=0, dtype=torch.float64, zeros=0.3):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator) * 2
    weights[torch.rand(rows, generator=generator) < zeros] = 0
    return hidden, head, targets, weights


def plain(hidden, head, targets, weights, scale):
    nll = F.cross_entropy(hidden @ head.T, targets, reduction="none")
    return (nll * weights).sum() * scale, nll


@given(
    rows=st.integers(1, 70),
    vocab=st.integers(1, 40),
    width=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    zeros=st.sampled_from([0.0, 0.3, 1.0]),
    scale=st.sampled_from([1.0, 1 / 512, 3.7]),
)
def test_equals_cross_entropy_in_float64(rows, vocab, width, seed, zeros, scale):
    hidden, head, targets, weights = inputs(rows, vocab, width, seed, zeros=zeros)
    ours, nll, correct = linear_cross_entropy(hidden, head, targets, weights, scale)
    theirs, their_nll = plain(hidden, head, targets, weights, scale)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(nll, their_nll.detach(), rtol=1e-11, atol=1e-12)
    assert torch.equal(correct, (hidden @ head.T).argmax(dim=-1) == targets)
    assert not nll.requires_grad and correct.dtype == torch.bool
    found = torch.autograd.grad(ours * 2.5, (hidden, head))
    expected = torch.autograd.grad(theirs * 2.5, (hidden, head))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 48])
@pytest.mark.parametrize("chunk_bytes", [1, 16 * 4 * 11, 20 * 4 * 11 + 1, 10**9])
def test_chunk_boundaries_change_nothing(rows, chunk_bytes, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk_bytes)
    hidden, head, targets, weights = inputs(rows, 11, 5, seed=rows)
    ours, nll, _ = linear_cross_entropy(hidden, head, targets, weights, 0.5)
    theirs, their_nll = plain(hidden, head, targets, weights, 0.5)
    torch.testing.assert_close(nll, their_nll.detach(), rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, head)), torch.autograd.grad(theirs, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_gradcheck():
    hidden, head, targets, weights = inputs(20, 7, 3, seed=4)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, targets, weights, 0.1)[0], (hidden, head), fast_mode=False
    )


def test_large_logits_do_not_overflow():
    hidden, head, targets, weights = inputs(20, 7, 3, seed=5, dtype=torch.float32)
    with torch.no_grad():
        hidden *= 1000
    ours, nll, _ = linear_cross_entropy(hidden, head, targets, weights, 1.0)
    _, their_nll = plain(hidden.double(), head.double(), targets, weights, 1.0)
    assert float(nll.max()) > 500
    torch.testing.assert_close(nll.double(), their_nll.detach(), rtol=1e-4, atol=1e-3)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(ours, (hidden, head)))


def padded(garbage):
    hidden, head, targets, weights = inputs(40, 9, 4, seed=6, zeros=0.0)
    clean = linear_cross_entropy(hidden, head, targets, weights, 1.0)[0]
    clean_grads = torch.autograd.grad(clean, (hidden, head))
    padding = torch.full((5, 4), garbage, dtype=torch.float64)
    longer = torch.cat((hidden.detach(), padding)).requires_grad_()
    more = (torch.cat((targets, torch.zeros(5, dtype=torch.long))), torch.cat((weights, torch.zeros(5))))
    ours, nll, _ = linear_cross_entropy(longer, head, *more, 1.0)
    grads = torch.autograd.grad(ours, (longer, head))
    return clean.detach(), clean_grads, ours.detach(), nll, grads


@pytest.mark.parametrize("garbage", [0.0, 1e6, -1e150])
def test_padding_rows_count_for_nothing(garbage):
    clean, clean_grads, ours, nll, grads = padded(garbage)
    torch.testing.assert_close(ours, clean, rtol=1e-13, atol=0)
    assert nll.shape == (45,)
    torch.testing.assert_close(grads[0][:40], clean_grads[0], rtol=1e-12, atol=0)
    assert not grads[0][40:].any()
    torch.testing.assert_close(grads[1], clean_grads[1], rtol=1e-12, atol=1e-13)


def test_a_loss_that_is_not_a_number_is_not_hidden():
    hidden, head, targets, weights = inputs(20, 7, 3, zeros=0.0)
    with torch.no_grad():
        hidden[3, 0] = float("nan")
    loss, nll, _ = linear_cross_entropy(hidden, head, targets, weights, 1.0)
    assert loss.isnan() and nll.isnan().nonzero().tolist() == [[3]]


def test_bf16_autocast_is_close_to_fp32():
    hidden, head, targets, weights = inputs(200, 50, 32, seed=7, dtype=torch.float32)
    exact = linear_cross_entropy(hidden, head, targets, weights, 1 / 200)
    exact_grads = torch.autograd.grad(exact[0], (hidden, head))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = linear_cross_entropy(hidden, head, targets, weights, 1 / 200)
    assert rounded[0].dtype == rounded[1].dtype == torch.float32
    assert rounded[0].item() == pytest.approx(exact[0].item(), rel=1e-2)
    assert not torch.equal(rounded[1], exact[1]), "nothing was rounded"
    torch.testing.assert_close(rounded[1], exact[1], rtol=0.05, atol=0.15)
    for a, b in zip(torch.autograd.grad(rounded[0], (hidden, head)), exact_grads, strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.02


def test_bf16_tensors_get_bf16_gradients_summed_in_fp32():
    hidden, head, targets, weights = inputs(200, 50, 32, seed=8, dtype=torch.bfloat16)
    loss, nll, _ = linear_cross_entropy(hidden, head, targets, weights, 1 / 200)
    assert loss.dtype == nll.dtype == torch.float32
    theirs, _ = plain(hidden.double(), head.double(), targets, weights, 1 / 200)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-2)
    for a, b in zip(
        torch.autograd.grad(loss, (hidden, head)), torch.autograd.grad(theirs, (hidden, head)), strict=True
    ):
        assert a.dtype == torch.bfloat16
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 0.02


def test_inputs_are_left_alone():
    tensors = inputs(40, 9, 4)
    before = [tensor.detach().clone() for tensor in tensors]
    linear_cross_entropy(*tensors, 1.0)[0].backward()
    assert all(torch.equal(a.detach(), b) for a, b in zip(tensors, before, strict=True))


def product_flops(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_evaluation_costs_one_product():
    rows, vocab, width = 48, 11, 5
    tensors = inputs(rows, vocab, width)
    once = 2 * rows * vocab * width
    assert product_flops(lambda: linear_cross_entropy(*tensors, 1.0)) > once
    with torch.no_grad():
        assert product_flops(lambda: linear_cross_entropy(*tensors, 1.0)) == once


@pytest.mark.parametrize("vocab", [64, 37])
@pytest.mark.parametrize("wants", [(True, True, False), (True, False, False), (False, True, False)])
def test_gradients_from_kept_ones_equal_those_computed_again(vocab, wants):
    """Of logits kept with a padded vocabulary, in float32."""
    hidden, head, targets, _ = inputs(45, vocab, 12, seed=3, dtype=torch.float32)
    row_grads = torch.randn(45, generator=torch.Generator().manual_seed(1))
    losses = token_losses(hidden, head, targets)
    expected = torch.autograd.grad(losses, (hidden, head), row_grads)
    logits = (hidden @ head.T).detach()
    kept = logits.softmax(-1) - F.one_hot(targets, vocab)
    kept = F.pad(kept, (0, -vocab % loss_module.WORDS_MULTIPLE))
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets, reduction="none"))
    found = kept_gradients(kept, hidden.detach(), head.detach(), row_grads, wants, torch.float32)
    for ours, reference, wanted in zip(found[:2], expected, wants[:2], strict=True):
        assert (ours is not None) == wanted
        if ours is not None:
            torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
    assert found[2] is None
