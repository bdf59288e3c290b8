"""llama.cpp's own library through ctypes: opens a GGUF file, gives its logits and token ids, and makes K-quants.

A damaged file can abort the library, so the work is done in a process of its own (`open_gguf`, `quantize`). Parameter
structs are passed as opaque bytes that the library fills in itself: only the fields that every version keeps at the
front are changed, and their default values are checked first. Needs numpy, not torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.errors import UserError
from bessemer.parent import child_environment

VARIABLE = "BESSEMER_LLAMA_CPP"  # libllama.so, or the folder that holds it
# llama.cpp's numbers for the types that only its own library makes.
K_QUANTS = {
    "q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17,
    "q6_k": 18, "iq4_nl": 25, "iq4_xs": 30,
}  # fmt: skip
_THREADS = int(os.environ.get("OMP_NUM_THREADS") or min(8, os.cpu_count() or 1))  # they wait for each other in a loop
Floats = npt.NDArray[np.float32]


class OpenerError(Exception):
    """llama.cpp does not open the file, or fails on it."""


@dataclass(frozen=True)
class OpenedGguf:
    """What llama.cpp computes. V is the vocabulary."""

    logits_RTV: Floats  # of each row in one pass
    steps_SV: Floats  # of a sequence given one token at a time, after its prompt
    ids: list[list[int]]  # of each text, without tokens that are added around it


def find_library(quantizer: bool = False) -> Path | None:
    """The library: the file or folder that BESSEMER_LLAMA_CPP names, or that of an installed Python package."""
    for path in _candidates():
        if path.is_file() and (not quantizer or hasattr(_load(path), "llama_model_quantize")):
            return path
    return None


def _candidates() -> list[Path]:
    named = os.environ.get(VARIABLE)
    if named:
        place = Path(named).expanduser()
        libraries = [place] if place.is_file() else sorted(place.glob("**/libllama*.so*"), key=lambda p: len(p.name))
        libraries = [path for path in libraries if "common" not in path.name]
        if not libraries:
            raise UserError(f"{VARIABLE}={named}: holds no libllama.so; name the library or its folder")
        return libraries[:1]
    paths = []
    for package, pattern in (("llama_cpp", "lib/libllama.so"), ("xllamacpp", "xllamacpp*.so")):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            paths += list(Path(spec.origin).parent.glob(pattern))
    return paths


def require_library(quantizer: bool = False) -> Path:
    library = find_library(quantizer)
    if library is None and quantizer:
        raise UserError(
            f"K-quants are made by llama.cpp's own library: set {VARIABLE} to a libllama.so with llama_model_quantize "
            "(npm install @node-llama-cpp/linux-x64, or pip install llama-cpp-python), or choose q8_0, q5_1 or q4_0"
        )
    if library is None:
        raise UserError(
            f"the check opens the file with llama.cpp: pip install 'bessemer[gguf]', set {VARIABLE} to a libllama.so, "
            "or skip it with --skip-check"
        )
    return library


def open_gguf(
    file: Path, rows_RT: npt.NDArray[np.int64], prompt: Sequence[int], steps: Sequence[int], texts: Sequence[str] = ()
) -> OpenedGguf:
    """Open the file in another process. `prompt` is read at once and each of `steps` alone, as in generation."""
    with tempfile.TemporaryDirectory() as scratch:
        job, result = Path(scratch, "job.npz"), Path(scratch, "result.npz")
        np.savez(job, rows=rows_RT, prompt=np.array(prompt), steps=np.array(steps), texts=json.dumps(list(texts)))
        _run("open", str(require_library()), str(file), str(job), str(result))
        with np.load(result) as arrays:
            return OpenedGguf(arrays["logits"], arrays["steps"], json.loads(str(arrays["ids"])))


def quantize(source: Path, target: Path, kind: str) -> None:
    """Make a K-quant of a 16- or 32-bit file."""
    _run("quantize", str(require_library(quantizer=True)), str(source), str(target), kind)


def _run(*arguments: str) -> None:
    # The child imports this same source, however it was installed.
    environment = child_environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments], capture_output=True, text=True, errors="replace", env=environment
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        telling = [line for line in lines if any(word in line.lower() for word in ("error", "assert", "fail"))]
        reason = (telling or lines or [f"exit status {done.returncode}"])[0 if telling else -1]
        raise OpenerError(f"llama.cpp does not {arguments[0]} the file: {reason}")


class _Struct(ctypes.Structure):
    """A parameter struct of unknown length. Every ABI passes one of this size in memory."""

    _fields_ = [("ints", ctypes.c_int32 * 256)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


_POINTERS = ("load_from_file", "init_from_model", "get_vocab", "get_memory", "get_logits_ith")
_STRUCTS = ("model_default_params", "context_default_params", "model_quantize_default_params")


def _load(library: Path) -> ctypes.CDLL:
    """Loads the library with the libraries in its folder that it was built with."""
    for part in ("libggml-base", "libggml"):
        for path in sorted(library.parent.glob(f"{part}.*so*"))[:1]:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _prepare(library: Path) -> Any:
    lib = _load(library)
    for name in _STRUCTS:
        if hasattr(lib, f"llama_{name}"):
            getattr(lib, f"llama_{name}").restype = _Struct
    lib.llama_model_load_from_file.restype = lib.llama_init_from_model.restype = ctypes.c_void_p
    lib.llama_model_get_vocab.restype = lib.llama_get_memory.restype = ctypes.c_void_p
    lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    lib.llama_batch_init.restype = _Batch
    lib.llama_batch_init.argtypes = [ctypes.c_int32] * 3
    lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Struct]
    lib.llama_init_from_model.argtypes = [ctypes.c_void_p, _Struct]
    lib.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
    if (library.parent / "libggml-base.so").exists() and hasattr(ctypes.CDLL(None), "ggml_backend_load_all_from_path"):
        ctypes.CDLL(None).ggml_backend_load_all_from_path(str(library.parent).encode())
    lib.llama_backend_init()
    return lib


def _compute_exactly(settings: _Struct) -> None:
    """A cache in F32 (by default F16) and no flash attention, which rounds to F16, if the struct has these fields where
    every version so far has them: the only pair of ones after the thread counts, and the fourth of four -1."""
    ints = list(settings.ints[:40])
    pairs = [i for i in range(9, 39) if ints[i : i + 2] == [1, 1]]
    automatic = [i for i in range(9, 20) if ints[i : i + 4] == [-1, -1, -1, -1]]
    if len(pairs) == len(automatic) == 1:
        settings.ints[pairs[0]] = settings.ints[pairs[0] + 1] = settings.ints[automatic[0] + 3] = 0


class _Model:
    def __init__(self, lib: Any, file: str, length: int) -> None:
        self.lib, self.length = lib, length
        model = lib.llama_model_load_from_file(file.encode(), lib.llama_model_default_params())
        if not model:
            raise SystemExit("error: llama_model_load_from_file failed")
        self.vocab = ctypes.c_void_p(lib.llama_model_get_vocab(ctypes.c_void_p(model)))
        self.size = lib.llama_vocab_n_tokens(self.vocab)
        settings = lib.llama_context_default_params()
        if list(settings.ints[:4]) != [512, 2048, 512, 1]:
            raise SystemExit("error: this version of llama.cpp has another llama_context_params: use another build")
        settings.ints[0], settings.ints[1], settings.ints[2] = max(256, length + 8), length, length
        _compute_exactly(settings)
        context = lib.llama_init_from_model(ctypes.c_void_p(model), settings)
        if not context:
            raise SystemExit("error: llama_init_from_model failed")
        self.context = ctypes.c_void_p(context)
        lib.llama_set_n_threads(self.context, _THREADS, _THREADS)

    def clear(self) -> None:
        self.lib.llama_memory_clear(ctypes.c_void_p(self.lib.llama_get_memory(self.context)), ctypes.c_bool(True))

    def logits(self, ids: Sequence[int], start: int = 0) -> Floats:
        """(T, V) for ids that follow `start` cached ones."""
        batch = self.lib.llama_batch_init(len(ids), 0, 1)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), start + i, 1, 1
            batch.seq_id[i][0] = 0
        batch.n_tokens = len(ids)
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("error: llama_decode failed")
        rows = [self.lib.llama_get_logits_ith(self.context, i) for i in range(len(ids))]
        return np.stack([np.ctypeslib.as_array(row, (self.size,)).copy() for row in rows])

    def ids(self, text: str) -> list[int]:
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 8))()
        no = ctypes.c_bool(False)  # neither add BOS nor read special tokens in the text
        count = self.lib.llama_tokenize(self.vocab, raw, len(raw), room, len(room), no, no)
        return list(room[: max(0, count)])


def _open(library: str, file: str, job: str, result: str) -> None:
    with np.load(job) as arrays:
        rows_RT, prompt, steps = arrays["rows"], arrays["prompt"], arrays["steps"]
        texts = json.loads(str(arrays["texts"]))
    model = _Model(_prepare(Path(library)), file, max(rows_RT.shape[1], len(prompt) + len(steps)))
    logits, generated = [], []
    for row in rows_RT:
        model.clear()
        logits.append(model.logits(row))
    model.clear()
    if len(prompt):
        generated.append(model.logits(prompt)[-1])
        generated += [model.logits([token], len(prompt) + i)[0] for i, token in enumerate(steps)]
    ids = json.dumps([model.ids(text) for text in texts])
    np.savez(result, logits=np.stack(logits), steps=np.array(generated, np.float32), ids=ids)


def _quantize(library: str, source: str, target: str, kind: str) -> None:
    lib = _prepare(Path(library))
    settings = lib.llama_model_quantize_default_params()
    if settings.ints[0] != 0 or not 0 < settings.ints[1] < 64:
        raise SystemExit("error: this version of llama.cpp has another llama_model_quantize_params: use another build")
    settings.ints[0], settings.ints[1] = _THREADS, K_QUANTS[kind]
    if lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(settings)):
        raise SystemExit("error: llama_model_quantize failed")


if __name__ == "__main__":
    {"open": _open, "quantize": _quantize}[sys.argv[1]](*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # the library's own clean-up is slow and adds nothing
