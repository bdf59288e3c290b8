"""The kernels that choose tokens against `SamplingBatch.draw` and log_softmax. Without a GPU:

TRITON_INTERPRET=1 pytest tests/model/generate/test_draw_kernels.py
"""

import os

import pytest
import torch

from bessemer.model.generate.sampling import Sampling, SamplingBatch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [] if INTERPRETED else pytest.mark.gpu
HEATS = (0.0, 0.7, 1.0, 1.3, 1.0, 2.5)
SEEDS = (1, 2, 2**63 + 5, 2**62 + 7, 0, -3)


def on_device(*values, dtype=torch.int64):
    return torch.tensor(values, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 37, 5000])
def test_tokens_and_log_probabilities_are_those_of_the_torch_path(vocab, dtype):
    from bessemer.model.generate.draw_kernels import draw

    torch.manual_seed(vocab)
    logits = (3 * torch.randn(6, vocab + 8, device=DEVICE)).to(dtype)[:, :vocab]  # rows apart
    tempered = [False, True, False, True, True, False]
    settings = SamplingBatch.of([Sampling(h, seed=s) for h, s in zip(HEATS, SEEDS, strict=True)], DEVICE, tempered)
    slots, positions, tokens = on_device(5, 0, 2, 3, 6, 6), on_device(4, 9, 1, 100, 7, 20, 0), on_device(*[-1] * 7)
    expected = settings.draw(logits.float(), positions[slots] + 1)
    scored = logits.float() / on_device(1.0, 0.7, 1.0, 1.3, 1.0, 1.0, dtype=torch.float32)[:, None]
    logprobs = scored.log_softmax(-1).gather(1, expected[:, None])[:, 0]
    columns = settings.seed_B, settings.temperature_B.float(), settings.scored_heat_B.float()
    found = draw(logits, slots, tokens, positions, 6, columns)
    assert found[:, 0].tolist() == expected.tolist()
    torch.testing.assert_close(found[:, 1].float(), logprobs, rtol=1e-5, atol=1e-5)
    assert tokens[slots[:4]].tolist() == expected[:4].tolist()
    assert positions.tolist() == [5, 9, 2, 101, 7, 21, 0]  # the null slot stays where it is


def test_impossible_tokens_are_never_drawn():
    from bessemer.model.generate.draw_kernels import draw

    logits = torch.full((1, 3000), -torch.inf, device=DEVICE)  # whole parts without a token
    logits[0, 2500], logits[0, 2600] = 1.0, 2.0
    columns = on_device(5), on_device(1.0, dtype=torch.float32), on_device(1.0, dtype=torch.float32)
    ((token, logprob),) = draw(logits, on_device(0), on_device(0, 0), on_device(3, 0), 1, columns).tolist()
    assert token in (2500, 2600)
    assert logprob == pytest.approx(logits[0].log_softmax(-1)[int(token)].item(), abs=1e-6)


def test_the_first_of_equal_logits_is_taken():
    from bessemer.model.generate.draw_kernels import draw

    tokens, positions, slots = on_device(3, 9, 5), on_device(1, 8, 2), on_device(1)
    logits = torch.zeros(1, 10_001, dtype=torch.bfloat16, device=DEVICE)
    logits[0, [4_000, 4_001, 7_000]] = 2.0
    for step in range(3):
        assert draw(logits, slots, tokens, positions, 2)[0, 0] == 4_000
        assert tokens.tolist() == [3, 4_000, 5] and positions.tolist() == [1, 9 + step, 2]


def test_draws_follow_the_softmax():
    from bessemer.model.generate.draw_kernels import draw

    rows, heat = 200 if INTERPRETED else 10_000, 0.8
    logits = torch.linspace(-1, 1, 5, device=DEVICE)
    columns = (
        torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.full((rows,), heat, device=DEVICE),
        torch.ones(rows, device=DEVICE),
    )  # fmt: skip
    slots, positions = torch.arange(rows, device=DEVICE), torch.arange(rows + 1, device=DEVICE)
    drawn = draw(logits.expand(rows, -1), slots, torch.zeros_like(positions), positions, rows, columns)[:, 0]
    counts = drawn.long().bincount(minlength=5).cpu()
    expected = (logits.double().cpu() / heat).softmax(-1) * rows
    assert ((counts - expected).square() / expected).sum() < 18.47  # chi-square of 4 degrees of freedom: p > 0.001
