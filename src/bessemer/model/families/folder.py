"""A Hugging Face model folder: its config, tensors and tokenizer files, read and written one tensor at a time, so that
memory holds one weight mapping besides the model. Nothing in a folder is executed.

Weights come from safetensors only. A folder is refused, with the tensor's name, before the first tensor is read if its
files contradict each other or do not match the model in its config. A run that starts from `model.hf` keeps copies of
the small files in RUN/hf, so that it does not depend on the folder.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.model.families.registry import Family
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.storage import commit_folder, sync_path

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = WEIGHTS | {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
_TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "*.tiktoken", "tekken.json", "chat_template.*", "additional_chat_templates/*.jinja"),
)
# Buffers that transformers used to save and now computes.
_BUFFERS = r"(^|\.)(rotary_emb\.inv_freq|(cross)?(attn|attention)\.(masked_)?bias|position_ids)$"
_QUANTIZED = r"\.(qweight|qzeros|absmax|SCB|weight_(packed|scale|scale_inv))$"
_AGAIN = "download or save it again"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file of the folder; `offset` is where its bytes start in that file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    offset: int = 0

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def translate_os_errors(path: Path, action: str = "read") -> Iterator[None]:
    """Turns an OSError into a UserError that names the path."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be {action}: {error.strerror or error}") from None


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file. The library checks lengths, offsets and shapes against the file's size."""
    from safetensors import SafetensorError, safe_open

    with translate_os_errors(path), path.open("rb") as file:
        if (first := file.read(8)) == b"version ":
            raise UserError(f"{path}: is a Git LFS pointer, not the weights; run `git lfs pull`")
        try:
            with safe_open(path, "np"):
                header = json.loads(file.read(length := int.from_bytes(first, "little")))
        except (SafetensorError, ValueError, RecursionError) as error:
            reason = (
                f"{path.stat().st_size} bytes; {str(error).removeprefix('Error while deserializing header: ')[:99]}"
            )
            raise UserError(f"{path}: is truncated, damaged or not a safetensors file ({reason}); {_AGAIN}") from None
    header.pop("__metadata__", None)
    tensors = {}
    for stored_name, entry in header.items():
        # The names of norms in BERT's first files.
        name = stored_name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if entry["dtype"] not in DTYPES:
            raise UserError(f"{path}: {name!r} has the unknown dtype {entry['dtype']}; save the model in bf16")
        if 0 in entry["shape"]:
            raise UserError(f"{path}: {name!r} is empty; save the model again, gathered if it was sharded (ZeRO-3)")
        offset = 8 + length + entry["data_offsets"][0]
        tensors[name] = TensorInfo(tuple(entry["shape"]), DTYPES[entry["dtype"]], path.name, offset)
    return tensors


def read_tensor(folder: Path, info: TensorInfo, name: str) -> Tensor:
    """One tensor of a safetensors file."""
    raw, path = torch.empty(info.bytes, dtype=torch.uint8), folder / info.file
    with translate_os_errors(path), path.open("rb") as file:
        file.seek(info.offset)
        if file.readinto(raw.numpy().data) < info.bytes:
            raise UserError(f"{path}: ends inside {name!r}; the file changed during the read")
    return raw.view(info.dtype).view(info.shape)


