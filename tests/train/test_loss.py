"""Options of the chunked loss head against autograd of the plain formula, and the loss of classification heads."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bessemer.errors import UserError
from bessemer.train import loss as loss_module
from bessemer.train.loss import LossOptions, classification_loss, linear_cross_entropy

ALL = LossOptions(logit_scale=0.7, logit_cap=5.0, smoothing=0.1, focal=1.5, z=1e-2)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """16 rows at a time, the fewest there are, so that small inputs have many chunks."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 1)


def inputs(rows, vocab, width, seed=0, dtype=torch.float64, zeros=0.3):
    generator = torch.Generator().manual_seed(seed)
    hidden, head, bias = (
        torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for size in ((rows, width), (vocab, width), (vocab,))
    )
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator) * 2
    weights[torch.rand(rows, generator=generator) < zeros] = 0
    return hidden, head, bias, targets, weights


def formula(hidden, head, bias, targets, weights, scale, options):
    """What LossOptions says, with the logits in memory."""
    logits = hidden @ head.T if bias is None else hidden @ head.T + bias
    logits = logits * options.logit_scale
    if options.logit_cap is not None:
        logits = options.logit_cap * torch.tanh(logits / options.logit_cap)
    nll = F.cross_entropy(logits, targets, reduction="none")
    loss = F.cross_entropy(logits, targets, reduction="none", label_smoothing=options.smoothing)
    if options.focal:
        loss = (1 - torch.exp(-nll)) ** options.focal * loss
    loss = loss + options.z * torch.logsumexp(logits, dim=-1) ** 2
    return (loss * weights).sum() * scale, nll.detach(), logits.argmax(dim=-1) == targets


any_options = st.builds(
    LossOptions,
    logit_scale=st.sampled_from([1.0, 0.0625, 1.3]),
    logit_cap=st.sampled_from([None, 1.5, 30.0]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    focal=st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.7]),
    z=st.sampled_from([0.0, 1e-4, 0.3]),
)


@settings(max_examples=150)
@given(
    options=any_options,
    biased=st.booleans(),
    rows=st.integers(1, 50),
    vocab=st.integers(2, 40),
    seed=st.integers(0, 10**6),
    zeros=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_any_options_equal_the_formula(options, biased, rows, vocab, seed, zeros):
    hidden, head, bias, targets, weights = inputs(rows, vocab, 4, seed, zeros=zeros)
    used = bias if biased else None
    ours, nll, correct = linear_cross_entropy(hidden, head, targets, weights, 0.3, options, used)
    theirs, their_nll, their_correct = formula(hidden, head, used, targets, weights, 0.3, options)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(nll, their_nll, rtol=1e-11, atol=1e-12)
    assert torch.equal(correct, their_correct)
    leaves = (hidden, head, bias) if biased else (hidden, head)
    found, expected = (torch.autograd.grad(loss * 2.5, leaves) for loss in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


single = [LossOptions(logit_scale=0.5), LossOptions(logit_cap=3.0), LossOptions(smoothing=0.2), LossOptions(focal=2.0)]


@pytest.mark.parametrize("options", [*single, LossOptions(z=0.1), LossOptions(focal=0.5, smoothing=0.3), ALL], ids=str)
def test_gradcheck(options):
    hidden, head, bias, targets, weights = inputs(18, 5, 3, seed=4)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, targets, weights, 0.1, options, b)[0], (hidden, head, bias)
    )


def test_label_smoothing_is_torchs():
    hidden, head, _, targets, _ = inputs(30, 9, 4)
    ours = linear_cross_entropy(hidden, head, targets, torch.ones(30), 1 / 30, LossOptions(smoothing=0.1))[0]
    torch.testing.assert_close(ours, F.cross_entropy(hidden @ head.T, targets, label_smoothing=0.1))


