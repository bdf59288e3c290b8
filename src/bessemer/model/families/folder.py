"""A Hugging Face model folder, read: config, tensors one at a time, tokenizer files. Nothing in it is executed.

Weights come from safetensors alone. A folder is refused before the first tensor is read if its files contradict each
other (here) or do not fit the model that its config describes (`check_tensors`).

Weights from a Hugging Face folder into a model and back, one piece at a time.

Besides the model only one piece is in memory, so a checkpoint of any size passes. A folder that does not fit the model
is refused, tensors by name, before the first of them is read.

The Hugging Face folder that a model came from: its conventions and the files that an export gives back.

A run that starts from `model.hf` keeps copies of them in RUN/hf, so that it stays whole when the folder moves.

Files of a bare model, without a head: the first files of GPT-2 and BLOOM are such, and everything that transformers'
`AutoModel` saves. Their names lack the first part, which the class with the head puts before all others.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.model.families.family import Family
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHTS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = WEIGHTS | {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
_TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("*.model", "*.tiktoken", "tekken.json", "chat_template.*", "additional_chat_templates/*.jinja"),
)
# Buffers that transformers used to save and computes itself.
_BUFFERS = r"(^|\.)(rotary_emb\.inv_freq|(cross)?(attn|attention)\.(masked_)?bias|position_ids)$"
_QUANTIZED = r"\.(qweight|qzeros|absmax|SCB|weight_(packed|scale|scale_inv))$"
_AGAIN = "download or save it again"


@dataclass(frozen=True)
class Info:
    """A tensor in a file of the folder; `offset` is where its bytes begin in that file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    offset: int = 0

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@contextmanager
def told(path: Path, what: str = "read") -> Iterator[None]:
    """A file system that refuses is the user's to repair; the path is named, which an error while reading does not."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be {what}: {error.strerror or error}") from None


def read_header(path: Path) -> dict[str, Info]:
    """The tensors of a safetensors file. The library proves lengths, offsets and shapes against the file's size."""
    from safetensors import SafetensorError, safe_open

    with told(path), path.open("rb") as file:
        if (first := file.read(8)) == b"version ":
            raise UserError(f"{path}: is a Git LFS pointer and not the weights; run `git lfs pull`")
        try:
            with safe_open(path, "np"):
                header = json.loads(file.read(length := int.from_bytes(first, "little")))
        except (SafetensorError, ValueError, RecursionError) as error:
            why = f"{path.stat().st_size} bytes; {str(error).removeprefix('Error while deserializing header: ')[:99]}"
            raise UserError(f"{path}: is cut off, damaged or no safetensors file ({why}); {_AGAIN}") from None
    header.pop("__metadata__", None)
    found = {}
    for said, about in header.items():
        # BERT's first files call a norm's weight and bias so.
        name = said.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if about["dtype"] not in DTYPES:
            raise UserError(f"{path}: {name!r} has the unknown type {about['dtype']}; save the model in bf16")
        if 0 in about["shape"]:
            raise UserError(f"{path}: {name!r} is empty; save the model again, gathered if it was sharded (ZeRO-3)")
        offset = 8 + length + about["data_offsets"][0]
        found[name] = Info(tuple(about["shape"]), DTYPES[about["dtype"]], path.name, offset)
    return found


