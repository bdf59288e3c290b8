"""Writes GGUF files. llama.cpp opens each and is compared with the native model before the file gets its name.

A quantized file comes after a 16-bit one that passed the strict check: its own limit is on perplexity alone, which no
rounding of weights leaves unchanged.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.export import llama_cpp
from bessemer.export.gate import Mismatch
from bessemer.export.gguf_model import Architecture, GgufTensor, architecture, metadata, tensors
from bessemer.export.gguf_tokenizer import GgufVocabulary, vocabulary
from bessemer.export.hf import SENTENCES, choose_family
from bessemer.export.outputs import OutputComparison, compare, compare_ids, reference
from bessemer.export.source import ExportSource
from bessemer.model.transformer import Decoder
from bessemer.observe.progress import ProgressReport, silent
from bessemer.spec.shape import ModelShape
from bessemer.storage import sync_path

# Largest difference of a logit, as a share of the largest one. llama.cpp rounds the activations to the weights' type.
TOLERANCES = {"f32": 2e-3, "f16": 5e-3, "bf16": 2e-2}
_SIXTEEN = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "same": "f16"}
# Types of the gguf package, in its spelling, with the largest rise of perplexity by default.
LIMITS = {"q8_0": 0.02, "q5_1": 0.05, "q5_0": 0.05, "q4_1": 0.10, "q4_0": 0.10}
_K_LIMITS = {"q6": 0.02, "q5": 0.05, "q4": 0.10, "iq": 0.10, "q3": 0.30, "q2": 1.00}
QUANTIZATIONS = (*LIMITS, *llama_cpp.K_QUANTS)
_LARGEST_HALF = 65_504.0


@dataclass(frozen=True)
class GgufExport:
    """A written file. The agreements are by type: of the file itself, and of the one that was quantized."""

    file: Path
    architecture: str
    kind: str
    tensors: int
    agreements: dict[str, OutputComparison]


def perplexity_limit(kind: str) -> float:
    return LIMITS[kind] if kind in LIMITS else _K_LIMITS[kind[:2]]


def check_request(quantization: str | None, check: bool) -> None:
    """Raises UserError for an unknown type or a missing package, before a model is loaded."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError("--to gguf needs the package gguf: pip install 'bessemer[gguf]'")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise UserError(f"--quantize {quantization}: write {', '.join(QUANTIZATIONS)}")
    if quantization in llama_cpp.K_QUANTS:
        llama_cpp.require_library(quantizer=True)
    if check:
        llama_cpp.require_library()


def to_gguf(
    source: ExportSource,
    out: Path,
    dtype: str = "same",
    quantization: str | None = None,
    limit: float | None = None,
    check: bool = True,
    overwrite: bool = False,
    family: str | None = None,
    report: ProgressReport = silent,
) -> GgufExport:
    """Write one file. `limit` bounds the rise of perplexity by a quantization; None: the default of its type."""
    check_request(quantization, check)
    model, kind = source.model, _SIXTEEN[dtype]
    arch = architecture(choose_family(model.shape, family, source.origin_folder).name, model.shape)
    words = vocabulary(source.tokenizer, model.shape.vocab)
    with _new_file(out, overwrite) as partial:
        _round_weights(model, arch, kind)
        rows_RT, _ = source.tokens()
        agreements: dict[str, OutputComparison] = {}
        ours = reference(model, rows_RT) if check else None
        ids = [source.tokenizer.encode(text) for text in SENTENCES]

        def opened(file: Path, kind: str, tolerance: float | None, limit: float | None = None) -> None:
            report("opening it with llama.cpp")
            if ours is None:
                return
            try:
                theirs = llama_cpp.open_gguf(file, rows_RT.numpy(), ours.prompt, ours.steps, SENTENCES)
            except llama_cpp.OpenerError as error:
                raise Mismatch(str(error)) from error
            compare_ids(SENTENCES, ids, theirs.ids)
            share = 0.99 if model.shape.moe else 1.0
            logits = theirs.logits_RTV, theirs.steps_SV
            agreements[kind] = compare(ours, *logits, "llama.cpp", tolerance, limit, share)

        unquantized = partial.with_name(f"{partial.name}.unquantized") if quantization else partial
        try:
            report("writing tensors")
            count = write_gguf(unquantized, source, arch, words, kind)
            opened(unquantized, kind, _tolerance(kind, model.shape))
            if quantization is not None:
                report("quantizing")
                if quantization in llama_cpp.K_QUANTS:
                    llama_cpp.quantize(unquantized, partial, quantization)
                else:
                    write_gguf(partial, source, arch, words, quantization)
                opened(partial, quantization, None, perplexity_limit(quantization) if limit is None else limit)
        except llama_cpp.OpenerError as error:
            raise Mismatch(str(error)) from error
        finally:
            if unquantized != partial:
                unquantized.unlink(missing_ok=True)
    return GgufExport(out, arch.name, quantization or kind, count, agreements)


