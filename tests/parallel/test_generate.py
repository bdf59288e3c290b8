"""Generation with a model that a layout has placed: every rank gets the tokens of a single process."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._composable.replicate  # imported before the fork, once for all
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel

from bessemer.errors import UserError
from bessemer.model.generate import Completion, Generator, NgramDrafter, Request, Sampling
from bessemer.model.transformer import Decoder, build_model
from bessemer.parallel.generate import TensorParallelDecoder, gathered
from bessemer.parallel.shard import copy_shard, shard_or_replicate
from bessemer.parallel.world import World, join_process_group
from bessemer.plan.search.layout import Layout, check_layout
from bessemer.session.build import parallelize_layers
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import Mla, ModelShape, Moe

Ranks = Callable[..., list[Any]]
CPU = torch.device("cpu")
SIZES = {"vocab": 40, "width": 24, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 40}
EXPERTS = Moe(experts=4, top_k=2, ffn=16, shared=1, choice_bias=True)
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {"tied": False},
    "biases": {
        "qkv_bias": True, "out_bias": True, "ffn_bias": True, "qk_norm": "head", "vocab": 37, "tied": True,
        "windows": (5, 0, 5), "norm_place": "sandwich",
    },
    "latent": {"kv_heads": 4, "mla": Mla(kv_rank=10, nope_dim=6, rope_dim=4, value_dim=8)},
    "experts": {"moe": EXPERTS},
    "learned": {
        "positions": "learned", "max_positions": 128, "norm": "layer", "norm_place": "post", "gated": False,
        "qkv_bias": True, "out_bias": True, "ffn_bias": True, "head_bias": True, "tied": True, "kv_heads": 4,
    },
    "one norm": {"tied": False, "parallel": "one_norm", "logit_cap": 5.0, "logit_scale": 0.7, "kv_heads": 4},
}  # fmt: skip


def shape_of(name: str) -> ModelShape:
    return ModelShape(**(SIZES | SHAPES[name]))


def random_model(name: str, seed: int = 0) -> Decoder:
    """In float64, with norms and biases that matter."""
    model = build_model(shape_of(name), "cpu", seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5)
        for buffer in model.buffers():
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return model


def run_spec(sequence: bool = True) -> RunSpec:
    data = {"sources": {"words": {"path": ["words.jsonl"]}}, "context": 32}
    return RunSpec.model_validate({"model": {"width": 24}, "data": data, "parallel": {"sequence": sequence}})


def place(model: Decoder, world: World, sequence: bool = True) -> Decoder:
    """As `session.build.make_job` does."""
    spec = run_spec(sequence)
    stages = (range(2), range(2, 3)) if world.layout.pp > 1 else ()
    pipeline = parallelize_layers(model, world, spec, stages)
    shard_or_replicate(model, world, False, spec.parallel, pipeline.stages if pipeline else ())
    return model


def join(layout: Layout) -> World:
    world = join_process_group(CPU)
    world.set_layout(layout)
    return world


def ragged_requests(count: int, seed: int = 0) -> list[Request]:
    draw = random.Random(seed)
    work = [
        Request(
            [draw.randrange(37) for _ in range(draw.randint(1, 20))], draw.randint(1, 12),
            Sampling(0 if i % 2 else 0.9, seed=i, top_p=0.95, repetition_penalty=1.1 if i == 2 else 1.0),
            stop_ids=frozenset({3}), top_logprobs=2,
        )
        for i in range(count)
    ]  # fmt: skip
    return [*work, replace(work[0], samples=3), replace(work[-1], prompt=[*work[-1].prompt, 5])] if work else []


def run(model: Decoder, work: list[Request]) -> list[Completion]:
    assert not model.training
    completions = Generator(model, slots=3, max_length=128).run(work)
    return [completion for samples in completions for completion in samples]


def alone(name: str, work: list[Request]) -> list[Completion]:
    return run(random_model(name).eval(), work)


def assert_same(actual: list[Completion], expected: list[Completion]) -> None:
    assert [(x.tokens, x.reason, x.stop) for x in actual] == [(x.tokens, x.reason, x.stop) for x in expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, rel=0, abs=1e-9)
        assert [list(top) for top in ours.top] == [list(top) for top in theirs.top]


def generate_placed(layout: Layout, names: list[str], work: list[list[Request]], sequence: bool = True) -> Any:
    """The completions of this rank's requests, by name of the model."""
    world, results = join(layout), {}
    for name in names:
        model = place(random_model(name), world, sequence)
        with gathered(model, world) as local_model:
            results[name] = run(local_model, work[world.dp_rank])
        assert model.training  # the copy alone was switched to evaluation
    return results