class HfFolder:
    """`config` is read at once, headers with `tensors`, one tensor with `read`. UserError describes what is wrong."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.expanduser(path))
        with translate_os_errors(self.path):
            is_model = (self.path / "config.json").is_file()
        if not is_model:
            fix = "`hf download ORG/NAME --local-dir FOLDER` fetches one from the Hub"
            raise UserError(f"{path}: is not a model folder (no config.json); {fix}")
        self.config = read_json(self.path / "config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any] | None:
        path = self.path / "generation_config.json"
        return read_json(path) if path.exists() else None

    @cached_property
    def tokenizer_files(self) -> dict[str, Path]:
        """Files of the tokenizer and its chat templates by their names in the folder."""
        paths = sorted(path for pattern in _TOKENIZER for path in self.path.glob(pattern))
        return {path.relative_to(self.path).as_posix(): path for path in paths}

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        with translate_os_errors(self.path):
            files = {file.name for file in self.path.iterdir()}
        if {SINGLE_FILE, INDEX} <= files:
            raise UserError(f"{self.path}: has both {SINGLE_FILE} and {INDEX}; delete the wrong one")
        if SINGLE_FILE in files:
            return read_header(self.path / SINGLE_FILE)
        if INDEX not in files:
            raise UserError(f"{self.path}: {self._explain_missing_weights(files)}")
        shard_of = read_json(index := self.path / INDEX).get("weight_map")
        if not isinstance(shard_of, dict) or not all(isinstance(file, str) for file in shard_of.values()):
            raise UserError(f"{index}: has no weight_map from tensors to files; {_AGAIN}")
        # Only listed files: an index cannot point outside the folder.
        if missing := sorted(set(shard_of.values()) - files):
            raise UserError(f"{index}: the files {_some(missing)} are missing; download them")
        tensors: dict[str, TensorInfo] = {}
        for file in sorted(set(shard_of.values())):
            shard = read_header(self.path / file)
            for name in shard.keys() & tensors.keys():
                raise UserError(
                    f"{self.path}: {name!r} is in both {tensors[name].file} and {file}; delete the wrong file"
                )
            tensors |= shard
        for name, file in shard_of.items():
            if name not in tensors or tensors[name].file != file:
                raise UserError(f"{index}: {name!r} should be in {file!r} but is not; {_AGAIN}")
        return tensors

    def _explain_missing_weights(self, files: set[str]) -> str:
        if shards := sorted(file for file in files if file.endswith(".safetensors")):
            return f"has {_some(shards)} but neither {SINGLE_FILE} nor {INDEX}; add the index"
        if pickles := sorted(file for file in files if re.fullmatch(r".*\.(bin|pt|pth|ckpt)", file)):
            named = self.config.get("architectures")
            model_class = named[0] if isinstance(named, list) and named else "AutoModelForCausalLM"
            fix = f"transformers.{model_class}.from_pretrained(FOLDER).save_pretrained(NEW) converts them"
            return f"its weights are pickles ({_some(pickles)}), which can run code; {fix}"
        return f"has no weights ({SINGLE_FILE} or {INDEX})"

    def read(self, name: str) -> Tensor:
        """One tensor in its own memory. Not memory-mapped: with mmap a failing file system kills the process."""
        return read_tensor(self.path, self.tensors[name], name)

    def check_tied(self, head: str, embedding: str) -> None:
        """For a config with tied embeddings: a head that was saved anyway must equal the embedding bit for bit."""
        if head not in self.tensors:
            return
        if self.tensors[head].dtype != self.tensors[embedding].dtype or not torch.equal(
            self.read(head), self.read(embedding)
        ):
            conflict = f"config.json ties the embeddings, but {head!r} differs from {embedding!r}"
            raise UserError(f'{self.path}: {conflict}; write "tie_word_embeddings": false, or find the right config')


def read_json(path: Path) -> dict[str, Any]:
    try:
        with translate_os_errors(path):
            content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
        raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); {_AGAIN}") from None


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_tensors(
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, tuple[int, ...]],
    tied: set[str],
    path: Path,
    ignore: str = "^$",
) -> None:
    """Raises UserError unless the folder has exactly the expected tensors, with trainable dtypes.

    `tied` names output embeddings that may be tied. If expected, the config unties them and they must exist; otherwise
    they may exist (see `HfFolder.check_tied`). `ignore` is a pattern of names to skip.
    """
    extra = [name for name in tensors if name not in expected and name not in tied]
    extra = [name for name in extra if not re.search(f"{_BUFFERS}|{ignore}", name)]
    quantized = [name for name in expected if name in tensors and tensors[name].dtype not in WEIGHTS.values()]
    if quantized := quantized or [name for name in extra if re.search(_QUANTIZED, name)]:
        problem = f"{_some(quantized)}: quantized or integers ({tensors[quantized[0]].dtype}), which cannot be trained"
        raise UserError(f"{path}: {problem}; use the model's bf16 or fp32 weights")
    missing = [name for name in expected if name not in tensors]
    if missing and tied.issuperset(missing):
        conflict = f"config.json unties the embeddings, but there is no {_some(missing)}"
        raise UserError(f'{path}: {conflict}; write "tie_word_embeddings": true, or find the missing weights')
    wrong = [name for name in expected if name in tensors and tensors[name].shape != tuple(expected[name])]
    problems = [f"{label} {_some(names)}" for label, names in (("missing", missing), ("unexpected", extra)) if names]
    problems += [_describe_shape(name, tensors[name].shape, tuple(expected[name])) for name in wrong[:1]]
    problems += [f"{len(wrong) - 1} more with another shape"] if len(wrong) > 1 else []
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}; config.json and weights belong to different models")


def _describe_shape(name: str, actual: tuple[int, ...], expected: tuple[int, ...]) -> str:
    reason = " (transposed)" if actual == expected[::-1] else ""
    if len(actual) == 2 and actual[1:] == expected[1:] and re.search(r"emb|wte|head|shared", name):
        reason = f" (another vocabulary size: set vocab_size to {actual[0]})"
    return f"{name!r} has shape {actual}, expected {expected}{reason}"


Progress = Callable[[int, int], None]  # tensors done, total


def hf_tensors(tensor_of: Callable[[str], Tensor], shape: ModelShape, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Converts native tensors to the family's Hugging Face names and layouts, in the order of the mappings."""
    for mapping in family.weight_mappings(shape):
        converted = mapping.to_hf([tensor_of(name).detach() for name in mapping.native_names])
        yield from zip(mapping.hf_names, converted, strict=True)


