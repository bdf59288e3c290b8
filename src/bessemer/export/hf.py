"""Converts native models to Hugging Face folders and back, one weight mapping at a time: a 70B model is never in
memory.

The result gets its final name only after `gate.check` has compared it with the source.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.checkpoint.base import CheckpointWeights
from bessemer.checkpoint.manifest import verify
from bessemer.checkpoint.store import MODEL, CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors, stream_model
from bessemer.data.prepare import open_prepared
from bessemer.data.tokenizer.chat import turn_end_ids
from bessemer.data.tokenizer.tokenizer import Tokenizer, pad_token_id
from bessemer.errors import UserError
from bessemer.export.chat_template import tokenizer_files, update_tokenizer_files
from bessemer.export.gate import TOLERANCE, Comparison, Mismatch, check, check_requirements, network
from bessemer.model.adapters import MergedWeights, is_part
from bessemer.model.classifier import ClassifierFamily, classifier_families, without_head
from bessemer.model.families.folder import (
    HfFolder,
    ModelOrigin,
    _write,
    atomic_folder,
    check_folder,
    complete_names,
    find_origin,
    hf_tensors,
    translate_os_errors,
    write_folder,
)
from bessemer.model.families.registry import FAMILIES, Family, families_for, family_of, nearest_difference, read_shape
from bessemer.model.wrapped import WrappedModel, wrap
from bessemer.observe.progress import ProgressReport, silent
from bessemer.run.directory import Run
from bessemer.spec.load import load_spec
from bessemer.spec.shape import ModelShape, Rope
from bessemer.storage import write_atomic
from bessemer.train.trained import find_checkpoint

ROWS, LENGTH = 2, 96  # of the comparison: enough to use every weight, and logits of a large vocabulary stay small
SENTENCES = (
    "The converter was tilted, the blast turned on, and for twenty minutes the flame told the blower what was left in "
    "the iron: first silicon, then carbon, until it dropped and the steel was poured.",
    "def parse(line: str) -> dict[str, float]:\n    key, value = line.split('=', 1)\n    return {key: float(value)}\n",
    "In 1856 he read a paper in Cheltenham; by 1880, 1.3 million tons a year (3,561 a day) were made that way.",
    "Überall in Europa, à Paris comme à Kraków, 东京 и Москва, people asked: how hot is 1,600 °C?",
)


@dataclass(frozen=True)
class NativeModel:
    """A native model on disk. `place` has its model.json and tokenizer; weights are read on access."""

    place: Path
    checkpoint: Path
    shape: ModelShape
    weights: SavedTensors | MergedWeights
    tokenizer: Tokenizer | None


def open_native(place: Path, which: str = "last", merged: bool = True) -> NativeModel:
    """A run, or the output of `--to bessemer`. Hashes every file of the checkpoint first; DamagedCheckpoint names a bad
    one. Adapters are `merged`, or left out of its weights."""
    try:
        metadata = json.loads((place / "model.json").read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{place}: is neither a run nor an imported model (no model.json)") from None
    if (place / "events.jsonl").exists():
        checkpoint = find_checkpoint(Run.existing(place), which)
    else:
        checkpoints = {path.name: path for path, _ in CheckpointStore(place).committed("model")}
        if not checkpoints or which not in {"last", "best", *checkpoints}:
            raise UserError(f"{place}: no checkpoint {which!r}; there are {', '.join(checkpoints) or 'none'}")
        checkpoint = checkpoints.get(which, list(checkpoints.values())[-1])
    verify(checkpoint)
    file = place / "tokenizer.json"
    tokenizer = Tokenizer.load(file, metadata["eos"]) if metadata["eos"] and file.exists() else None
    shape = _exportable(ModelShape.from_dict(metadata["shape"]), place)
    weights = SavedTensors(checkpoint, MODEL)
    if any(map(is_part, weights)) and merged:
        return NativeModel(
            place, checkpoint, shape, MergedWeights(CheckpointWeights(checkpoint), weights.blank), tokenizer
        )
    return NativeModel(place, checkpoint, shape, weights, tokenizer)


def _exportable(shape: ModelShape, place: Path) -> ModelShape:
    """The same network in terms that other programs know: the trained context, and NTK scaling as another base."""
    rope = shape.rope
    settings = place / "settings.json"
    if shape.positions == "rope" and "attention" in shape.mixers and not shape.max_positions and settings.exists():
        trained = json.loads(settings.read_text())["context"]
        shape = replace(shape, max_positions=int(rope.original * rope.factor) or trained)
    if rope.scaling == "ntk":
        size = int((shape.mla.rope_dim if shape.mla else shape.head_dim) * rope.share)
        theta = rope.theta * rope.factor ** (size / (size - 2))
        shape = replace(shape, rope=Rope(theta=theta, share=rope.share, interleaved=rope.interleaved))
    return shape


def real_tokens(shape: ModelShape, tokenizer: Tokenizer | None, place: Path) -> tuple[Tensor, str]:
    """(rows, length) ids to compare on, and their source: the run's held-out data, sentences, or random ids."""
    windows = [window for window in shape.windows if window]
    # Longer than the narrowest window, so that windowing is exercised.
    length = min(max(LENGTH, min(windows, default=0) + 32), 1024, shape.max_positions or LENGTH)
    ids, origin = _held_out(place, ROWS * length), "held-out data"
    if ids is None and tokenizer is not None:
        sentence_ids = [id for text in SENTENCES for id in [tokenizer.eos_id, *tokenizer.encode(text)]]
        ids, origin = (
            torch.tensor((sentence_ids * (1 + ROWS * length // len(sentence_ids)))[: ROWS * length]),
            "sentences",
        )
    if ids is None or int(ids.max()) >= shape.vocab:
        generator = torch.Generator().manual_seed(0)
        ids, origin = torch.randint(0, shape.vocab, (ROWS * length,), generator=generator), "random tokens"
    return ids.view(ROWS, length), origin


def _held_out(place: Path, count: int) -> Tensor | None:
    record = place / "data.json"
    if not record.exists():
        return None
    folder = Path(json.loads(record.read_text())["folder"])
    if not (folder / "prepared.json").exists():  # user datasets, or moved
        return None
    for store in open_prepared(folder).validation.values():
        if store.tokens >= count:
            return torch.from_numpy(store.slice(0, count).astype("int64"))
    return None


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WRITING, OPENING, COMPARING = "writing tensors", "opening it with transformers", "comparing tensor by tensor"
# Keys of the original config that are not copied: the dtype is written by the export, code and paths do not apply.
NOT_CARRIED = ("torch_dtype", "auto_map", "_name_or_path", "quantization_config")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class ConvertedModel:
    """The result of a conversion. `comparison` is None if the check was skipped; `tokens` is the source of its ids."""

    folder: Path
    family: str
    tensors: int
    parameters: int
    dtype: str
    tokens: str
    comparison: Comparison | None


def to_hf(
    native: NativeModel,
    out: Path,
    dtype: str = "same",
    family: str | None = None,
    mode: str = "auto",
    overwrite: bool = False,
    report: ProgressReport = silent,
) -> ConvertedModel:
    """Write a folder that transformers opens. `mode`: how to check (auto, whole, layers or skip)."""
    if native.shape.wrapped:
        return _wrapped_to_hf(native, out, dtype, overwrite)
    source = find_origin(native.place)
    shape, chosen = native.shape, choose_family(native.shape, family, source.folder if source else None)
    if shape.labels:
        chosen = classifier_of(native, chosen)
    check_requirements(shape, mode)
    model, saved = network(shape), native.weights.blank()
    parameters = {name for name, _ in model.named_parameters()}
    if missing := [name for name in model.state_dict() if name not in saved]:
        raise UserError(f"{native.checkpoint}: has no tensor {missing[0]}: model.json describes another model")
    # Buffers (a router's choice bias) keep their dtype: they are sums of small steps.
    dtypes = {name: DTYPES.get(dtype, t.dtype) if name in parameters else t.dtype for name, t in saved.items()}
    blank = {name: tensor.to(dtypes[name]) for name, tensor in saved.items()}
    plan = [(name, tuple(t.shape), t.dtype) for name, t in hf_tensors(blank.__getitem__, shape, chosen)]

    def read_rounded(name: str) -> Tensor:
        return native.weights[name].to(dtypes[name])

    written = {str(dtypes[name]).removeprefix("torch.") for name in parameters}
    dtype_name = written.pop() if len(written) == 1 else "float32"
    files, ids = other_files(native.place, shape, native.tokenizer, source)
    config = chosen.config(shape) | {"dtype": dtype_name} | ids
    if shape.labels and native.tokenizer and config.get("pad_token_id") is None:
        # transformers classifies the last token that is no padding.
        own = source is not None and source.own_tokenizer
        config["pad_token_id"] = (
            pad_token_id(source.folder.path, native.tokenizer) if source and own else native.tokenizer.eos_id
        )
    files["config.json"] = (carried_keys(_config_of(source), chosen, config) if source else {}) | config
    if shape.causal and not shape.labels:
        files["generation_config.json"] = _with_turn_ends(files.get("generation_config.json", dict(ids)), files, native)
    tokens_BT, origin = real_tokens(shape, native.tokenizer, native.place)
    if shape.labels:
        padding = torch.tensor(config.get("pad_token_id", -1))
        tokens_BT = torch.where(tokens_BT == padding, (tokens_BT + 1) % shape.vocab, tokens_BT)
    with atomic_folder(out, overwrite) as folder:
        write_folder(
            folder, plan, hf_tensors(with_progress(read_rounded, WRITING, len(saved), report), shape, chosen), files
        )
        report(OPENING)
        read = with_progress(read_rounded, COMPARING, len(saved), report)
        comparison = check(folder, chosen.architectures[0], shape, read, tokens_BT, folder.parent, mode)
    return ConvertedModel(out, chosen.name, len(plan), shape.parameters, dtype_name, origin, comparison)


def _wrapped_to_hf(native: NativeModel, out: Path, dtype: str, overwrite: bool) -> ConvertedModel:
    """transformers writes the model that it runs; reopened, it must give the same logits. Needs memory for it twice."""
    shape, kind = native.shape, DTYPES.get(dtype, torch.float32)
    model = WrappedModel(shape).eval()
    model.load_state_dict({name: native.weights[name].to(kind) for name in model.state_dict()})
    tokens_BT, origin = real_tokens(shape, native.tokenizer, native.place)
    with atomic_folder(out, overwrite) as folder:
        model.inner.to(kind).save_pretrained(folder)
        for name, content in other_files(native.place, shape, native.tokenizer, find_origin(native.place))[0].items():
            _write(folder / name, content)
        with torch.no_grad():
            native_BTV, hf_BTV = (m.logits(m(tokens_BT)) for m in (model.float(), wrap(folder, "cpu").eval()))
        gap = float((native_BTV - hf_BTV).abs().max() / native_BTV.abs().max())
        if not gap <= TOLERANCE:
            raise Mismatch(f"{out}: what transformers saved gives different logits (by {gap:.1e})")
    agreement = float((native_BTV.argmax(-1) == hf_BTV.argmax(-1)).float().mean())
    losses = [float(F.cross_entropy(x[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())) for x in (native_BTV, hf_BTV)]
    comparison = Comparison({"whole": gap}, gap, agreement, losses[0], losses[1], TOLERANCE)
    dtype_name = str(kind).removeprefix("torch.")
    return ConvertedModel(out, "wrapped", len(model.state_dict()), shape.parameters, dtype_name, origin, comparison)


def choose_family(shape: ModelShape, name: str | None, origin: HfFolder | None = None) -> Family:
    """The requested family; otherwise that of the folder the model came from; otherwise the first that can represent
    it."""
    if name is not None and name not in FAMILIES:
        raise UserError(f"--family {name} is unknown; choose from {', '.join(FAMILIES)}")
    able = classifier_families(shape) if shape.labels else families_for(shape)
    if not able:
        body = without_head(shape) if shape.labels else shape
        raise UserError(f"no family of Hugging Face can represent this model: {nearest_difference(body)}")
    original = _family_name(origin) if name is None else None
    for family in sorted(able, key=lambda family: family.name != original):
        if name in (None, family.name):
            return family
    raise UserError(f"--family {name}: cannot represent this model; {', '.join(family.name for family in able)} can")


def classifier_of(native: NativeModel, family: Family) -> ClassifierFamily:
    """The family's classifier with the labels of the run's spec."""
    file = native.place / "spec.yaml"
    spec = load_spec(file) if file.exists() else None
    if spec is not None and spec.objective == "reward":
        return ClassifierFamily(family, "sequence", native.shape.labels, tuple(spec.reward.labels), "regression")
    classify = spec.classify if spec else None
    if classify is None:
        raise UserError(f"{native.place}: has no spec.yaml that names its labels")
    names = tuple(classify.labels) or ("value",)
    return ClassifierFamily(family, classify.kind, native.shape.labels, names, classify.problem)


def _family_name(origin: HfFolder | None) -> str | None:
    try:
        return family_of(origin.config).name if origin else None
    except UserError:  # a wrapped model
        return None


def _config_of(origin: ModelOrigin) -> dict[str, Any]:
    """The original config.json, without token ids if the model has another tokenizer now."""
    keep_ids = origin.own_tokenizer
    return {key: value for key, value in origin.folder.config.items() if keep_ids or not key.endswith("_token_id")}


def carried_keys(original: Mapping[str, Any], family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Keys of the original config.json that `config` lacks, such as initializer_range, except those that would change
    the model: the run may have changed what they describe."""
    if original.get("model_type") != config["model_type"]:
        return {}
    extra = {key: value for key, value in original.items() if key not in config and key not in NOT_CARRIED}
    written = family.shape(config)

    def harmless(keys: dict[str, Any]) -> bool:
        try:
            return family.shape(keys | config) == written
        except (UserError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return False

    return extra if harmless(extra) else {key: value for key, value in extra.items() if harmless({key: value})}


def other_files(
    place: Path, shape: ModelShape, tokenizer: Tokenizer | None, origin: ModelOrigin | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokenizer files and token ids: those of the imported model, or generated from the run's."""
    if origin is None or not origin.own_tokenizer:
        if tokenizer is None:
            return {}, {}
        begins = shape.causal and not shape.labels
        files, ids = tokenizer_files(tokenizer, place, shape.max_positions, begins)
        return files, dict(ids)
    folder = origin.folder
    files = dict(folder.tokenizer_files)
    if not origin.copied and tokenizer is not None:
        files = update_tokenizer_files(files, tokenizer, place)
    if folder.generation_config is not None:
        files["generation_config.json"] = folder.generation_config
    return files, {key: folder.config[key] for key in TOKEN_IDS if key in folder.config}


def _with_turn_ends(generation: dict[str, Any], files: dict[str, Any], native: NativeModel) -> dict[str, Any]:
    """generation_config.json that also stops where the exported chat template ends a turn."""
    template = files.get("chat_template.jinja")
    if native.tokenizer is None or not isinstance(template, str):
        return generation
    named = generation.get("eos_token_id")
    stops = [] if named is None else named if isinstance(named, list) else [named]
    ends = [i for i in sorted(turn_end_ids(template, native.tokenizer)) if i not in stops]
    return generation | {"eos_token_id": [*stops, *ends]} if ends else generation


def with_progress(
    read: Callable[[str], Tensor], phase: str, total: int, report: ProgressReport
) -> Callable[[str], Tensor]:
    """The same reader, which reports how many tensors it has read."""
    done = 0

    def read_next(name: str) -> Tensor:
        nonlocal done
        report(phase, min(done, total), total)
        done += 1
        return read(name)

    return read_next


def to_native(
    source: Path, out: Path, mode: str = "auto", overwrite: bool = False, report: ProgressReport = silent
) -> ConvertedModel:
    """Write a checkpoint that `start_from` reads, with the folder's config and tokenizer and a model.json."""
    folder = HfFolder(source)
    family, shape = read_shape(folder.config)
    check_requirements(shape, mode)
    complete_names(folder, shape, family)
    check_folder(network(shape), folder, family)
    tokenizer = _tokenizer(folder)
    metadata = {"shape": shape.to_dict(), "eos": tokenizer.eos if tokenizer else ""}
    tokens_BT, origin = real_tokens(shape, tokenizer, source)
    blank, read = blank_and_reader(folder, shape, family)
    with atomic_folder(out, overwrite) as place:
        with translate_os_errors(out, "written"):
            place.mkdir(parents=True)
            made_from = {"imported_from": str(source.absolute()), "family": family.name}
            checkpoint = stream_model(place, blank, with_progress(read, WRITING, len(blank), report), made_from)
            for name, path in folder.tokenizer_files.items():
                (place / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, place / name)
            others = {"generation_config": folder.generation_config, "config": folder.config, "model": metadata}
            for name, content in others.items():
                if content is not None:
                    write_atomic(place / f"{name}.json", json.dumps(content, indent=2))
        report(OPENING)
        read_native = with_progress(SavedTensors(checkpoint, MODEL).__getitem__, COMPARING, len(blank), report)
        comparison = check(source, family.architectures[0], shape, read_native, tokens_BT, place.parent, mode)
    dtype = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in blank.values()}))
    return ConvertedModel(out / checkpoint.name, family.name, len(blank), shape.parameters, dtype, origin, comparison)


def _tokenizer(folder: HfFolder) -> Tokenizer | None:
    """The tokenizer, for real tokens to compare on; a folder may have none, or one that only transformers reads."""
    try:
        return Tokenizer.load(folder.path)
    except UserError:
        return None


def blank_and_reader(
    folder: HfFolder, shape: ModelShape, family: Family
) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Native meta tensors in the folder's dtypes, and a reader for them that holds one mapping's tensors."""
    mappings = list(family.weight_mappings(shape))
    blank: dict[str, Tensor] = {}
    for mapping in mappings:
        infos = [folder.tensors[name] for name in mapping.hf_names]
        converted = mapping.to_native([torch.empty(info.shape, dtype=info.dtype, device="meta") for info in infos])
        blank |= dict(zip(mapping.native_names, converted, strict=True))
    mapping_of = {name: mapping for mapping in mappings for name in mapping.native_names}
    current: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        if name not in current:
            mapping = mapping_of[name]
            current.clear()
            converted = mapping.to_native([folder.read(hf_name) for hf_name in mapping.hf_names])
            current.update(zip(mapping.native_names, converted, strict=True))
        return current[name]

    return blank, read
