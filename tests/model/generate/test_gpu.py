"""Generation on a GPU: the decoding kernel, CUDA graphs, compiled blocks and the host one step behind."""

import random

import pytest
import torch

from bessemer.model.attention import attend_reference
from bessemer.model.generate import Generator, Request, Sampling
from bessemer.model.generate.cache import SlotKV
from bessemer.spec.shape import Mamba, Mla

pytestmark = pytest.mark.gpu

SHAPES = {
    "grouped": {"width": 64, "heads": 4, "kv_heads": 2},
    "windows": {"width": 64, "heads": 4, "kv_heads": 4, "windows": (5, 0)},
    "capped": {"width": 64, "heads": 4, "kv_heads": 2, "attention_cap": 20.0},
    "learned": {"width": 64, "heads": 4, "kv_heads": 4, "positions": "learned", "max_positions": 256},
    "alibi": {"width": 64, "heads": 4, "kv_heads": 4, "positions": "alibi"},
    "mamba": {"width": 48, "mixers": ("mamba", "attention"), "mamba": Mamba(heads=4, head_dim=24, state=8, chunk=8)},
    "latent": {"width": 64, "heads": 4, "kv_heads": 4, "mla": Mla(kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)},
}


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 2, 64), (4, 4, 80), (16, 1, 128)])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("cap", [None, 5.0])
def test_the_kernel_against_the_reference(heads, kv_heads, size, window, cap):
    from bessemer.model.generate.kernels import decode_attention

    torch.manual_seed(0)
    B, C, S = 5, 7, 300
    q = torch.randn(B, heads, size, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(C, S, kv_heads, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slots, starts = torch.tensor([6, 0, 3, 2, 5], device="cuda"), torch.tensor([0, 299, 63, 64, 150], device="cuda")
    out = decode_attention(q, k, v, slots, starts, window, size**-0.5, cap)
    keys = torch.arange(S, device="cuda")
    mask = keys <= starts[:, None]
    if window:
        mask &= starts[:, None] - keys < window
    k_BKSD, v_BKSD = (x[slots].transpose(1, 2).double() for x in (k, v))
    expected = attend_reference(q[:, :, None].double(), k_BKSD, v_BKSD, mask[:, None, None], size**-0.5, cap)
    torch.testing.assert_close(out.double(), expected[:, :, 0], rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (3000, 513), (128, 8192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_product_of_a_single_row_against_fp64(outputs, inputs, dtype):
    from bessemer.model.generate.kernels import single_row_product

    torch.manual_seed(0)
    x = torch.randn(inputs, device="cuda", dtype=dtype)
    weight = torch.randn(outputs, 2 * inputs, device="cuda", dtype=dtype)[:, :inputs]  # rows apart
    expected = (weight.double() @ x.double()).to(dtype)
    torch.testing.assert_close(single_row_product(x, weight), expected, rtol=8e-3, atol=2e-3 * inputs**0.5)


def requests(count, seed=0):
    draw = random.Random(seed)
    return [
        Request(
            [draw.randrange(37) for _ in range(draw.randint(1, 60))], draw.randint(1, 40),
            Sampling(0 if i % 2 else 0.9, seed=i, top_p=0.95), top_logprobs=1,
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in SHAPES), ("grouped", True), ("learned", True)]
)
def test_answers_follow_the_models_own_distribution(name, compiled, shape_of, build_random):
    """Every token's log-probability against a forward pass of the complete text in float64 on the CPU."""
    reference = build_random(shape_of(**SHAPES[name])).eval().to(torch.bfloat16).double()
    model = build_random(shape_of(**SHAPES[name])).eval().to("cuda", torch.bfloat16)
    work, generator = requests(14), Generator(model, slots=4, max_length=128, compiled=compiled)
    for _ in range(2):  # the second time slots and graphs are reused
        for request, (completion,) in zip(work, generator.run(work), strict=True):
            assert completion.reason == "length" and len(completion.tokens) == request.max_tokens
            with torch.no_grad():
                logits = reference.logits(reference(torch.tensor([[*request.prompt, *completion.tokens]])))[0]
            expected = logits.log_softmax(-1)[len(request.prompt) - 1 : -1]
            expected = expected.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(completion.logprobs, dtype=torch.float64), expected.double(), rtol=0.1, atol=0.15
            )


def test_decoding_runs_as_graphs_and_grows(shape_of, build_random):
    model = build_random(shape_of(**SHAPES["grouped"])).eval().to("cuda", torch.bfloat16)
    generator = Generator(model, slots=4, max_length=512)
    (short,) = generator.run([Request([1, 2, 3], 20, Sampling(0))])[0]
    assert generator.runner.graphs and generator.runner.batch.allocated == 64
    (long,) = generator.run([Request([1, 2, 3], 200, Sampling(0))])[0]
    assert generator.runner.batch.allocated == 256 and long.tokens[:20] == short.tokens
    assert isinstance(generator.runner.caches.layers[0], SlotKV)
    assert generator.runner.caches.layers[0].keys.shape[:2] == (5, 256)


@pytest.mark.parametrize("compiled", [False, True])
def test_greedy_rows_alone_and_beside_sampled_ones(compiled, shape_of, build_random):
    model = build_random(shape_of(**SHAPES["grouped"])).eval().to("cuda", torch.bfloat16)
    generator = Generator(model, slots=4, max_length=128, compiled=compiled)
    greedy = [Request([i + 1, 2, 3], 12, Sampling(0)) for i in range(3)]
    sampled = Request([9, 9], 30, Sampling(1.0, seed=3))
    alone = [c.tokens for (c,) in generator.run(greedy)]
    assert (4, "greedy") in generator.runner.graphs
    mixed = [c.tokens for (c,) in generator.run([sampled, *greedy])]
    # The sizes of the graphs are equal, so the roundings are.
    assert mixed[1:] == alone


def test_the_host_is_one_step_behind_and_tokens_are_the_same(shape_of, build_random):
    model = build_random(shape_of(**SHAPES["grouped"])).eval().to("cuda", torch.bfloat16)
    behind, together = Generator(model, slots=3, max_length=128), Generator(model, slots=3, max_length=128)
    together.in_flight = 0
    work = requests(10, seed=4)
    tokens = [[c.tokens for (c,) in generator.run(work)] for generator in (behind, together)]
    assert tokens[0] == tokens[1]


SINGLE = {"width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 48}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("windows", [(0,), (9, 0)])
def test_the_kernels_of_a_single_row_against_fp64(overlap, windows, shape_of, build_random):
    """One request at a time, in slot 0 of 3: log-probabilities and greedy tokens of the model's own distribution."""
    shape = shape_of(**SINGLE, windows=windows)
    reference = build_random(shape).eval().to(torch.bfloat16).double()
    model = build_random(shape).eval().to("cuda", torch.bfloat16)
    generator = Generator(model, slots=3, max_length=400, compiled=True)
    assert generator.runner.single_row is not None
    generator.runner.single_row.overlap &= overlap
    for logprobs in (1, 0, None):  # a graph of logits, one that draws, and a greedy one
        request = Request([3, 1, 4], 300, Sampling(0), top_logprobs=logprobs)
        ((completion,),) = generator.run([request])
        assert generator.runner.single_row is not None, "the kernels failed"
        with torch.no_grad():
            logits = reference.logits(reference(torch.tensor([[3, 1, 4, *completion.tokens]])))[0, 2:-1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert (logits.max(-1).values - logits.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]).max() < 0.15
        if logprobs is not None:
            found = torch.tensor(completion.logprobs, dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=0.1, atol=0.15)


@pytest.mark.parametrize("compiled", [False, True])
def test_graphs_draw_what_the_torch_path_draws(compiled, shape_of, build_random):
    """Tokens and their log-probabilities, raw and tempered, of rows that end at different times."""
    model = build_random(shape_of(**SHAPES["grouped"])).eval().to("cuda", torch.bfloat16)
    work = [
        Request(
            [i + 1, 2, 3], 8 + 5 * i, Sampling(heat, seed=i), frozenset([36]), top_logprobs=0, tempered_logprobs=i > 2,
        )
        for i, heat in enumerate((1.0, 0.7, 0.0, 1.3, 1.0, 0.5, 2.0))
    ]  # fmt: skip
    kernel, plain = (Generator(model, slots=4, max_length=128, compiled=compiled) for _ in range(2))
    plain.runner.draws = False
    drawn, expected = ([c for (c,) in generator.run(work)] for generator in (kernel, plain))
    assert any(kind == "sampled" for _, kind in kernel.runner.graphs)
    assert not any(kind == "sampled" for _, kind in plain.runner.graphs)
    for ours, theirs in zip(drawn, expected, strict=True):
        assert ours.tokens == theirs.tokens and ours.reason == theirs.reason
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert ours.stop_logprob == (None if theirs.stop is None else pytest.approx(theirs.stop_logprob, abs=1e-4))