def test_focal_and_z_of_known_probabilities():
    """Two words, logits 0 and ln 3: p = 1/4 for the target, logsumexp = ln 4."""
    hidden, head = torch.ones(1, 1), torch.tensor([[0.0], [math.log(3)]])
    loss, nll, _ = linear_cross_entropy(
        hidden, head, torch.tensor([0]), torch.ones(1), 1.0, LossOptions(focal=2.0, z=0.5)
    )
    assert nll.item() == pytest.approx(math.log(4))
    assert loss.item() == pytest.approx(0.75**2 * math.log(4) + 0.5 * math.log(4) ** 2)


def former(hidden, head, targets, weights, scale, compute):
    """The head before it had options, chunk by chunk of 16 rows: the bits that plain settings must keep giving."""
    h, w = hidden.detach().to(compute), head.detach().to(compute)
    grad_h, grad_w = torch.empty_like(hidden), torch.zeros_like(head)
    nll = torch.empty(len(h))
    for start in range(0, len(h), 16):
        part = slice(start, start + 16)
        logits = (h[part] @ w.t()).float()
        logits.sub_(logits.max(dim=-1)[0][:, None])
        at_target = logits.gather(1, targets[part, None])[:, 0]
        sums = logits.exp_().sum(dim=-1)
        nll[part] = sums.log() - at_target
        weight = weights[part] * scale
        grad = logits.mul_((weight / sums)[:, None])
        grad.scatter_add_(1, targets[part, None], -weight[:, None])
        grad = grad.to(compute)
        grad_h[part] = grad @ w
        if compute == torch.float32:
            grad_w.addmm_(grad.t(), h[part])
        else:
            grad_w.add_(grad.t() @ h[part])
    return (nll * weights).sum() * scale, nll, grad_h, grad_w


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [None, LossOptions()], ids=["none", "defaults"])
def test_plain_settings_give_the_former_bits(options, compute):
    hidden, head, _, targets, weights = inputs(100, 37, 24, seed=9, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute == torch.bfloat16):
        loss, nll, _ = linear_cross_entropy(hidden, head, targets, weights, 1 / 77, options)
    found = (loss.detach(), nll, *torch.autograd.grad(loss, (hidden, head)))
    expected = former(hidden, head, targets, weights, 1 / 77, compute)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", [1e4, 1e2])
@pytest.mark.parametrize("options", [*single, LossOptions(focal=0.3, smoothing=0.1), LossOptions(z=1e-4), ALL], ids=str)
def test_extreme_logits_stay_finite(options, size):
    """Logits of 1e4 in fp32, both for surely right and surely wrong rows."""
    head = torch.eye(4).requires_grad_()
    bias = torch.zeros(4, requires_grad=True)
    hidden = (torch.eye(4) * size).repeat(2, 1).requires_grad_()
    targets = torch.tensor([0, 1, 2, 3, 1, 2, 3, 0])
    loss, nll, correct = linear_cross_entropy(hidden, head, targets, torch.ones(8), 1 / 8, options, bias)
    grads = torch.autograd.grad(loss, (hidden, head, bias))
    assert loss.isfinite() and nll.isfinite().all() and correct.tolist() == [True] * 4 + [False] * 4
    assert all(grad.isfinite().all() for grad in grads)
    exact = [t.detach().double().requires_grad_() for t in (hidden, head, bias)]
    theirs = formula(*exact, targets, torch.ones(8), 1 / 8, options)[0]
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-3)


def test_a_loss_that_is_not_a_number_is_not_hidden():
    hidden, head, bias, targets, weights = inputs(20, 7, 3, zeros=0.0)
    with torch.no_grad():
        hidden[3, 0] = float("nan")
    loss, nll, _ = linear_cross_entropy(hidden, head, targets, weights, 1.0, ALL, bias)
    assert loss.isnan() and nll.isnan().nonzero().tolist() == [[3]]