def _tolerance(kind: str, shape: ModelShape) -> float:
    """GELU is read from a table of half-precision numbers, and soft-caps multiply differences."""
    rough = shape.activation in ("gelu", "gelu_tanh") or shape.attention_cap or shape.logit_cap
    return max(TOLERANCES[kind], 1e-2) if rough else TOLERANCES[kind]


@contextmanager
def _new_file(out: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary name that becomes `out` if the block succeeds."""
    if out.is_dir():
        raise UserError(f"{out}: is a folder; name a file that ends with .gguf")
    if out.exists() and not overwrite:
        raise UserError(f"{out}: exists; choose another name, or pass --overwrite")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        yield partial
        sync_path(partial)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def _round_weights(model: Decoder, arch: Architecture, kind: str) -> None:
    """Give the reference the numbers that the 16-bit file will hold."""
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}.get(kind)
    state = model.state_dict()
    for planned in tensors(model.shape, arch) if dtype else ():
        for name in planned.sources if not planned.exact and planned.sources else ():
            weight = state[name]
            if dtype == torch.float16 and float(weight.abs().max()) > _LARGEST_HALF:
                raise UserError(f"{name} has numbers beyond {_LARGEST_HALF:g}, too large for f16: use --dtype bf16")
            weight.copy_(weight.to(dtype))


def write_gguf(file: Path, source: ExportSource, arch: Architecture, words: GgufVocabulary, kind: str) -> int:
    """Write all keys, then one tensor after another. Returns the number of tensors."""
    import gguf

    shape, state = source.model.shape, source.model.state_dict()
    writer = gguf.GGUFWriter(file, arch.name)
    special = re.search("phi-?3", source.name, re.IGNORECASE) and "</s>" not in words.tokens
    writer.add_name("model" if special else source.name)  # by such a name llama.cpp expects tokens of Phi-3
    writer.add_file_type(gguf.LlamaFileType[("ALL_" if kind == "f32" else "MOSTLY_") + kind.upper()])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    metadata(writer, shape, arch, source.context)
    words.write(writer, source.tokenizer, source.format, source.template)
    planned = list(tensors(shape, arch))
    for tensor in planned:
        blank = tensor.convert([torch.empty_like(state[name], device="meta") for name in tensor.sources])
        number = _type_of(tensor, tuple(blank.shape), kind)
        size = _bytes(tuple(blank.shape), number)
        writer.add_tensor_info(tensor.name, tuple(blank.shape), torch.zeros(0).numpy().dtype, size, number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in planned:
        writer.write_tensor_data(_numbers(tensor, state.__getitem__, kind))
    writer.close()
    return len(planned)


def _type_of(tensor: GgufTensor, shape: tuple[int, ...], kind: str) -> Any:
    """Vectors stay in float32, rows of no multiple of a block in f16; the embeddings keep 8 bits, as in llama.cpp."""
    import gguf

    types = gguf.GGMLQuantizationType
    if tensor.exact or len(shape) < 2:
        return types.F32
    number = types[kind.upper()]
    if kind in LIMITS and tensor.name in ("token_embd.weight", "output.weight"):
        number = types.Q8_0
    return types.F16 if shape[-1] % gguf.GGML_QUANT_SIZES[number][0] else number


def _bytes(shape: tuple[int, ...], number: Any) -> int:
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[number]
    return torch.Size(shape).numel() // block * size


def _numbers(tensor: GgufTensor, read: Callable[[str], Tensor], kind: str) -> Any:
    """The tensor's bytes, as an array."""
    import gguf

    values = tensor.convert([read(name) for name in tensor.sources]).float().contiguous().numpy()
    return gguf.quants.quantize(values, _type_of(tensor, values.shape, kind))