def native_tensors(folder: HfFolder, shape: ModelShape, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Converts the folder's tensors to native ones, in the folder's dtypes. The folder has passed `check_folder`."""
    for mapping in family.weight_mappings(shape):
        converted = mapping.to_native([folder.read(name) for name in mapping.hf_names])
        yield from zip(mapping.native_names, converted, strict=True)


def expected_shapes(model: nn.Module, family: Family) -> dict[str, tuple[int, ...]]:
    """Shapes by Hugging Face name: the mappings applied to meta tensors."""
    blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    return {name: tuple(tensor.shape) for name, tensor in hf_tensors(blank.__getitem__, _shape(model), family)}


def check_folder(model: nn.Module, folder: HfFolder, family: Family) -> None:
    """Raises UserError unless the folder holds this model's tensors. The model may be on the meta device."""
    shape = _shape(model)
    complete_names(folder, shape, family)
    # The mappings of an untied model tell what a superfluous tied head is called.
    untied = {mapping.native_names: mapping.hf_names for mapping in family.weight_mappings(replace(shape, tied=False))}
    heads = set(untied.get(("head.weight",), ()))
    check_tensors(folder.tensors, expected_shapes(model, family), heads, folder.path, "|".join(family.ignored) or "^$")
    if shape.tied:
        for head in heads:
            folder.check_tied(head, *untied["embedding.weight",])


def load_weights(model: nn.Module, folder: HfFolder, family: Family, progress: Progress | None = None) -> None:
    """Fill a model, whose memory is allocated (`to_empty`), in its own dtypes."""
    check_folder(model, folder, family)
    unfilled, total = model.state_dict(), len(model.state_dict())
    with torch.no_grad():
        for name, tensor in native_tensors(folder, _shape(model), family):
            unfilled.pop(name).copy_(tensor)
            if progress is not None:
                progress(total - len(unfilled), total)
    assert not unfilled, f"no mapping of {family.name} fills {sorted(unfilled)}"


def _shape(model: nn.Module) -> ModelShape:
    shape = model.shape
    assert isinstance(shape, ModelShape)
    return shape


COPIES = "hf"  # folder name inside a run


@dataclass(frozen=True)
class ModelOrigin:
    """`own_tokenizer`: the model still uses the folder's tokenizer, possibly with added tokens. `copied`: the folder is
    the model's own, not one that a run was started from."""

    folder: HfFolder
    own_tokenizer: bool
    copied: bool = False


def find_origin(place: Path, depth: int = 8) -> ModelOrigin | None:
    """The origin of a run, an import or a Hugging Face folder. None for a run from random weights, or from an older
    version whose folder is gone."""
    if (place / "config.json").is_file():
        return ModelOrigin(HfFolder(place), True, copied=True)
    if (place / COPIES / "config.json").is_file():
        copies = HfFolder(place / COPIES)
        return ModelOrigin(copies, bool(copies.tokenizer_files))
    if not (place / "spec.yaml").is_file() or not depth:
        return None
    return _origin_of_spec(load_spec(place / "spec.yaml"), depth)


def _origin_of_spec(spec: RunSpec, depth: int = 8) -> ModelOrigin | None:
    if spec.model.hf is not None:
        try:
            folder = HfFolder(spec.model.hf)
        except UserError:  # moved
            return None
        path = spec.tokenizer.path
        return ModelOrigin(folder, path is None or Path(path).resolve().parent == folder.path.resolve())
    if spec.start_from is not None:
        parents = Path(spec.start_from).parents
        folders = [parent for parent in parents[:2] if (parent / "model.json").is_file()]
        return find_origin(folders[0], depth - 1) if folders else None
    return None


def keep_origin(run: Path, spec: RunSpec) -> None:
    """Copy the small files of the folder that the run starts from, unless they were copied before."""
    origin = None if (run / COPIES).exists() else _origin_of_spec(spec)
    if origin is None:
        return
    with translate_os_errors(run / COPIES, "written"):
        partial = run / f".{COPIES}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        files = {"config.json": origin.folder.path / "config.json"}
        if origin.own_tokenizer:
            files |= origin.folder.tokenizer_files
            if origin.folder.generation_config is not None:
                files["generation_config.json"] = origin.folder.path / "generation_config.json"
        for name, path in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, partial / name)
        partial.rename(run / COPIES)


