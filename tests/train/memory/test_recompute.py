"""What a block keeps and what it computes again never shows in the gradients, and keeps as little as it says."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch._functorch.config as partitioner

from bessemer.errors import UserError
from bessemer.model.transformer import Decoder, build_model
from bessemer.plan.cost_model.memory import Passes, activation_bytes
from bessemer.spec.shape import Mamba, Mla, ModelShape, Moe
from bessemer.train.compile import CompiledBlocks
from bessemer.train.memory import recompute

SHAPE = ModelShape(64, 64, 4, 4, 2, 16, 256)
TOKENS = torch.arange(512).view(4, 128) * 7 % 64
MODES = ["selective", "full", 0.75, 0.5, 0.0, 1.0]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    partitioner.activation_memory_budget = 1.0
    torch.compiler.reset()


def model_of(shape: ModelShape = SHAPE, dropout: float = 0.0) -> Decoder:
    model = build_model(shape, "cpu", 0)
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = dropout
    return model.train()


def compiled(model: Decoder) -> Decoder:
    blocks = CompiledBlocks(*TOKENS.shape, torch.float32, torch.compile(backend="aot_eager", dynamic=False))
    for block in model.blocks:
        block.compiled = blocks
    return model


def gradients(model: Decoder) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model(TOKENS).square().mean().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def saved_bytes(model: Decoder) -> int:
    """What a forward pass keeps: by hooks what autograd saves, and Python's own tensors, where checkpoints keep it."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    gc.collect()
    gc.freeze()  # what is there already is not looked at again
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model(TOKENS)
    gc.collect()
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor:
            note(thing)
    gc.unfreeze()
    del out
    return sum(size for address, size in found.items() if address not in known)


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
@pytest.mark.parametrize("how", MODES)
def test_gradients_are_the_same_bit_for_bit(how: str | float, dropout: float) -> None:
    expected = gradients(model_of(dropout=dropout))
    model = model_of(dropout=dropout)
    recompute.apply(model, how)
    assert all(map(torch.equal, gradients(model), expected))


@pytest.mark.parametrize("how", ["selective", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "changes",
    [
        {"moe": Moe(4, 2, 32, choice_bias=True)}, {"norm_place": "post", "norm": "layer"}, {"attention_cap": 5.0},
        {"mixers": ("mamba", "attention"), "mamba": Mamba(4, 16, 16)}, {"kv_heads": 4, "mla": Mla(16, 8, 8, 16)},
    ],
    ids=["experts", "post", "cap", "state space", "latent"],
)  # fmt: skip
def test_every_kind_of_block_can_be_run_again(changes: dict, how: str) -> None:
    expected = gradients(model_of(replace(SHAPE, **changes)))
    model = model_of(replace(SHAPE, **changes))
    recompute.apply(model, how)
    assert all(map(torch.equal, gradients(model), expected))


@pytest.mark.slow
def test_less_is_kept_by_as_much_as_said() -> None:
    """In widths of a token and layer, ffn = 4, keys and values 0.5 each; the final norm's 1.5 are shared by 4."""
    kept = {}
    for how in ("none", "selective", 0.5, "full"):
        model = model_of()
        recompute.apply(model, how)
        gradients(model)
        kept[how] = saved_bytes(model) / (TOKENS.numel() * 64 * 4) / 4
    assert kept["none"] == pytest.approx(25.6, abs=0.5)
    assert kept["selective"] == pytest.approx(14.5, abs=0.5)
    assert kept[0.5] == pytest.approx((25.6 + 1.5) / 2, abs=0.5)
    assert kept["full"] == pytest.approx(1.5, abs=0.4)


@pytest.mark.slow
def test_compiled_blocks_keep_what_the_budget_leaves_and_give_the_same_gradients() -> None:
    kept, expected = {}, None
    for how in ("none", "full", 0.0, "selective"):
        model = compiled(model_of())
        recompute.apply(model, how)
        found = gradients(model)
        expected = expected or found
        assert all(map(torch.equal, found, expected))
        kept[how] = saved_bytes(model) / (TOKENS.numel() * 64 * 4) / 4
    assert kept["none"] == pytest.approx(19.6, abs=0.7)
    assert kept["selective"] == pytest.approx(13.6, abs=0.7)
    assert kept["full"] < kept[0.0] < 0.3 * kept["none"]


def test_a_choice_can_be_changed_and_taken_back() -> None:
    model = model_of()
    plain = [block.forward for block in model.blocks]
    recompute.apply(model, "full")
    recompute.apply(model, 0.5)
    assert [block.forward == own for block, own in zip(model.blocks, plain, strict=True)] == [True, False, True, False]
    recompute.apply(model, "none")
    assert [block.forward for block in model.blocks] == plain


def test_evaluation_and_generation_run_plain() -> None:
    model = model_of()
    recompute.apply(model, "full", offload=True)
    model.eval()
    with torch.no_grad():
        whole = model(TOKENS)
        caches = model.new_caches()
        parts = [model(TOKENS[:, cut], caches=caches) for cut in (slice(0, 100), slice(100, 128))]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_model_without_known_layers_is_refused() -> None:
    model = build_model(replace(SHAPE, layers=0), "cpu", 0)
    with pytest.raises(UserError, match=r"memory.activations: full needs the model's layers"):
        recompute.apply(model, "full")
    recompute.apply(model, "none")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_compiled_blocks_keep_what_the_planner_says() -> None:
    shape, tokens = ModelShape(512, 1024, 6, 8, 8, 128, 4096), torch.arange(16_384, device="cuda").view(8, 2048) % 512
    found = {}
    for how in ("none", "selective", 0.5, "full"):
        model = build_model(shape, "cuda", 0)
        blocks = CompiledBlocks(8, 2048, torch.bfloat16, torch.compile(dynamic=False, fullgraph=True))
        for block in model.blocks:
            block.compiled = blocks
        recompute.apply(model, how)
        for _ in range(2):  # the first one compiles
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                out = model(tokens)
            found[how] = torch.cuda.memory_allocated() - before
            out.float().square().mean().backward()
            del out
            model.zero_grad()
    passes = Passes(2048, 8, "bf16", "none", compiled=True)
    casts, rest = 2 * shape.parameters, 5 * tokens.numel() * shape.width  # the last norm's, and the output
    for how, kept in found.items():
        expected = activation_bytes(shape, replace(passes, activations=how)) + rest + casts * (how == "none")
        assert kept == pytest.approx(expected, rel=0.2), (
            how,
            {key: round(size / 2**20) for key, size in found.items()},
        )