class Folder:
    """`config` is read at once, the headers with `tensors`, one tensor with `read`. UserError says what is wrong."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.expanduser(path))
        with told(self.path):
            is_model = (self.path / "config.json").is_file()
        if not is_model:
            fix = "give one; `hf download ORG/NAME --local-dir FOLDER` fetches one from the Hub"
            raise UserError(f"{path}: is not a model's folder (it has no config.json); {fix}")
        self.config = _read_json(self.path / "config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any] | None:
        path = self.path / "generation_config.json"
        return _read_json(path) if path.exists() else None

    @cached_property
    def tokenizer_files(self) -> dict[str, Path]:
        """Files of the tokenizer and its chat templates by their names in the folder."""
        paths = sorted(path for pattern in _TOKENIZER for path in self.path.glob(pattern))
        return {path.relative_to(self.path).as_posix(): path for path in paths}

    @cached_property
    def tensors(self) -> dict[str, Info]:
        with told(self.path):
            files = {file.name for file in self.path.iterdir()}
        if {SINGLE, INDEX} <= files:
            raise UserError(f"{self.path}: has both {SINGLE} and {INDEX}; delete the one that is not the model")
        if SINGLE in files:
            return read_header(self.path / SINGLE)
        if INDEX not in files:
            raise UserError(f"{self.path}: {self._why_no_weights(files)}")
        shard_of = _read_json(place := self.path / INDEX).get("weight_map")
        if not isinstance(shard_of, dict) or not all(isinstance(file, str) for file in shard_of.values()):
            raise UserError(f"{place}: has no weight_map of tensors to files; {_AGAIN}")
        # Only names that the folder lists: an index cannot lead to a file elsewhere.
        if missing := sorted(set(shard_of.values()) - files):
            raise UserError(f"{place}: names {_some(missing)}, which the folder lacks; download what is missing")
        found: dict[str, Info] = {}
        for file in sorted(set(shard_of.values())):
            shard = read_header(self.path / file)
            for name in shard.keys() & found.keys():
                raise UserError(f"{self.path}: {name!r} is in {found[name].file} and in {file}; delete the wrong file")
            found |= shard
        for name, file in shard_of.items():
            if name not in found or found[name].file != file:
                raise UserError(f"{place}: {name!r} is not in {file!r}, where it should be; {_AGAIN}")
        return found

    def _why_no_weights(self, files: set[str]) -> str:
        if shards := sorted(file for file in files if file.endswith(".safetensors")):
            return f"has {_some(shards)} but neither {SINGLE} nor {INDEX}; add the index"
        if pickles := sorted(file for file in files if re.fullmatch(r".*\.(bin|pt|pth|ckpt)", file)):
            named = self.config.get("architectures")
            kind = named[0] if isinstance(named, list) and named else "AutoModelForCausalLM"
            fix = f"transformers.{kind}.from_pretrained(FOLDER).save_pretrained(NEW) makes safetensors of it"
            return f"its weights are pickles ({_some(pickles)}), which can run code and are not loaded; {fix}"
        return f"has no weights; there should be {SINGLE} or {INDEX}"

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own. It is not mapped: a file system that fails then kills the process."""
        info = self.tensors[name]
        raw, path = torch.empty(info.bytes, dtype=torch.uint8), self.path / info.file
        with told(path), path.open("rb") as file:
            file.seek(info.offset)
            if file.readinto(raw.numpy().data) < info.bytes:
                raise UserError(f"{path}: ends inside {name!r}; it was changed while it was read")
        return raw.view(info.dtype).view(info.shape)

    def check_tied(self, head: str, embedding: str) -> None:
        """For a config that ties them: a head that was saved as well must be the embedding, bit for bit."""
        if head not in self.tensors:
            return
        one, other = self.tensors[head], self.tensors[embedding]
        if one.dtype != other.dtype or not torch.equal(self.read(head), self.read(embedding)):
            what = f"config.json ties the embeddings, but {head!r} is not {embedding!r}"
            raise UserError(f'{self.path}: {what}; write "tie_word_embeddings": false, or find the right config')


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with told(path):
            found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        raise ValueError("not an object in braces")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); {_AGAIN}") from None


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_tensors(
    found: Mapping[str, Info], expected: Mapping[str, tuple[int, ...]], tied: set[str], path: Path, ignore: str = "^$"
) -> None:
    """UserError in one line unless the folder holds exactly the expected tensors, in types that are weights.

    `tied` names output embeddings that may be the input one. If expected, the config unties them and they must be
    there; if not, they may be there (see `Folder.check_tied`). `ignore` is a pattern of names that do not matter.
    """
    extra = [name for name in found if name not in expected and name not in tied]
    extra = [name for name in extra if not re.search(f"{_BUFFERS}|{ignore}", name)]
    odd = [name for name in expected if name in found and found[name].dtype not in WEIGHTS.values()]
    if odd := odd or [name for name in extra if re.search(_QUANTIZED, name)]:
        what = f"{_some(odd)}: quantized or integers ({found[odd[0]].dtype}), which cannot be trained"
        raise UserError(f"{path}: {what}; take the model's bf16 or fp32 weights")
    missing = [name for name in expected if name not in found]
    if missing and tied.issuperset(missing):
        what = f"config.json unties the embeddings, but there is no {_some(missing)}"
        raise UserError(f'{path}: {what}; write "tie_word_embeddings": true, or find the missing weights')
    wrong = [name for name in expected if name in found and found[name].shape != tuple(expected[name])]
    problems = [f"{what} {_some(names)}" for what, names in (("missing", missing), ("unexpected", extra)) if names]
    problems += [_wrong_shape(name, found[name].shape, tuple(expected[name])) for name in wrong[:1]]
    problems += [f"{len(wrong) - 1} more of another shape"] if len(wrong) > 1 else []
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}; config.json and weights must be of one model")


def _wrong_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    reason = " (transposed)" if found == expected[::-1] else ""
    if len(found) == 2 and found[1:] == expected[1:] and re.search(r"emb|wte|head|shared", name):
        reason = f" (another vocabulary: set vocab_size to {found[0]})"
    return f"{name!r} is {found} and not {expected}{reason}"


Progress = Callable[[int, int], None]  # tensors done, and of how many


