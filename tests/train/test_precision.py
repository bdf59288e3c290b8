"""What each precision computes in, and that fp32 on a GPU is fp32."""

import warnings

import pytest
import torch

from bessemer.train.compile import compute_in, compute_type, use_tf32

CPU = torch.device("cpu")
TYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8": torch.bfloat16, "fp8_rowwise": torch.bfloat16,
}  # fmt: skip
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(("precision", "dtype"), TYPES.items())
def test_layers_compute_in_the_asked_type_and_weights_stay(precision: str, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(16, 16)
    with compute_in(precision, CPU):
        y = layer(torch.randn(2, 16))
    y.float().sum().backward()
    assert y.dtype == compute_type(precision) == dtype
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32


def switches() -> tuple[str, bool]:
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("precision", TYPES)
def test_tf32_is_on_where_it_was_asked_for_and_the_former_setting_returns(precision: str) -> None:
    before = switches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with use_tf32(precision):
            assert switches() == (("high", True) if precision == "tf32" else ("highest", False))
            assert torch.backends.cuda.matmul.allow_tf32 is (precision == "tf32")  # torch.compile reads this one
            with use_tf32("fp32"):  # a step of a tf32 run that is run again
                assert switches() == ("highest", False)
            assert switches()[0] == ("high" if precision == "tf32" else "highest")
    assert switches() == before


def test_the_former_setting_returns_after_an_error() -> None:
    before = switches()
    with pytest.raises(RuntimeError), use_tf32("tf32"):
        raise RuntimeError
    assert switches() == before


@pytest.mark.gpu
@needs_cuda
def test_fp32_on_a_gpu_is_fp32_forward_and_backward() -> None:
    """TF32 has 10 bits of mantissa: errors near 3e-4, where fp32's are below 1e-6."""
    device = torch.device("cuda")
    a, b = (torch.randn(512, 512, device=device, requires_grad=True) for _ in range(2))
    signal, kernel = (torch.randn(*size, device=device, requires_grad=True) for size in ((4, 64, 256), (64, 64, 3)))

    def errors(precision: str) -> list[float]:
        found = []
        for make in (lambda x, y: x @ y, torch.nn.functional.conv1d):
            pair = (a, b) if make is not torch.nn.functional.conv1d else (signal, kernel)
            with use_tf32(precision):
                y = make(*pair)
                grads = torch.autograd.grad(y.square().sum(), pair)
            exact = [p.detach().double().requires_grad_() for p in pair]
            y_exact = make(*exact)
            wanted = torch.autograd.grad(y_exact.square().sum(), exact)
            for got, right in zip((y, *grads), (y_exact, *wanted), strict=True):
                found.append(float((got - right).norm() / right.norm()))
        return found

    assert max(errors("fp32")) < 2e-6
    assert min(errors("tf32")[:3]) > 5e-5
    assert max(errors("tf32")) < 2e-3
