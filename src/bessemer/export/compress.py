"""Writes a Hugging Face folder with quantized weights, in the compressed-tensors format, and measures what that costs.

The result gets its final name only after three checks: the perplexity of the user's text rises by less than a limit,
every quantized tensor reads back as the one that was measured, and transformers (with the package compressed-tensors)
computes the same logits from the folder.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.export.block_quantizer import BlockQuantizer, CompressionQuality, LayerChoice, TensorReader
from bessemer.export.gate import WHOLE_BYTES, network
from bessemer.export.hf import DTYPES, NOT_CARRIED, blank_and_reader, open_native, to_hf
from bessemer.model.adapters import linear_layers
from bessemer.model.families.compressed_tensors import CompressedFolder, QuantizedWeight, WeightFormat
from bessemer.model.families.folder import Files, HfFolder, PlannedTensor, atomic_folder, check_folder, write_folder
from bessemer.model.families.registry import Family, WeightMapping, needs_wrap, read_shape
from bessemer.model.transformer import Decoder
from bessemer.observe.progress import ProgressReport, silent
from bessemer.spec.shape import ModelShape
from bessemer.train.trained import find_model

METHODS = ("auto", "gptq", "awq", "rtn")
LIMITS = {"int4": 0.08, "int8": 0.02, "fp8": 0.02}  # of the increase of perplexity
LEAST_ROWS, POOL = 8, 16
# Of log-probabilities computed by transformers, relative to the largest. fp8 rounds the inputs of layers too, where the
# last digit decides a rounding: there the distributions may differ by as much as compression changes them, twice, since
# both are rounded.
TOLERANCES = {"int4": 1e-3, "int8": 1e-3}
FP8_DIVERGENCES = 2.0
GROUPS = (128, 64, 32)


class QualityTooLow(Exception):
    """The compressed model is worse than the limit allows, or does not read back as it was measured."""


@dataclass(frozen=True)
class CompressedModel:
    """The result. Bytes are those of the tensors; `read_bytes` are read for each generated token, before and after.
    `opened` is the largest difference of transformers' log-probabilities, None if it did not open the folder."""

    folder: Path
    form: WeightFormat
    quality: CompressionQuality
    choices: list[LayerChoice]
    bytes: tuple[int, int]
    read_bytes: tuple[int, int]
    opened: float | None

    def methods(self) -> dict[str, int]:
        """Groups of layers by method."""
        return dict(Counter(choice.method for choice in self.choices))

    def to_json(self) -> dict[str, Any]:
        quality = self.quality
        return {
            "folder": str(self.folder), "format": self.form.name, "group": self.form.group, "methods": self.methods(),
            "perplexity_before": quality.perplexity_before, "perplexity": quality.perplexity,
            "increase": quality.increase, "kl": quality.kl, "top1_agreement": quality.top1_agreement,
            "tokens": quality.tokens, "bytes_before": self.bytes[0], "bytes": self.bytes[1],
            "read_bytes_before": self.read_bytes[0], "read_bytes": self.read_bytes[1], "transformers": self.opened,
        }  # fmt: skip


@contextmanager
def source_folder(model: Path, checkpoint: str, scratch: Path, report: ProgressReport = silent) -> Iterator[HfFolder]:
    """The Hugging Face folder of a model; a run or an import is converted to one below `scratch` first."""
    files = find_model(model, checkpoint)
    if files.checkpoint is None:
        yield files.hf_folder
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".source-", dir=scratch) as place:
        to_hf(open_native(files.place, files.checkpoint.name), Path(place) / "hf", mode="skip", report=report)
        yield HfFolder(Path(place) / "hf")


