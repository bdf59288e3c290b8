"""CTC against F.ctc_loss and against the sum over every alignment; rows and labels that cannot be are named."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from bessemer.errors import UserError
from bessemer.train.ctc import ctc_loss


def inputs(rows=3, steps=7, width=4, words=5, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden, head, bias = (
        torch.randn(*size, generator=generator, dtype=dtype).requires_grad_()
        for size in ((rows, steps, width), (words, width), (words,))
    )
    return hidden, head, bias, torch.tensor([[1, 2, 2, 3], [4, 1, 0, 0], [3, 3, 3, 0]])


def test_equals_torch_with_its_gradients():
    hidden, head, bias, targets = inputs()
    steps, labels = torch.tensor([7, 5, 5]), torch.tensor([4, 2, 3])
    ours_B, count_B, infeasible = ctc_loss(hidden, head, targets, steps, labels, bias_V=bias)
    ours, count = ours_B.sum(), count_B.sum()
    log_probs = (hidden @ head.T + bias).log_softmax(-1).transpose(0, 1)
    theirs = F.ctc_loss(log_probs, targets, steps, labels, reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert count == 9 and not infeasible.any()
    ours_grad, torch_grad = (torch.autograd.grad(loss, (hidden, head, bias)) for loss in (ours, theirs))
    torch.testing.assert_close(ours_grad, torch_grad)
    assert not ours_grad[0][1, 5:].any(), "beyond the row's own steps"


@pytest.mark.parametrize("blank", [0, 3])
def test_equals_the_sum_over_all_alignments(blank):
    words, steps, target = 4, 5, [1, 1, 2]
    hidden, head = torch.randn(1, steps, 3, dtype=torch.float64), torch.randn(words, 3, dtype=torch.float64)
    log_probs = (hidden @ head.T).log_softmax(-1)[0]
    paths = [
        sum(log_probs[step, word] for step, word in enumerate(path))
        for path in itertools.product(range(words), repeat=steps)
        if [word for word, _ in itertools.groupby(path) if word != blank] == target
    ]
    loss, _, _ = ctc_loss(hidden, head, torch.tensor([target]), torch.tensor([steps]), torch.tensor([3]), blank)
    torch.testing.assert_close(loss[0], -torch.logsumexp(torch.stack(paths), 0))


def test_the_fewest_steps_count_the_blanks_between_repeats():
    hidden, head, _, targets = inputs()
    labels = torch.tensor([4, 2, 3])
    assert ctc_loss(hidden, head, targets, torch.tensor([5, 2, 5]), labels)[0].isfinite().all()
    with pytest.raises(UserError, match=r"row 0 has 4 steps and its labels need 5 \(2 such rows\)"):
        ctc_loss(hidden, head, targets, torch.tensor([4, 2, 4]), labels)


def test_infeasible_rows_can_count_for_nothing():
    hidden, head, bias, targets = inputs()
    steps, labels = torch.tensor([7, 1, 0]), torch.tensor([4, 2, 3])
    loss, count, infeasible = ctc_loss(hidden, head, targets, steps, labels, bias_V=bias, skip_infeasible=True)
    alone = ctc_loss(hidden[:1], head, targets[:1], steps[:1], labels[:1], bias_V=bias)
    torch.testing.assert_close(loss[:1], alone[0])
    assert count.tolist() == [4, 0, 0] and not loss[1:].any() and infeasible.tolist() == [False, True, True]
    ours_grad, torch_grad = (torch.autograd.grad(each.sum(), (hidden, head, bias)) for each in (loss, alone[0]))
    torch.testing.assert_close(ours_grad, torch_grad)


def test_an_infinite_loss_of_the_models_own_is_not_hidden():
    hidden, head, bias, targets = inputs()
    with torch.no_grad():
        bias[1] = -torch.inf
    steps, labels = torch.tensor([7, 7, 2]), torch.tensor([4, 2, 3])
    loss, _, infeasible = ctc_loss(hidden, head, targets, steps, labels, bias_V=bias, skip_infeasible=True)
    assert loss.isinf().any() and infeasible.tolist() == [False, False, True]


@pytest.mark.parametrize("wrong", [0, 5, -1])
def test_a_blank_or_unknown_label_is_named(wrong):
    hidden, head, _, targets = inputs()
    targets[1, 1] = wrong
    with pytest.raises(UserError, match=f"row 1, label 1 is {wrong}; write labels from 0 to 4 other than the blank, 0"):
        ctc_loss(hidden, head, targets, torch.tensor([7, 7, 7]), torch.tensor([4, 2, 3]))


def test_bf16_is_summed_in_fp32():
    hidden, head, _, targets = inputs(dtype=torch.float32)
    lengths = torch.tensor([7, 7, 7]), torch.tensor([4, 2, 3])
    exact = ctc_loss(hidden, head, targets, *lengths)[0].sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = ctc_loss(hidden, head, targets, *lengths)[0].sum()
    assert rounded.dtype == torch.float32 and rounded.item() == pytest.approx(exact.item(), rel=2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_cpus_loss():
    hidden, head, bias, targets = inputs()
    lengths = torch.tensor([7, 1, 5]), torch.tensor([4, 2, 3])
    here = ctc_loss(hidden, head, targets, *lengths, bias_V=bias, skip_infeasible=True)
    moved = (t.detach().cuda().requires_grad_(t.requires_grad) for t in (hidden, head, targets, bias))
    hidden_there, head_there, targets_there, bias_there = moved
    there = ctc_loss(hidden_there, head_there, targets_there, *lengths, bias_V=bias_there, skip_infeasible=True)
    torch.testing.assert_close(there[0].cpu(), here[0])
    assert torch.equal(there[1].cpu(), here[1]) and torch.equal(there[2].cpu(), here[2])
    torch.testing.assert_close(
        torch.autograd.grad(there[0].sum(), hidden_there)[0].cpu(), torch.autograd.grad(here[0].sum(), hidden)[0]
    )