def test_bf16_autocast_is_close_to_fp32_and_returns_fp32():
    hidden, head, bias, targets, weights = inputs(200, 50, 32, seed=7, dtype=torch.float32)
    exact = linear_cross_entropy(hidden, head, targets, weights, 1 / 200, ALL, bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = linear_cross_entropy(hidden, head, targets, weights, 1 / 200, ALL, bias)
    assert rounded[0].dtype == rounded[1].dtype == torch.float32
    assert not torch.equal(rounded[1], exact[1]), "nothing was rounded"
    assert rounded[0].item() == pytest.approx(exact[0].item(), rel=1e-2)
    found, expected = (torch.autograd.grad(result[0], (hidden, head, bias)) for result in (rounded, exact))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.02


class Watch(TorchDispatchMode):
    """Counts matrix products, and keeps the most elements of any tensor made inside."""

    products = 0
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func._opname in ("mm", "addmm_")
        for tensor in out if isinstance(out, tuple | list) else (out,):
            self.largest = max(self.largest, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("options", [None, ALL], ids=["plain", "all"])
def test_no_tensor_holds_all_logits(options):
    hidden, head, bias, targets, weights = inputs(640, 50, 4, dtype=torch.float32)
    with Watch() as watch:
        loss, _, _ = linear_cross_entropy(hidden, head, targets, weights, 1.0, options, bias if options else None)
        loss.backward()
    assert watch.largest == 640 * 4, "of the hidden states; a chunk of logits has 16 * 50"


@pytest.mark.parametrize(
    ("learns", "products"), [([0, 1, 2], 3), ([0, 1], 3), ([0], 2), ([1], 2), ([2], 1), ([], 1)], ids=str
)
def test_what_is_frozen_costs_no_product(learns, products):
    *leaves, targets, weights = inputs(12, 11, 5)
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i in learns)
    hidden, head, bias = leaves
    with Watch() as watch:
        loss = linear_cross_entropy(hidden, head, targets, weights, 1.0, ALL, bias)[0]
    assert watch.products == products
    if learns:
        loss.backward()
    assert [i for i, leaf in enumerate(leaves) if leaf.grad is not None] == learns


impossible = {
    "smoothing": (1.2, -0.1),
    "focal": (-1.0,),
    "z": (math.nan,),
    "logit_cap": (0.0,),
    "logit_scale": (0.0, math.inf),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in impossible.items() for value in values])
def test_impossible_options_are_refused_by_name(name, value):
    with pytest.raises(UserError, match=f"{name} is {value}"):
        replace(LossOptions(), **{name: value})


@pytest.mark.parametrize("shape", [(6,), (4, 7)], ids=["sequences", "tokens"])
def test_classification_equals_cross_entropy(shape):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(*shape, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 5, shape, generator=generator)
    labels.view(-1)[::3] = -100
    loss, count, correct = classification_loss(logits, labels)
    kept = labels != -100
    theirs = F.cross_entropy(logits[kept], labels[kept], reduction="sum")
    torch.testing.assert_close(loss, theirs, rtol=1e-13, atol=1e-13)
    assert count == kept.sum() and correct == (logits.argmax(-1) == labels)[kept].sum()
    found, expected = torch.autograd.grad(loss, logits), torch.autograd.grad(theirs, logits)
    torch.testing.assert_close(found, expected)


def test_classification_weights_count_and_ignored_labels_do_not():
    logits = torch.tensor([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [0.0, 0.0]], dtype=torch.bfloat16)
    labels, weights = torch.tensor([0, 0, -100, 1]), torch.tensor([1.0, 0.0, 5.0, 0.5])
    loss, count, correct = classification_loss(logits, labels, weights)
    assert loss.dtype == torch.float32 and count.item() == 1.5 and correct.item() == 1
    assert loss.item() == pytest.approx(math.log1p(math.exp(-9)) + 0.5 * math.log(2), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_options_on_a_gpu_equal_the_formula_in_float64():
    hidden, head, bias, targets, weights = (t.detach().cuda() for t in inputs(300, 500, 32, seed=2, zeros=0.0))
    leaves = [t.requires_grad_() for t in (hidden, head, bias)]
    ours = linear_cross_entropy(hidden, head, targets, weights, 1 / 300, ALL, bias)[0]
    theirs = formula(hidden, head, bias, targets, weights, 1 / 300, ALL)[0]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves))
