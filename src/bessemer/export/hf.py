"""What is exported: a native model on disk, of a run or of an import, and real tokens to compare on.

Native models to Hugging Face folders and back, one piece at a time: a 70B model is never in memory.

What is written stands under another name until the gate has passed it; then it takes the name that was asked for.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.checkpoint.manifest import verify
from bessemer.checkpoint.store import MODEL, CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors, stream_model
from bessemer.data.prepare import open_prepared
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.export.chat_template import tokenizer_files, with_tokens_of_the_run
from bessemer.export.gate import TOLERANCE, Comparison, Mismatch, check, network, ready
from bessemer.model.families.family import Family
from bessemer.model.families.folder import Folder, Origin, check_folder, complete_names, find_origin, theirs, told
from bessemer.model.families.registry import FAMILIES, families_for, family_of, nearest_difference, read_shape
from bessemer.model.families.writer import _check_target, _write, write_folder
from bessemer.model.wrapped import WrappedModel, wrap
from bessemer.observe.progress import ProgressReport, silent
from bessemer.run.directory import Run
from bessemer.spec.shape import ModelShape, Rope
from bessemer.storage import commit_folder, write_atomic
from bessemer.train.trained import find_checkpoint

ROWS, LENGTH = 2, 96  # of the comparison: every weight takes part, and a large vocabulary's logits stay small
SENTENCES = (
    "The converter was tilted, the blast turned on, and for twenty minutes the flame told the blower what was left in "
    "the iron: first silicon, then carbon, until it dropped and the steel was poured.",
    "def parse(line: str) -> dict[str, float]:\n    key, value = line.split('=', 1)\n    return {key: float(value)}\n",
    "In 1856 he read a paper in Cheltenham; by 1880, 1.3 million tons a year (3,561 a day) were made that way.",
    "Überall in Europa, à Paris comme à Kraków, 东京 и Москва, people asked: how hot is 1,600 °C?",
)


@dataclass(frozen=True)
class NativeModel:
    """A native model on disk. `place` has its model.json and its tokenizer; weights are read when asked for."""

    place: Path
    checkpoint: Path
    shape: ModelShape
    weights: SavedTensors
    tokenizer: Tokenizer | None


def open_native(place: Path, which: str = "last") -> NativeModel:
    """A run, or what `--to bessemer` wrote. Every file of the checkpoint is hashed first; Damaged names a bad one."""
    try:
        about = json.loads((place / "model.json").read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{place}: is neither a run nor an imported model (no model.json in it)") from None
    if (place / "events.jsonl").exists():
        checkpoint = find_checkpoint(Run.existing(place), which)
    else:
        found = {path.name: path for path, _ in CheckpointStore(place).committed("model")}
        if not found or which not in {"last", "best", *found}:
            raise UserError(f"{place}: no checkpoint {which!r}; there are {', '.join(found) or 'none'}")
        checkpoint = found.get(which, list(found.values())[-1])
    verify(checkpoint)
    file = place / "tokenizer.json"
    tokenizer = Tokenizer.load(file, about["eos"]) if about["eos"] and file.exists() else None
    shape = _exportable(ModelShape.from_dict(about["shape"]), place)
    return NativeModel(place, checkpoint, shape, SavedTensors(checkpoint, MODEL), tokenizer)


def _exportable(shape: ModelShape, place: Path) -> ModelShape:
    """The same network in words that other programs have: what it is good for, and NTK's stretch as its base."""
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
    """(rows, length) ids to compare on, and where they are from: held-out data of the run, sentences, or chance."""
    windows = [window for window in shape.windows if window]
    # Longer than the narrowest window, so that it is seen to close.
    length = min(max(LENGTH, min(windows, default=0) + 32), 1024, shape.max_positions or LENGTH)
    ids, origin = _held_out(place, ROWS * length), "held-out data"
    if ids is None and tokenizer is not None:
        said = [id for text in SENTENCES for id in [tokenizer.eos_id, *tokenizer.encode(text)]]
        ids, origin = torch.tensor((said * (1 + ROWS * length // len(said)))[: ROWS * length]), "sentences"
    if ids is None or int(ids.max()) >= shape.vocab:
        generator = torch.Generator().manual_seed(0)
        ids, origin = torch.randint(0, shape.vocab, (ROWS * length,), generator=generator), "random tokens"
    return ids.view(ROWS, length), origin


def _held_out(place: Path, count: int) -> Tensor | None:
    about = place / "data.json"
    if not about.exists():
        return None
    folder = Path(json.loads(about.read_text())["folder"])
    if not (folder / "prepared.json").exists():  # the caller's own datasets, or moved since
        return None
    for store in open_prepared(folder).validation.values():
        if store.tokens >= count:
            return torch.from_numpy(store.slice(0, count).astype("int64"))
    return None


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WRITING, OPENING, COMPARING = "writing tensors", "opening it with transformers", "comparing tensor by tensor"
# Another type is written under dtype; code and paths of the original stay behind.
NOT_CARRIED = ("torch_dtype", "auto_map", "_name_or_path", "quantization_config")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class ConvertedModel:
    """What was written. `comparison` is None where the check was left out; `tokens` says what it read."""

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
    ready(shape, mode)
    model, saved = network(shape), native.weights.blank()
    parameters = {name for name, _ in model.named_parameters()}
    if missing := [name for name in model.state_dict() if name not in saved]:
        raise UserError(f"{native.checkpoint}: has no tensor {missing[0]}: model.json describes another model")
    # Buffers (a router's choice bias) keep their type: they are sums of small steps.
    types = {name: DTYPES.get(dtype, t.dtype) if name in parameters else t.dtype for name, t in saved.items()}
    blank = {name: tensor.to(types[name]) for name, tensor in saved.items()}
    plan = [(name, tuple(t.shape), t.dtype) for name, t in theirs(blank.__getitem__, shape, chosen)]

    def rounded(name: str) -> Tensor:
        return native.weights[name].to(types[name])

    held = {str(types[name]).removeprefix("torch.") for name in parameters}
    said = {"dtype": held.pop() if len(held) == 1 else "float32"}
    files, ids = _other_files(native, source)
    config = chosen.config(shape) | said | ids
    files["config.json"] = (carried_keys(_config_of(source), chosen, config) if source else {}) | config
    if shape.causal:
        files.setdefault("generation_config.json", dict(ids))
    tokens_BT, origin = real_tokens(shape, native.tokenizer, native.place)
    with appearing(out, overwrite) as folder:
        write_folder(folder, plan, theirs(counted(rounded, WRITING, len(saved), report), shape, chosen), files)
        report(OPENING)
        read = counted(rounded, COMPARING, len(saved), report)
        found = check(folder, chosen.architectures[0], shape, read, tokens_BT, folder.parent, mode)
    return ConvertedModel(out, chosen.name, len(plan), shape.parameters, said["dtype"], origin, found)


def _wrapped_to_hf(native: NativeModel, out: Path, dtype: str, overwrite: bool) -> ConvertedModel:
    """What transformers runs it writes itself; opened again, it has to say the same. Whole in memory, twice."""
    shape, kind = native.shape, DTYPES.get(dtype, torch.float32)
    model = WrappedModel(shape).eval()
    model.load_state_dict({name: native.weights[name].to(kind) for name in model.state_dict()})
    tokens_BT, origin = real_tokens(shape, native.tokenizer, native.place)
    with appearing(out, overwrite) as folder:
        model.inner.to(kind).save_pretrained(folder)
        for name, content in _other_files(native, find_origin(native.place))[0].items():
            _write(folder / name, content)
        with torch.no_grad():
            ours, theirs_BTV = (m.logits(m(tokens_BT)) for m in (model.float(), wrap(folder, "cpu").eval()))
        gap = float((ours - theirs_BTV).abs().max() / ours.abs().max())
        if not gap <= TOLERANCE:
            raise Mismatch(f"{out}: what transformers saved gives other logits, by {gap:.1e}")
    agree = float((ours.argmax(-1) == theirs_BTV.argmax(-1)).float().mean())
    losses = [float(F.cross_entropy(x[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())) for x in (ours, theirs_BTV)]
    found = Comparison({"whole": gap}, gap, agree, losses[0], losses[1], TOLERANCE)
    held = str(kind).removeprefix("torch.")
    return ConvertedModel(out, "wrapped", len(model.state_dict()), shape.parameters, held, origin, found)


def choose_family(shape: ModelShape, name: str | None, origin: Folder | None = None) -> Family:
    """The one that is asked for; else that of the folder the model came from; else the first that can hold it."""
    if name is not None and name not in FAMILIES:
        raise UserError(f"--family {name}: there are {', '.join(FAMILIES)}")
    able = families_for(shape)
    if not able:
        raise UserError(f"no family of Hugging Face can hold this model: {nearest_difference(shape)}")
    before = _family_name(origin) if name is None else None
    for family in sorted(able, key=lambda family: family.name != before):
        if name in (None, family.name):
            return family
    raise UserError(f"--family {name}: cannot hold this model; {', '.join(family.name for family in able)} can")


def _family_name(origin: Folder | None) -> str | None:
    try:
        return family_of(origin.config).name if origin else None
    except UserError:  # a model that transformers ran
        return None


def _config_of(origin: Origin) -> dict[str, Any]:
    """Its config.json, without ids of a vocabulary that the model no longer has."""
    own = origin.own_tokenizer
    return {key: value for key, value in origin.folder.config.items() if own or not key.endswith("_token_id")}


def carried_keys(original: Mapping[str, Any], family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Keys of the config.json that the model came with and that `config` lacks, such as initializer_range. Left out
    is what would make `config` another model: the run may have changed what it speaks of."""
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


def _other_files(native: NativeModel, origin: Origin | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tokenizer's files and the token ids: those that came with an imported model, or made from the run's."""
    if origin is None or not origin.own_tokenizer:
        if native.tokenizer is None:
            return {}, {}
        made, ids = tokenizer_files(native.tokenizer, native.place, native.shape.max_positions, native.shape.causal)
        return made, dict(ids)
    folder = origin.folder
    files: dict[str, Any] = dict(folder.tokenizer_files)
    if not origin.copied and native.tokenizer is not None:
        files = with_tokens_of_the_run(files, native.tokenizer, native.place)
    if folder.generation_config is not None:
        files["generation_config.json"] = folder.generation_config
    return files, {key: folder.config[key] for key in TOKEN_IDS if key in folder.config}


def counted(read: Callable[[str], Tensor], what: str, total: int, report: ProgressReport) -> Callable[[str], Tensor]:
    """The same reader of tensors, which reports how many it has read."""
    done = 0

    def reading(name: str) -> Tensor:
        nonlocal done
        report(what, min(done, total), total)
        done += 1
        return read(name)

    return reading


def to_native(
    source: Path, out: Path, mode: str = "auto", overwrite: bool = False, report: ProgressReport = silent
) -> ConvertedModel:
    """Write a checkpoint that `start_from` reads, beside what else the folder has: config, tokenizer, model.json."""
    folder = Folder(source)
    family, shape = read_shape(folder.config)
    ready(shape, mode)
    complete_names(folder, shape, family)
    check_folder(network(shape), folder, family)
    tokenizer = _tokenizer(folder)
    about = {"shape": shape.to_dict(), "eos": tokenizer.eos if tokenizer else ""}
    tokens_BT, origin = real_tokens(shape, tokenizer, source)
    blank, read = pieces_of(folder, shape, family)
    with appearing(out, overwrite) as place:
        with told(out, "written"):
            place.mkdir(parents=True)
            made_from = {"imported_from": str(source.absolute()), "family": family.name}
            made = stream_model(place, blank, counted(read, WRITING, len(blank), report), made_from)
            for name, path in folder.tokenizer_files.items():
                (place / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, place / name)
            others = {"generation_config": folder.generation_config, "config": folder.config, "model": about}
            for name, content in others.items():
                if content is not None:
                    write_atomic(place / f"{name}.json", json.dumps(content, indent=2))
        report(OPENING)
        ours = counted(SavedTensors(made, MODEL).__getitem__, COMPARING, len(blank), report)
        found = check(source, family.architectures[0], shape, ours, tokens_BT, place.parent, mode)
    dtype = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in blank.values()}))
    return ConvertedModel(out / made.name, family.name, len(blank), shape.parameters, dtype, origin, found)


def _tokenizer(folder: Folder) -> Tokenizer | None:
    """For real tokens to compare with; a folder may have none, or one that only transformers reads."""
    try:
        return Tokenizer.load(folder.path)
    except UserError:
        return None


def pieces_of(folder: Folder, shape: ModelShape, family: Family) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
    """Our tensors without data, in the folder's types, and a reader of them that keeps one piece of the folder."""
    pieces = list(family.pieces(shape))
    blank: dict[str, Tensor] = {}
    for piece in pieces:
        infos = [folder.tensors[name] for name in piece.theirs]
        found = piece.to_ours([torch.empty(info.shape, dtype=info.dtype, device="meta") for info in infos])
        blank |= dict(zip(piece.ours, found, strict=True))
    piece_of = {name: piece for piece in pieces for name in piece.ours}
    kept: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        if name not in kept:
            piece = piece_of[name]
            kept.clear()
            kept.update(zip(piece.ours, piece.to_ours([folder.read(their) for their in piece.theirs]), strict=True))
        return kept[name]

    return blank, read


@contextmanager
def appearing(path: Path, overwrite: bool) -> Iterator[Path]:
    """A name beside the target, to be written to; it becomes the target if all goes well, and is removed if not."""
    target = path.resolve()
    _check_target(target, overwrite)
    waiting = target.with_name(f".{target.name}.unchecked-{os.getpid()}")
    try:
        with told(target, "written"):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(waiting, ignore_errors=True)
        yield waiting
        with told(target, "written"):
            commit_folder(waiting, target, overwrite=True)
    finally:
        shutil.rmtree(waiting, ignore_errors=True)