def text_rows(texts: Iterable[str], tokenizer: Tokenizer, rows: int, length: int) -> Tensor:
    """(rows, length) ids, evenly spaced in the first POOL times as many; each text follows an end of document. Fewer
    rows if the text is shorter."""
    pieces = ([tokenizer.eos_id, *tokenizer.encode(text)] for text in texts)
    ids = torch.tensor(list(islice(chain.from_iterable(pieces), POOL * rows * length)))
    if len(ids) < LEAST_ROWS * length:
        need = f"{LEAST_ROWS} rows of {length}, {LEAST_ROWS * length:,} tokens, or more"
        raise UserError(f"--text: {len(ids):,} tokens are too few: give {need}, or a smaller --length")
    pool_RT = ids[: len(ids) // length * length].view(-1, length)
    return pool_RT[torch.linspace(0, len(pool_RT) - 1, min(rows, len(pool_RT))).long()]


def weight_format(to: str, group: int, layers: Iterable[torch.nn.Linear]) -> WeightFormat:
    """Groups that divide the inputs of every layer."""
    if to == "fp8" or not group:
        return WeightFormat(to, 4 if to == "int4" else 8)
    sizes = {layer.in_features for layer in layers}
    fitting = [size for size in (group, *GROUPS) if size <= group and not any(inputs % size for inputs in sizes)]
    if not fitting:
        listed = ", ".join(map(str, sorted(sizes)))
        raise UserError(f"--group {group}: must divide the inputs of every layer ({listed}); write a smaller one, or 0")
    return WeightFormat(to, int(to.removeprefix("int")), fitting[0])


def compress(
    source: HfFolder, tokens_RT: Tensor, out: Path, to: str, method: str = "auto", group: int = 128,
    dtype: str = "auto", limit: float | None = None, device: torch.device | None = None, overwrite: bool = False,
    check: bool = True, report: ProgressReport = silent,
) -> CompressedModel:  # fmt: skip
    """Compress a folder, calibrated and measured on rows of text. `limit` is the largest increase of perplexity, as a
    share; None is the format's. Raises QualityTooLow, and writes nothing, beyond it. `check`: open the result with
    transformers, if it and compressed-tensors are installed."""
    family, shape = _check_source(source)
    model = network(shape)
    check_folder(model, source, family)
    layers = {f"{name}.weight": layer for name, layer in linear_layers(model).items() if name.startswith("blocks.")}
    form = weight_format(to, group, layers.values())
    stored_dtype = _stored_dtype(source, dtype)
    mappings = list(family.weight_mappings(shape))
    quantized = {m.hf_names[0] for m in mappings if layers.keys() >= set(m.native_names)}
    _check_rows([m for m in mappings if m.hf_names[0] in quantized], model)
    _, read = blank_and_reader(source, shape, family)
    plan, digests = list(_plan(mappings, quantized, model, form, stored_dtype)), dict[str, str]()
    with atomic_folder(out, overwrite) as folder, tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as hidden:
        used, unit = "rtn" if form.is_float else method, device or torch.device("cpu")
        blocks = BlockQuantizer(model, read, form, used, stored_dtype, tokens_RT, unit, Path(hidden))
        tensors = _tensors(mappings, quantized, blocks, digests, report)
        write_folder(folder, plan, tensors, _files(source, family, shape, form, stored_dtype))
        report("measuring")
        quality = blocks.quality()
        _check_quality(quality, LIMITS[to] if limit is None else limit)
        report("reading back")
        _check_readback(folder, digests)
        first_T = tokens_RT[blocks.test_rows[0]]
        opened, expected_TV = None, blocks.sample_logits if check else None
        if (
            expected_TV is not None
            and (output_TV := _open_with_transformers(folder, first_T, expected_TV, plan)) is not None
        ):
            opened = _check_logits(output_TV, expected_TV, TOLERANCES.get(to), quality.kl)
    after = sum(math.prod(size) * kind.itemsize for _, size, kind in plan)
    before = sum(source.tensors[name].bytes for mapping in mappings for name in mapping.hf_names)
    embedding = 0 if shape.tied else model.embedding.weight.numel()  # a lookup reads one row of it
    read_bytes = before - embedding * _source_dtype(source).itemsize, after - embedding * stored_dtype.itemsize
    return CompressedModel(out, form, quality, blocks.choices, (before, after), read_bytes, opened)


def _check_quality(quality: CompressionQuality, limit: float) -> None:
    if not quality.increase <= limit:  # NaN is too much
        change = f"{quality.increase:.1%}, from {quality.perplexity_before:.4g} to {quality.perplexity:.4g}"
        fix = "use more bits, smaller groups or more text, or raise --limit"
        raise QualityTooLow(f"perplexity rises by {change}; the limit is {limit:.1%}: {fix}")


def _files(source: HfFolder, family: Family, shape: ModelShape, form: WeightFormat, stored_dtype: torch.dtype) -> Files:
    """The source's other files, and its config with the description of the format."""
    untied = family.weight_mappings(replace(shape, tied=False))
    head = next(m.hf_names[0].removesuffix(".weight") for m in untied if m.native_names == ("head.weight",))
    config = {key: value for key, value in source.config.items() if key not in NOT_CARRIED}
    config |= {"dtype": str(stored_dtype).removeprefix("torch.")}
    config |= {"quantization_config": form.config({head, "lm_head"})}  # transformers renames some heads to lm_head
    files: dict[str, Any] = dict(source.tokenizer_files) | {"config.json": config}
    return files if source.generation_config is None else files | {"generation_config.json": source.generation_config}


def _check_source(source: HfFolder) -> tuple[Family, ModelShape]:
    if "quantization_config" in source.config:
        raise UserError(f"{source.path}: is quantized already; compress the model's bf16 or fp32 weights")
    if needs_wrap(source.config):
        raise UserError(f"{source.path}: has no native family, and only those can be compressed")
    family, shape = read_shape(source.config)
    other = shape.decoder_layers or not shape.causal or shape.labels or shape.norm_place == "post"
    if shape.moe is not None or other:
        raise UserError(
            f"{source.path}: only dense models that predict the next token can be compressed: not experts, encoders, "
            "encoder-decoders or classifiers"
        )
    return family, shape


def _source_dtype(source: HfFolder) -> torch.dtype:
    """The dtype of most tensors."""
    return Counter(info.dtype for info in source.tensors.values()).most_common(1)[0][0]


def _stored_dtype(source: HfFolder, dtype: str) -> torch.dtype:
    """fp32 weights become bf16, which servers compute in."""
    if dtype != "auto":
        return DTYPES[dtype]
    return torch.float16 if _source_dtype(source) == torch.float16 else torch.bfloat16


def _check_rows(mappings: Iterable[WeightMapping], model: Decoder) -> None:
    """Codes and scales are converted like the weights, which works where the family only moves rows."""
    for mapping in mappings:
        sizes = [model.get_parameter(name).shape[0] for name in mapping.native_names]
        columns = [torch.zeros(size, 1) for size in sizes]
        if len(mapping.hf_names) != 1 or mapping.to_hf(columns)[0].shape != (sum(sizes), 1):
            raise UserError(
                f"{mapping.hf_names[0]}: this family stores matrices transposed, which cannot be compressed"
            )


def _plan(
    mappings: Iterable[WeightMapping],
    quantized: set[str],
    model: Decoder,
    form: WeightFormat,
    stored_dtype: torch.dtype,
) -> Iterator[PlannedTensor]:
    """Name, shape and dtype of every tensor in the order of the mappings."""
    blank = {name: torch.empty_like(tensor, dtype=stored_dtype) for name, tensor in model.state_dict().items()}
    for name, tensor in (pair for m in mappings for pair in _converted(m, blank.__getitem__)):
        module, size = name.removesuffix(".weight"), tuple(tensor.shape)
        if name not in quantized:
            yield name, size, stored_dtype
        elif form.is_float:
            yield name, size, form.code_dtype
            yield f"{module}.weight_scale", (size[0], 1), torch.float32
        else:
            yield f"{module}.weight_packed", (size[0], math.ceil(size[1] * form.bits / 32)), torch.int32
            yield f"{module}.weight_scale", (size[0], size[1] // (form.group or size[1])), stored_dtype
            yield f"{module}.weight_shape", (2,), torch.int64


def _converted(mapping: WeightMapping, read: TensorReader) -> Iterator[tuple[str, Tensor]]:
    return zip(mapping.hf_names, mapping.to_hf([read(name) for name in mapping.native_names]), strict=True)


def _tensors(
    mappings: Iterable[WeightMapping], quantized: set[str], blocks: BlockQuantizer, digests: dict[str, str],
    report: ProgressReport,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """The planned tensors; quantizes one block after the other. Records what was measured."""
    for mapping in mappings:
        report("quantizing blocks", blocks.block + 1, blocks.model.shape.layers)
        if mapping.hf_names[0] not in quantized:
            yield from _converted(mapping, blocks.tensor)
            continue
        weight = _joined(mapping, [blocks.quantized(name) for name in mapping.native_names])
        module = mapping.hf_names[0].removesuffix(".weight")
        digests[module] = _digest(weight)
        yield from weight.tensors(module).items()


def _joined(mapping: WeightMapping, parts: list[QuantizedWeight]) -> QuantizedWeight:
    form = parts[0].form
    (codes_OI,) = mapping.to_hf([part.codes_OI.view(torch.int8) for part in parts])
    (scale_OG,) = mapping.to_hf([part.scale_OG for part in parts])
    return QuantizedWeight(form, codes_OI.contiguous().view(form.code_dtype), scale_OG.contiguous())


def _digest(weight: QuantizedWeight) -> str:
    parts = (weight.codes_OI.view(torch.int8), weight.scale_OG.float())
    return xxhash.xxh3_128_hexdigest(b"".join(part.contiguous().numpy().tobytes() for part in parts))


def _check_readback(folder: Path, digests: dict[str, str]) -> None:
    written = CompressedFolder(folder)
    for module, digest in digests.items():
        if _digest(written.read_quantized(module)) != digest:
            raise QualityTooLow(f"{module}: reads back with other values than were written")


def _open_with_transformers(
    folder: Path, tokens_T: Tensor, expected_TV: Tensor, plan: list[PlannedTensor]
) -> Tensor | None:
    """Its log-probabilities, if it can be used here."""
    packages = all(importlib.util.find_spec(name) for name in ("transformers", "compressed_tensors"))
    small = sum(math.prod(size) for _, size, _ in plan) * 4 <= WHOLE_BYTES
    if not packages or not small:
        return None
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with redirect_stderr(StringIO()), torch.no_grad():  # progress bars of compressed-tensors
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
        except AttributeError as error:  # its layers are not torch.nn.Linear, as those of Falcon
            fix = "--skip-check writes the folder for other servers"
            raise QualityTooLow(f"transformers cannot open the compressed folder ({error}): {fix}") from error
        output_TV: Tensor = model.eval()(tokens_T[None, : len(expected_TV)]).logits[0].log_softmax(-1)
    return output_TV


def _check_logits(output_TV: Tensor, expected_TV: Tensor, tolerance: float | None, divergence: float) -> float:
    """The largest difference of log-probabilities from those that were measured, relative to the largest. Without a
    tolerance, their divergence is compared with that of compression itself."""
    gap = float((output_TV - expected_TV).abs().max() / expected_TV.abs().max())
    between = float((expected_TV.exp() * (expected_TV - output_TV)).sum(-1).mean())
    if tolerance is not None and not gap <= tolerance:
        raise QualityTooLow(f"transformers computes other logits from the folder: they differ by {gap:.1e}")
    if tolerance is None and not between <= FP8_DIVERGENCES * divergence:
        raise QualityTooLow(
            f"transformers computes other logits from the folder: their divergence is {between:.1e}, that of "
            f"compression {divergence:.1e}"
        )
    return gap
