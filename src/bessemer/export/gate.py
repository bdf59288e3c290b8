"""Checks a converted folder: transformers opens it, and every layer's output is compared with the native layer's.

Both sides are float32. Each native layer gets the hidden states that the transformers layer got, so a fault is located;
the native model also runs end to end, so the logits are compared. One layer of each side is in memory at a time.
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
WHOLE_BYTES = 2_000_000_000  # of float32 weights; a larger Hugging Face model is loaded layer by layer
TensorReader = Callable[[str], Tensor]


class Mismatch(Exception):
    """The converted model differs; the message says where."""


@dataclass(frozen=True)
class Comparison:
    """Largest difference per part, relative to what it adds to the residual stream, and of the logits, relative to the
    largest."""

    parts: dict[str, float]
    logits: float
    argmax_agreement: float
    loss: float
    hf_loss: float
    tolerance: float

    @property
    def worst(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    def __str__(self) -> str:
        return (
            f"logits differ by {self.logits:.1e} (tolerance {self.tolerance:g}), argmax agrees at "
            f"{self.argmax_agreement:.2%}, loss {self.loss:.5f} and {self.hf_loss:.5f}; "
            f"worst part: {self.worst}, {self.parts[self.worst]:.1e}"
        )


def check(
    folder: Path,
    kind: str,
    shape: ModelShape,
    weights: TensorReader,
    tokens_BT: Tensor,
    scratch: Path,
    mode: str = "auto",
) -> Comparison | None:
    """Compare the folder with the native model that has these weights; raises Mismatch beyond the tolerance.

    `kind` is the transformers class that opens it. `mode` whole loads the Hugging Face model at once, layers one
    layer at a time, auto decides by size, skip returns None. Experts that transformers fuses are kept in
    `scratch` meanwhile.
    """
    by_layer = check_requirements(shape, mode)
    if mode == "skip":
        return None
    with tempfile.TemporaryDirectory(prefix=".offload-", dir=scratch) as offload, torch.no_grad():
        hf_model = _open(folder, kind, offload if by_layer else None)
        compare = _compare_pair if shape.decoder_layers else _compare
        comparison = compare(hf_model, network(shape), weights, tokens_BT)
    wrong = [name for name, gap in comparison.parts.items() if not gap <= comparison.tolerance]  # NaN is wrong
    if wrong or not comparison.logits <= comparison.tolerance:
        where = f"{wrong[0]} does not agree" if wrong else "every layer agrees, the head does not"
        raise Mismatch(f"the converted model is not the same: {where}; {comparison}")
    return comparison


def check_requirements(shape: ModelShape, mode: str) -> bool:
    """Whether to load layer by layer. Raises UserError for a missing package before hours of writing."""
    by_layer = mode == "layers" or (mode == "auto" and 4 * shape.parameters > WHOLE_BYTES)
    for package in ("transformers", "accelerate")[: 0 if mode == "skip" else 1 + by_layer]:
        if importlib.util.find_spec(package) is None:
            fix = "pip install 'bessemer[hf]', or skip it with --skip-check"
            raise UserError(f"the check needs {package}: {fix}")
    return by_layer


def network(shape: ModelShape) -> Decoder:
    """The native model without memory."""
    from bessemer.model.encoder_decoder import EncoderDecoder

    with torch.device("meta"):
        return EncoderDecoder(shape) if shape.decoder_layers else Decoder(shape)


def _open(folder: Path, kind: str, offload: str | None) -> nn.Module:
    """The Hugging Face model in float32; with `offload` its weights stay in the files until used."""
    import transformers

    more: dict[str, Any] = {"device_map": {"": "disk"}, "offload_folder": offload} if offload else {}
    # Loading problems are reported below.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    model, info = getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True,
        **more,
    )  # fmt: skip
    # Unexpected keys are buffers of older files; a wrong name would also leave a missing key.
    if problems := {key: sorted(map(str, names)) for key, names in info.items() if names and key != "unexpected_keys"}:
        raise Mismatch(f"transformers does not find the tensors it expects: {problems}")
    return model.eval()


def _compare_pair(hf_model: nn.Module, native: Decoder, weights: TensorReader, tokens_BT: Tensor) -> Comparison:
    """An encoder-decoder, end to end: all published ones fit into memory."""
    hf_logits_BTV = hf_model(input_ids=tokens_BT, decoder_input_ids=tokens_BT).logits
    with _with_weights({"": native.eval()}, weights):
        logits_BTV = native.logits(native(tokens_BT, encoder_tokens_BS=tokens_BT))
    parts = {"model": _gap(logits_BTV, hf_logits_BTV)}
    return _summarise(parts, logits_BTV, hf_logits_BTV, tokens_BT, native.shape)


def _compare(hf_model: nn.Module, native: Decoder, weights: TensorReader, tokens_BT: Tensor) -> Comparison:
    shape, modules = native.eval().shape, dict(native.named_children())
    attention_mask = AttentionMask()
    attention_mask.configure(shape)
    before = [name for name in modules if name in ("embedding", "position", "types", "embedding_norm")]
    with _with_weights({f"{name}.": modules[name] for name in before}, weights):
        chain_BTW = native.embed(tokens_BT, attention_mask)
    parts: dict[str, float] = {}
    inputs = native.attention_inputs(chain_BTW, attention_mask)

    def compare_layer(layer: int, input_BTW: Tensor, output_BTW: Tensor) -> None:
        nonlocal chain_BTW
        if layer == 0:
            parts["embedding"] = _gap(chain_BTW, input_BTW)
        block = native.blocks[layer]
        with _with_weights({f"blocks.{layer}.": block}, weights):
            parts[f"layer {layer}"] = _gap(block(input_BTW, inputs), output_BTW, input_BTW)
            chain_BTW = block(chain_BTW, inputs)

    for layer, module in enumerate(_layers(hf_model, shape.layers)):
        module.register_forward_hook(_hook(compare_layer, layer), with_kwargs=True)
    hf_logits_BTV = hf_model(tokens_BT).logits
    assert len(parts) == shape.layers + 1, "transformers skipped layers"
    after = {f"{name}.": modules[name] for name in ("norm", "transform") if name in modules}
    with _with_weights(after, weights):
        if shape.norm_place != "post":
            chain_BTW = native.norm(chain_BTW)
        hidden_BTW = chain_BTW if native.transform is None else native.transform(chain_BTW)
    if native.head_bias is not None:
        native.head_bias = nn.Parameter(weights("head_bias").float(), requires_grad=False)
    head = "embedding" if shape.tied else "head"
    with _with_weights({f"{head}.": modules[head]}, weights):
        logits_BTV = native.logits(hidden_BTW)
    if hf_logits_BTV.ndim == 2:  # the classes of a text, at its first or last token
        at = 0 if shape.pooler else -1
        logits_BTV, hf_logits_BTV = logits_BTV[:, at, None], hf_logits_BTV[:, None]
    return _summarise(parts, logits_BTV, hf_logits_BTV, tokens_BT, shape)


def _hook(compare_layer: Callable[[int, Tensor, Tensor], None], layer: int) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = args[0] if args else kwargs["hidden_states"]
        compare_layer(layer, inputs, output[0] if isinstance(output, tuple) else output)

    return hook


def _layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The layers of a network: the outermost list of that length."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count)


@contextmanager
def _with_weights(modules: dict[str, nn.Module], weights: TensorReader) -> Iterator[None]:
    """Modules by name prefix, with memory and weights inside the block and on the meta device after it."""
    for prefix, module in modules.items():
        for name, tensor in module.to_empty(device="cpu").state_dict().items():
            tensor.copy_(weights(prefix + name))
    yield
    for module in modules.values():
        module.to("meta")


def _gap(native: Tensor, hf: Tensor, inputs: Tensor | None = None) -> float:
    """Relative to the largest change that the layer makes; large values of the residual stream may differ by
    rounding."""
    scale = (hf if inputs is None else hf - inputs).abs().max().clamp(min=1e-30)
    return float(((native - hf).abs() / (scale + 0.01 * hf.abs())).max())


def _summarise(
    parts: dict[str, float], native_BTV: Tensor, hf_BTV: Tensor, tokens_BT: Tensor, shape: ModelShape
) -> Comparison:
    scale = hf_BTV.abs().max().clamp(min=1e-30)
    gaps_BT = torch.stack([(a - b).abs().amax(-1) for a, b in zip(native_BTV, hf_BTV, strict=True)]) / scale
    # After many layers a near tie of experts may resolve differently: layers are compared strictly, logits at 99 %.
    logits = gaps_BT.flatten().quantile(0.99) if shape.moe else gaps_BT.max()
    agreement = (native_BTV.argmax(-1) == hf_BTV.argmax(-1)).float().mean()
    if shape.labels:  # no targets: the cross-entropy of the source's own guesses
        losses = [F.cross_entropy(x.flatten(0, 1), hf_BTV.argmax(-1).flatten()) for x in (native_BTV, hf_BTV)]
    else:
        losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()) for x in (native_BTV, hf_BTV)]
    tolerance = CAPPED_TOLERANCE if shape.attention_cap or shape.logit_cap else TOLERANCE
    return Comparison(parts, float(logits), float(agreement), float(losses[0]), float(losses[1]), tolerance)