def complete_names(folder: HfFolder, shape: ModelShape, family: Family) -> None:
    """Add the missing prefix (`transformer.`, `model.`) to the names of a headless model's folder: the first files of
    GPT-2 and BLOOM, and what `AutoModel` saves."""
    mappings = list(family.weight_mappings(replace(shape, tied=False)))
    for embedding in (m.hf_names[0] for m in mappings if m.native_names == ("embedding.weight",)):
        prefix, rest = embedding.split(".", 1)
        if rest in folder.tensors and embedding not in folder.tensors:
            complete = {name for mapping in mappings for name in mapping.hf_names}
            tensors = folder.tensors.items()
            folder.tensors = {name if name in complete else f"{prefix}.{name}": info for name, info in tensors}


PlannedTensor = tuple[str, tuple[int, ...], torch.dtype]  # name, shape, dtype
Plan = Sequence[PlannedTensor]
Tensors = Iterable[tuple[str, Tensor]]
Files = Mapping[str, Mapping[str, Any] | str | Path]


@contextmanager
def atomic_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """Yields a temporary path beside the target. It becomes the target if the block succeeds and is deleted otherwise.
    A kill leaves `.NAME.partial-HOST-PID`, never half a model under its name."""
    target = path.resolve()  # follows a link
    _check_target(target, overwrite)
    partial = target.with_name(f".{target.name}.partial-{socket.gethostname()}-{os.getpid()}")
    with translate_os_errors(target, "written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # in containers every process may have the same id
    try:
        yield partial
        with translate_os_errors(target, "written"):
            commit_folder(partial, target, overwrite=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_folder(
    path: Path, plan: Plan, tensors: Tensors, files: Files, shard_bytes: int = 5_000_000_000, overwrite: bool = False
) -> None:
    """Write the planned tensors, taken one by one in the plan's order, and the other files by name. A 70B model needs
    the memory of its largest tensor.

    A file is JSON, text, or a path to copy, such as those of `HfFolder.tokenizer_files`. Equal input gives equal bytes.
    """
    shards = _divide(plan, shard_bytes)
    names, total_bytes = {name: file for file, items in shards.items() for name, _, _ in items}, sum(map(_bytes, plan))
    assert len(names) == len(plan) and "config.json" in files
    if len(shards) > 1:
        files = {INDEX: {"metadata": {"total_size": total_bytes}, "weight_map": names}} | dict(files)
    with atomic_folder(path, overwrite) as partial:
        with translate_os_errors(path, "written"):
            if (free := shutil.disk_usage(partial.parent).free) < total_bytes:
                needs = f"needs {total_bytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f}"
                raise UserError(f"{path.resolve()}: {needs}; free some space or choose another folder")
            partial.mkdir()
        source = iter(tensors)
        for file, items in shards.items():
            _write_shard(partial / file, items, source)
        if (extra := next(source, None)) is not None:
            raise ValueError(f"{extra[0]} is not in the plan")
        with translate_os_errors(path, "written"):
            for name in sorted(files, key=lambda name: (name == "config.json", name)):
                _write(partial / name, files[name])


def _write_shard(path: Path, items: Plan, source: Iterator[tuple[str, Tensor]]) -> None:
    header, starts = _header(items)
    with path.open("wb") as out:
        out.write(header)
        for item in items:  # holds no tensor while the next one is made
            _write_tensor(out, starts[item[0]], item, *next(source, ("nothing", torch.empty(0))))
    sync_path(path)


def _write_tensor(out: BinaryIO, start: int, planned: PlannedTensor, name: str, tensor: Tensor) -> None:
    if (name, tuple(tensor.shape), tensor.dtype) != planned:
        raise ValueError(f"planned {planned}, given {name}, {tuple(tensor.shape)}, {tensor.dtype}")
    with translate_os_errors(Path(out.name), "written"):
        out.seek(start)
        out.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _check_target(path: Path, overwrite: bool) -> None:
    if path.exists() and (not path.is_dir() or path.is_mount()):
        raise UserError(f"{path}: is {'a mount point' if path.is_dir() else 'a file'}; choose a folder inside one")
    if path.is_dir() and any(path.iterdir()):
        if not overwrite:
            raise UserError(f"{path}: is not empty; choose another folder, or pass --overwrite")
        if not any(
            (path / name).exists() for name in ("config.json", "adapter_config.json")
        ):  # a typo would delete other work
            raise UserError(f"{path}: is not empty and not a model; choose another folder")


def _bytes(item: PlannedTensor) -> int:
    return math.prod(item[1]) * item[2].itemsize


def _divide(plan: Plan, shard_bytes: int) -> dict[str, list[PlannedTensor]]:
    """Shards by file name, each filled in the plan's order; a tensor larger than a shard gets its own."""
    shards: list[list[PlannedTensor]] = []
    free_bytes = -1
    for item in plan:
        if _bytes(item) > free_bytes:
            shards.append([])
            free_bytes = shard_bytes
        shards[-1].append(item)
        free_bytes -= _bytes(item)
    pattern = "model-{:05}-of-{:05}.safetensors" if len(shards) > 1 else SINGLE_FILE
    return {pattern.format(number, len(shards)): items for number, items in enumerate(shards, start=1)}


def _header(items: Plan) -> tuple[bytes, dict[str, int]]:
    """A file's first bytes, and where each tensor starts: larger dtypes first, so that all are aligned when mapped."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    kinds, end = {dtype: kind for kind, dtype in DTYPES.items()}, 0
    for name, shape, dtype in sorted(items, key=lambda item: -item[2].itemsize):
        begin, end = end, end + _bytes((name, shape, dtype))
        header[name] = {"dtype": kinds[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    starts = {name: 8 + len(raw) + header[name]["data_offsets"][0] for name, _, _ in items}
    return len(raw).to_bytes(8, "little") + raw, starts


def _write(path: Path, content: Mapping[str, Any] | str | Path) -> None:
    if isinstance(content, Mapping):
        content = json.dumps(content, indent=2, sort_keys=True) + "\n"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content.read_bytes())
    sync_path(path)
