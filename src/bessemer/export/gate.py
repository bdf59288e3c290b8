"""The gate: transformers opens a converted folder, and every layer is computed beside the native one.

Both sides are float32. A layer of ours gets the hidden states that theirs got, so a fault is found where it is; our own
chain runs beside, so the logits are compared end to end. One layer of each side is in memory at a time.
Legend: B rows, T time, W width, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import Decoder
from bessemer.spec.shape import ModelShape

TOLERANCE, CAPPED_TOLERANCE = 1e-4, 1e-3  # of what a layer adds, and of the largest logit
WHOLE_BYTES = 2_000_000_000  # of float32 weights: up to here theirs are loaded at once
TensorOf = Callable[[str], Tensor]


class Mismatch(Exception):
    """The converted model is another model; the message says where."""


@dataclass(frozen=True)
class Comparison:
    """Largest differences of each part, relative to what it adds to the stream, and of the logits to their largest."""

    parts: dict[str, float]
    logits: float
    argmax_agreement: float
    loss: float
    loss_of_theirs: float
    tolerance: float

    @property
    def worst(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    def __str__(self) -> str:
        return (
            f"logits differ by {self.logits:.1e} (tolerance {self.tolerance:g}), argmax agrees at "
            f"{self.argmax_agreement:.2%}, loss {self.loss:.5f} and {self.loss_of_theirs:.5f}; "
            f"worst part: {self.worst}, {self.parts[self.worst]:.1e}"
        )


def check(
    folder: Path, kind: str, shape: ModelShape, weights: TensorOf, tokens_BT: Tensor, scratch: Path, mode: str = "auto"
) -> Comparison | None:
    """Compare the folder with the native model that has these weights; Mismatch beyond the tolerance.

    `kind` is the class of transformers that opens it. `mode` whole loads theirs at once, layers one layer at a time,
    auto goes by the size, skip gives None. Experts that transformers fuses are kept in the `scratch` folder meanwhile.
    """
    by_layer = ready(shape, mode)
    if mode == "skip":
        return None
    with tempfile.TemporaryDirectory(prefix=".offload-", dir=scratch) as offload, torch.no_grad():
        theirs = _open(folder, kind, offload if by_layer else None)
        compare = _compare_pair if shape.decoder_layers else _compare
        found = compare(theirs, network(shape), weights, tokens_BT)
    wrong = [name for name, gap in found.parts.items() if not gap <= found.tolerance]  # NaN is wrong
    if wrong or not found.logits <= found.tolerance:
        where = f"{wrong[0]} does not agree" if wrong else "every layer agrees, the head does not"
        raise Mismatch(f"the converted model is not the same: {where}; {found}")
    return found


def ready(shape: ModelShape, mode: str) -> bool:
    """Whether theirs is to be read layer by layer. UserError, before hours of writing, if a package is missing."""
    by_layer = mode == "layers" or (mode == "auto" and 4 * shape.parameters > WHOLE_BYTES)
    for package in ("transformers", "accelerate")[: 0 if mode == "skip" else 1 + by_layer]:
        if importlib.util.find_spec(package) is None:
            fix = "pip install 'bessemer[hf]', or leave it out with --skip-check"
            raise UserError(f"the check needs {package}: {fix}")
    return by_layer


def network(shape: ModelShape) -> Decoder:
    """Ours, without memory."""
    from bessemer.model.encoder_decoder import EncoderDecoder

    with torch.device("meta"):
        return EncoderDecoder(shape) if shape.decoder_layers else Decoder(shape)


def _open(folder: Path, kind: str, offload: str | None) -> nn.Module:
    """Theirs, in float32; with `offload` its weights stay in the files until they are used."""
    import transformers

    more: dict[str, Any] = {"device_map": {"": "disk"}, "offload_folder": offload} if offload else {}
    # What they say while loading is known here, and told below where it matters.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    model, info = getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True,
        **more,
    )  # fmt: skip
    # Unexpected ones are buffers of older files; a name that is wrong leaves another missing.
    if odd := {key: sorted(map(str, names)) for key, names in info.items() if names and key != "unexpected_keys"}:
        raise Mismatch(f"transformers does not find the tensors it expects: {odd}")
    return model.eval()


def _compare_pair(theirs: nn.Module, ours: Decoder, weights: TensorOf, tokens_BT: Tensor) -> Comparison:
    """An encoder-decoder, as a whole: none that is published is too large for that."""
    logits_of_theirs_BTV = theirs(input_ids=tokens_BT, decoder_input_ids=tokens_BT).logits
    with _filled({"": ours.eval()}, weights):
        logits_BTV = ours.logits(ours(tokens_BT, encoder_tokens_BS=tokens_BT))
    parts = {"model": _gap(logits_BTV, logits_of_theirs_BTV)}
    return _judged(parts, logits_BTV, logits_of_theirs_BTV, tokens_BT, ours.shape)


def _compare(theirs: nn.Module, ours: Decoder, weights: TensorOf, tokens_BT: Tensor) -> Comparison:
    shape, ends = ours.eval().shape, dict(ours.named_children())
    sight = AttentionMask(causal=shape.causal, blocks=shape.blocks)
    before = [name for name in ends if name in ("embedding", "position", "types", "embedding_norm")]
    with _filled({f"{name}.": ends[name] for name in before}, weights):
        chain_BTW = ours.embed(tokens_BT, sight)
    parts: dict[str, float] = {}
    place = ours.place(chain_BTW, sight)

    def look(layer: int, given_BTW: Tensor, found_BTW: Tensor) -> None:
        nonlocal chain_BTW
        if layer == 0:
            parts["embedding"] = _gap(chain_BTW, given_BTW)
        block = ours.blocks[layer]
        with _filled({f"blocks.{layer}.": block}, weights):
            parts[f"layer {layer}"] = _gap(block(given_BTW, place), found_BTW, given_BTW)
            chain_BTW = block(chain_BTW, place)

    for layer, module in enumerate(_layers(theirs, shape.layers)):
        module.register_forward_hook(_hook(look, layer), with_kwargs=True)
    logits_of_theirs_BTV = theirs(tokens_BT).logits
    assert len(parts) == shape.layers + 1, "transformers left layers out"
    after = {f"{name}.": ends[name] for name in ("norm", "transform") if name in ends}
    with _filled(after, weights):
        if shape.norm_place != "post":
            chain_BTW = ours.norm(chain_BTW)
        hidden_BTW = ours.transform(chain_BTW) if shape.head_transform else chain_BTW
    if ours.head_bias is not None:
        ours.head_bias = nn.Parameter(weights("head_bias").float(), requires_grad=False)
    head = "embedding" if shape.tied else "head"
    with _filled({f"{head}.": ends[head]}, weights):
        logits_BTV = ours.logits(hidden_BTW)
    return _judged(parts, logits_BTV, logits_of_theirs_BTV, tokens_BT, shape)


def _hook(look: Callable[[int, Tensor, Tensor], None], layer: int) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        look(layer, args[0] if args else kwargs["hidden_states"], output[0] if isinstance(output, tuple) else output)

    return hook


def _layers(model: nn.Module, count: int) -> nn.ModuleList:
    """Of the network: the outermost list of that length."""
    return next(found for found in model.modules() if isinstance(found, nn.ModuleList) and len(found) == count)


@contextmanager
def _filled(modules: dict[str, nn.Module], weights: TensorOf) -> Iterator[None]:
    """Modules by the prefix of their names, with memory and weights inside the block and without after it."""
    for prefix, module in modules.items():
        for name, tensor in module.to_empty(device="cpu").state_dict().items():
            tensor.copy_(weights(prefix + name))
    yield
    for module in modules.values():
        module.to("meta")


def _gap(ours: Tensor, theirs: Tensor, given: Tensor | None = None) -> float:
    """Relative to the largest change that the layer makes; large numbers of the stream may differ by their rounding."""
    scale = (theirs if given is None else theirs - given).abs().max().clamp(min=1e-30)
    return float(((ours - theirs).abs() / (scale + 0.01 * theirs.abs())).max())


def _judged(
    parts: dict[str, float], ours_BTV: Tensor, theirs_BTV: Tensor, tokens_BT: Tensor, shape: ModelShape
) -> Comparison:
    scale = theirs_BTV.abs().max().clamp(min=1e-30)
    gaps_BT = torch.stack([(a - b).abs().amax(-1) for a, b in zip(ours_BTV, theirs_BTV, strict=True)]) / scale
    # A near tie of experts may fall the other way after many layers: layers are judged strictly, the whole but for it.
    logits = gaps_BT.flatten().quantile(0.99) if shape.moe else gaps_BT.max()
    agreement = (ours_BTV.argmax(-1) == theirs_BTV.argmax(-1)).float().mean()
    losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()) for x in (ours_BTV, theirs_BTV)]
    tolerance = CAPPED_TOLERANCE if shape.attention_cap or shape.logit_cap else TOLERANCE
    return Comparison(parts, float(logits), float(agreement), float(losses[0]), float(losses[1]), tolerance)
