"""Long rows in tiles, where a layer's weights are gathered for its passes: gradients of whole layers, divided."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.shape import ModelShape
from bessemer.train.compile import CompiledBlocks
from bessemer.train.memory import recompute, tiles

TOKENS = torch.arange(512).view(4, 128) * 7 % 64


def made() -> Decoder:
    model = build_model(ModelShape(64, 64, 3, 4, 2, 16, 256), "cpu", 0).double().train()
    served = CompiledBlocks(*TOKENS.shape, torch.float64, lambda function: function)
    for block in model.blocks:
        block.compiled = served
    return model


def worst_of_two_steps(size: int) -> tuple[float, int]:
    """The largest difference to whole layers of one process, and how often a layer was gone back through in tiles."""
    tiles.LONG, tiles.MOST = 256, 70
    whole, model, seen = made(), made(), []
    whole(TOKENS).square().mean().backward()
    backward = tiles._Tiled.backward

    def counted(*arguments: Any) -> Any:
        seen.append(0)
        return backward(*arguments)

    tiles._Tiled.backward = staticmethod(counted)  # type: ignore[method-assign]
    recompute.apply(model, "full")
    mesh = init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model.zero_grad()
        model(TOKENS).square().mean().backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return max(float((p.grad.full_tensor() - q.grad).abs().max()) for p, q in pairs), len(seen)  # type: ignore[union-attr,operator]


def test_divided_weights_get_the_gradients_of_whole_layers(ranks: Callable[..., list[Any]]) -> None:
    for worst, count in ranks(2, worst_of_two_steps, 2):
        assert worst < 1e-14 and count == 6