def check_ranks(ranks: Ranks, layout: Layout, names: list[str], counts: list[int], sequence: bool = True) -> None:
    work = [ragged_requests(count, seed) for seed, count in enumerate(counts)]
    results = ranks(layout.size, generate_placed, layout, names, work, sequence)
    for name in names:
        expected = [alone(name, requests) for requests in work]
        for rank, result in enumerate(results):
            assert_same(result[name], expected[rank // layout.tp % len(work)])


def test_tensor_parallel(ranks: Ranks) -> None:
    check_ranks(ranks, Layout(tp=2), ["grouped", "biases"], [5])


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence", [True, False])
def test_tensor_parallel_families(tp: int, sequence: bool, ranks: Ranks) -> None:
    names = ["learned", "one norm"] if tp == 4 else ["grouped", "biases", "learned", "one norm"]
    check_ranks(ranks, Layout(tp=tp), names, [9], sequence)


def test_shards_with_different_numbers_of_requests(ranks: Ranks) -> None:
    check_ranks(ranks, Layout(dp_shard=2), ["grouped", "latent", "experts"], [5, 2])


@pytest.mark.slow
def test_a_rank_without_requests(ranks: Ranks) -> None:
    check_ranks(ranks, Layout(dp_shard=2), ["grouped", "experts"], [4, 0])


@pytest.mark.slow
def test_tensors_in_shards(ranks: Ranks) -> None:
    check_ranks(ranks, Layout(dp_shard=2, tp=2), ["grouped", "biases"], [5, 2])


def test_replicas_and_divided_experts(ranks: Ranks) -> None:
    """With the exchange of rows, experts of other ranks would need a pass of every rank for each of one."""
    check_ranks(ranks, Layout(dp_replicate=2), ["experts"], [3, 1])
    check_ranks(ranks, Layout(dp_shard=2, ep=2), ["experts"], [3, 1])


def generate_during_training(layout: Layout, generates: bool) -> Any:
    """Two optimizer steps, with generation before each and after the last. The completions of each time, those of a
    generator for a new model with the same weights, and the gradients of the second step."""
    world, work = join(layout), ragged_requests(2)
    model = place(random_model("grouped"), world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tokens_BT = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(world.dp_rank))
    results = []
    for step in range(3):
        if generates:
            with gathered(model, world) as local_model:
                completions = run(local_model, work)
            new = random_model("grouped", seed=5).eval()
            weights = {key: value.full_tensor() for key, value in model.state_dict().items()}
            new.load_state_dict(weights)
            results.append((completions, run(new, work)))
        if step < 2:
            optimizer.zero_grad()
            model(tokens_BT).square().sum().backward()
            optimizer.step()
    gradients = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
    return results, [gradient.tolist() for gradient in gradients]


@pytest.mark.parametrize(
    "layout", [pytest.param(Layout(tp=2), marks=pytest.mark.slow), Layout(dp_shard=2)], ids=["tensors", "shards"]
)
def test_weights_that_change_between_calls(layout: Layout, ranks: Ranks) -> None:
    results = ranks(2, lambda: (generate_during_training(layout, True), generate_during_training(layout, False)))
    for (times, gradients), (_, plain_gradients) in results:
        assert gradients == plain_gradients and gradients  # training is the same with and without generation
        for completions, expected in times:
            assert_same(completions, expected)
        assert times[0][0][0].logprobs != times[1][0][0].logprobs != times[2][0][0].logprobs


def tensor_parallel_limits() -> None:
    world = join(Layout(tp=2))
    model = place(random_model("grouped"), world)
    request = Request([1, 2, 3, 1, 2], 12, Sampling(0))
    with pytest.raises(UserError, match="inside `with gathered"):
        Generator(model)
    with gathered(model, world) as local_model:
        assert isinstance(local_model, TensorParallelDecoder)
        generator = Generator(local_model, slots=2, max_length=64)
        with pytest.raises(UserError, match="max_seconds: the clocks of tensor-parallel ranks differ"):
            generator.run([replace(request, max_seconds=1.0)])
        with pytest.raises(UserError, match="different requests"):
            generator.run([replace(request, prompt=[world.rank])])
        with pytest.raises(UserError, match="different requests"):
            generator.run([request] * (1 + world.rank))
        (completion,) = generator.submit(request)
        with pytest.raises(UserError, match="cancel: tensor-parallel ranks must end"):
            generator.cancel(completion.request)
        generator.run([])
        keys = generator.runner.caches.layers[0].keys  # type: ignore[attr-defined]
        assert keys.shape[2:] == (1, 6), "each rank caches its own key-value head"
        ((drafted,),) = Generator(local_model, 2, 64, drafter=NgramDrafter()).run([request])
        assert drafted.tokens == completion.tokens
    with pytest.raises((AttributeError, TypeError), match="None"):  # the gathered weights are gone
        generator.run([request])


def test_limits_of_tensor_parallel_generation(ranks: Ranks) -> None:
    ranks(2, tensor_parallel_limits)


def pipeline_refusal() -> None:
    world = join(Layout(pp=2))
    model = place(random_model("grouped"), world)
    with pytest.raises(UserError, match="distributed over processes"):
        Generator(model)
    with pytest.raises(UserError, match=r"parallel.pp: 2: .* generate with load_model"), gathered(model, world):
        pass


def test_refusals(ranks: Ranks) -> None:
    ranks(2, pipeline_refusal)
    for name, words in (("latent", "latent attention"), ("experts", "experts")):
        with pytest.raises(UserError, match=rf"parallel.tp: a model with {words}.* is not divided this way"):
            check_layout(run_spec(), shape_of(name), Layout(tp=2), 32)
    model = random_model("grouped")
    model.blocks[0].ffn.down.weight.ds_id = 0  # as DeepSpeed marks the weights that it shards
    with pytest.raises(UserError, match=r"parallel\.deepspeed\.zero: 3"), gathered(model, World()):
        pass


def test_one_process_shares_its_weights() -> None:
    model, work = random_model("grouped"), ragged_requests(3)
    with gathered(model, World()) as local_model:
        assert local_model.head_weight.data_ptr() == model.head_weight.data_ptr() and model.training
        assert_same(run(local_model, work), alone("grouped", work))
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        copy_shard(model.blocks[0].ffn.up.weight, torch.zeros(40, 24))
    with gathered(model, World()) as local_model:
        assert not local_model.blocks[0].ffn.up.weight.any()