def theirs(tensor_of: Callable[[str], Tensor], shape: ModelShape, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Tensors as the family's files hold them, made from ours by name, in the order of the pieces."""
    for piece in family.pieces(shape):
        found = piece.to_theirs([tensor_of(name).detach() for name in piece.ours])
        yield from zip(piece.theirs, found, strict=True)


def ours(folder: Folder, shape: ModelShape, family: Family) -> Iterator[tuple[str, Tensor]]:
    """Our tensors by name, in the folder's types. The folder is one that `check_folder` accepts."""
    for piece in family.pieces(shape):
        yield from zip(piece.ours, piece.to_ours([folder.read(name) for name in piece.theirs]), strict=True)


def expected_shapes(model: nn.Module, family: Family) -> dict[str, tuple[int, ...]]:
    """Their tensors by name, as a file should hold them: the pieces applied to tensors without data."""
    blank = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    return {name: tuple(tensor.shape) for name, tensor in theirs(blank.__getitem__, _shape(model), family)}


def check_folder(model: nn.Module, folder: Folder, family: Family) -> None:
    """UserError unless the folder holds the tensors of this model. The model may be on the meta device."""
    shape = _shape(model)
    complete_names(folder, shape, family)
    # An untied model has a head of its own: so we know what a tied one's would be called.
    loose = {piece.ours: piece.theirs for piece in family.pieces(replace(shape, tied=False))}
    heads = set(loose.get(("head.weight",), ()))
    check_tensors(folder.tensors, expected_shapes(model, family), heads, folder.path, "|".join(family.ignored) or "^$")
    if shape.tied:
        for head in heads:
            folder.check_tied(head, *loose["embedding.weight",])


def load_weights(model: nn.Module, folder: Folder, family: Family, progress: Progress | None = None) -> None:
    """Fill a model, which has memory already (`to_empty`), in its own types."""
    check_folder(model, folder, family)
    empty, total = model.state_dict(), len(model.state_dict())
    with torch.no_grad():
        for name, tensor in ours(folder, _shape(model), family):
            empty.pop(name).copy_(tensor)
            if progress is not None:
                progress(total - len(empty), total)
    assert not empty, f"no piece of {family.name} fills {sorted(empty)}"


def _shape(model: nn.Module) -> ModelShape:
    shape = model.shape
    assert isinstance(shape, ModelShape)
    return shape


COPIES = "hf"  # in a run's folder


@dataclass(frozen=True)
class Origin:
    """`own_tokenizer`: the model still has the folder's tokenizer, perhaps with more tokens. `copied`: the folder is
    the model's own place, not one that a run was started from."""

    folder: Folder
    own_tokenizer: bool
    copied: bool = False


def find_origin(place: Path, depth: int = 8) -> Origin | None:
    """Of a run, an import or a Hugging Face folder. None for a run from random weights, and for one made by an older
    version whose folder is gone."""
    if (place / "config.json").is_file():
        return Origin(Folder(place), True, copied=True)
    if (place / COPIES / "config.json").is_file():
        copies = Folder(place / COPIES)
        return Origin(copies, bool(copies.tokenizer_files))
    if not (place / "spec.yaml").is_file() or not depth:
        return None
    return _of_spec(load_spec(place / "spec.yaml"), depth)


def _of_spec(spec: RunSpec, depth: int = 8) -> Origin | None:
    if spec.model.hf is not None:
        try:
            folder = Folder(spec.model.hf)
        except UserError:  # moved since
            return None
        path = spec.tokenizer.path
        return Origin(folder, path is None or Path(path).resolve().parent == folder.path.resolve())
    if spec.start_from is not None:
        parents = Path(spec.start_from).parents
        places = [place for place in parents[:2] if (place / "model.json").is_file()]
        return find_origin(places[0], depth - 1) if places else None
    return None


def keep_origin(run: Path, spec: RunSpec) -> None:
    """Copy the small files of the folder that the run starts from, unless that was done before."""
    origin = None if (run / COPIES).exists() else _of_spec(spec)
    if origin is None:
        return
    with told(run / COPIES, "written"):
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


def complete_names(folder: Folder, shape: ModelShape, family: Family) -> None:
    """Put that part (`transformer.`, `model.`) before the names of such a folder; another is left as it is."""
    pieces = list(family.pieces(replace(shape, tied=False)))
    for embedding in (piece.theirs[0] for piece in pieces if piece.ours == ("embedding.weight",)):
        prefix, rest = embedding.split(".", 1)
        if rest in folder.tensors and embedding not in folder.tensors:
            whole = {name for piece in pieces for name in piece.theirs}
            tensors = folder.tensors.items()
            folder.tensors = {name if name in whole else f"{prefix}.{name}": info for name, info in tensors}
