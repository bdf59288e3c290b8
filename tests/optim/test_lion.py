"""Lion against its paper, written out in float64."""

import pytest
import torch
from torch import nn

from bessemer.optim.choose import Lion


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.3, 0.2)])
def test_equals_the_paper_in_float64(betas):
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in ((4, 3), (5,))]
    expected = [w.detach().clone() for w in weights]
    momentum = [torch.zeros_like(w) for w in expected]
    groups = [{"params": weights[:1], "weight_decay": 0.3}, {"params": weights[1:], "weight_decay": 0.0}]
    optimizer = Lion(groups, lr=0.0, betas=betas)
    for step in range(100):
        lr = 0.002 * (step + 1)
        grads = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in weights]
        for i, decay in enumerate((0.3, 0.0)):
            weights[i].grad = grads[i].clone()
            update = torch.sign(betas[0] * momentum[i] + (1 - betas[0]) * grads[i])
            expected[i] = expected[i] - lr * (update + decay * expected[i])
            momentum[i] = betas[1] * momentum[i] + (1 - betas[1]) * grads[i]
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        for i, weight in enumerate(weights):
            torch.testing.assert_close(weight.detach(), expected[i], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(optimizer.state[weight]["exp_avg"], momentum[i], rtol=1e-12, atol=1e-14)
            assert torch.equal(weight.grad, grads[i]), "gradients are read and not written"


def test_a_parameter_without_a_gradient_stays():
    still, moved = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = Lion([still, moved], lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
    optimizer.step()
    assert torch.equal(moved.detach(), torch.ones(3))
    moved.grad = torch.tensor([1.0, -1.0, 0.0])
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(3))
    torch.testing.assert_close(moved.detach(), torch.tensor([0.89, 1.09, 0.99]))
