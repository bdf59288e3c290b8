"""The shrunken copy of a run that `bessemer train --rehearse` plays: the same objective, data, optimizer and layout
with a narrow model of few layers, a sample of each source, short rows and few steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bessemer.data.estimate import ROW_FORMATS
from bessemer.data.read import FileEntry, list_files
from bessemer.data.read.compression import open_decompressed
from bessemer.errors import UserError
from bessemer.plan.search.layout import count_processes
from bessemer.spec.data import SourceSpec
from bessemer.spec.model import ModelSpec, model_shape
from bessemer.spec.schedule import ScheduleSpec
from bessemer.spec.schema import RunSpec

STEPS, SAVE_EVERY, KILL_AT = 16, 4, 11
VOCAB = 2048  # of a tokenizer that is trained from the sample
SAMPLE_BYTES = 8 << 20  # of each source
CONTEXT = 256
HEAD_DIM, LEAST_WIDTH = 32, 64
HELD_OUT = 0.1  # least share of the sample, so that something is held out
ONE_DEVICE = {"dp_replicate": "auto", "dp_shard": "auto", "tp": 1, "cp": 1, "pp": 1, "ep": 1}


def rehearsal_spec(spec: RunSpec, folder: Path, gpus: int, most: int, notes: list[str]) -> RunSpec:
    """The small run, in `folder`, on at most `most` processes. Notes list what differs from the full run."""
    spec = spec if gpus else _without_gpu(spec, notes)
    context = spec.data.context if isinstance(spec.data.context, int) else CONTEXT
    context = min(CONTEXT, context)
    parallel = spec.parallel
    if (needed := count_processes(parallel, 0)) > most:
        notes.append(f"layout: it needs {needed} processes, and this machine has room for {most}: rehearsed without")
        parallel = parallel.model_copy(update=ONE_DEVICE)
    rows = 4 * count_processes(parallel, gpus)
    sources = {name: _sampled(name, source, folder, notes) for name, source in spec.data.sources.items()}
    validation = max(HELD_OUT, spec.data.validation) if spec.data.validation else 0.0
    data = {"sources": sources, "context": context, "phases": [], "validation": validation}
    budget = {
        "steps": STEPS, "tokens": "auto", "epochs": None, "batch": rows * context, "batch_changes": [],
        "micro_batch": "auto",
    }  # fmt: skip
    checkpoint = {"every": SAVE_EVERY, "asynchronous": False, "remote": None, "keep_every": None, "keep_last": 2}
    evaluate = {"every": STEPS // 2, "tokens": "auto", "limit": min(4, spec.evaluate.limit or 4)}
    sections: dict[str, dict[str, Any]] = {
        "data": data,
        "budget": budget,
        "checkpoint": checkpoint,
        "evaluate": evaluate,
    }
    update: dict[str, Any] = {name: getattr(spec, name).model_copy(update=keys) for name, keys in sections.items()}
    update["schedule"] = _short_schedule(spec, notes)
    if spec.tokenizer.path is None and spec.model.hf is None and isinstance(spec.tokenizer.vocab, int):
        update["tokenizer"] = spec.tokenizer.model_copy(update={"vocab": min(spec.tokenizer.vocab, VOCAB)})
    update |= {
        "name": spec.name, "runs": str(folder / "runs"), "model": _small_model(spec, notes), "parallel": parallel,
        "trackers": [], "alerts": None, "sweep": None,
    }  # fmt: skip
    return spec.model_copy(update=update)


def _without_gpu(spec: RunSpec, notes: list[str]) -> RunSpec:
    """What a CPU cannot run, left to the planner."""
    update: dict[str, Any] = {}
    if spec.parallel.device == "cuda":
        update["parallel"] = spec.parallel.model_copy(update={"device": "cpu"})
    if spec.precision not in ("auto", "fp32", "bf16"):
        update["precision"] = "auto"
    if update:
        notes.append(f"no GPU here: rehearsed without {' and '.join(update)} of the spec")
    return spec.model_copy(update=update)


def _short_schedule(spec: RunSpec, notes: list[str]) -> ScheduleSpec:
    """The schedule without lengths in steps or tokens, which are those of the full run."""
    keys = ("warmup", "length", "decay", "every", "timescale")
    absolute = [key for key in keys if isinstance(value := getattr(spec.schedule, key), int | str) and value != "auto"]
    if not absolute and not spec.schedule.segments:
        return spec.schedule
    notes.append("schedule: lengths in steps and tokens are left to their defaults")
    defaults = {key: "auto" if key == "warmup" else None for key in absolute}
    return spec.schedule.model_copy(update={**defaults, "segments": []})


def _small_model(spec: RunSpec, notes: list[str]) -> ModelSpec:
    """The design with few layers, heads and a small width, which keeps all that decides about kernels, layouts and the
    export: the ratio of heads, norms, positions, windows, experts."""
    model, parallel = spec.model, spec.parallel
    if model.hf is not None or spec.start_from is not None:
        notes.append("model: trained weights cannot be narrower: rehearsed in full size")
        return model
    shape = model_shape(model, vocab=0)
    period = max(len(model.windows or ()), len(model.mixers or ()), len(shape.windows), len(shape.mixers), 1)
    layers = min(shape.layers, max(2, period, 2 * parallel.pp))
    if shape.mla or shape.mamba or shape.blocks[0]:
        notes.append("model: latent attention, state spaces and block-sparse attention keep their width: fewer layers")
        return model.model_copy(update={"layers": layers})
    divided = parallel.tp * parallel.cp
    kv_heads = next((n for n in (max(2, divided), divided) if shape.kv_heads % n == 0), shape.kv_heads)
    heads = kv_heads * (shape.heads // shape.kv_heads)
    head_dim = min(shape.head_dim, HEAD_DIM)
    width = min(shape.width, max(LEAST_WIDTH, heads * head_dim))
    sizes = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "width": width}
    sizes |= {"ffn": min(shape.ffn, 2 * width), "tied": shape.tied}
    return model.model_copy(update=sizes)


def _sampled(name: str, source: SourceSpec, folder: Path, notes: list[str]) -> SourceSpec:
    """The source, or its first rows in a file of their own if it is large."""
    if source.path == ["python"]:
        raise UserError(f"data.sources.{name}: datasets passed from Python cannot be rehearsed: use files")
    if not source.path:  # published data: read by shards
        return source
    files = list_files(source)
    if sum(file.size_bytes for file in files) <= SAMPLE_BYTES:
        return source
    if files[0].format in ROW_FORMATS:
        path = folder / f"{name}.{files[0].format}"
        path.write_bytes(_first_rows(files, source))
        return source.model_copy(update={"path": [str(path)], "include": [], "exclude": [], "storage": {}})
    chosen, size_bytes = [files[0].path], files[0].size_bytes
    for file in files[1:]:
        if size_bytes + file.size_bytes > SAMPLE_BYTES:
            break
        chosen, size_bytes = [*chosen, file.path], size_bytes + file.size_bytes
    if size_bytes > 4 * SAMPLE_BYTES:
        notes.append(f"data.sources.{name}: its first file is read in full ({size_bytes >> 20:,} MiB)")
    return source.model_copy(update={"path": chosen, "include": [], "exclude": []})


def _first_rows(files: list[FileEntry], source: SourceSpec) -> bytes:
    """Whole lines of the first files, up to SAMPLE_BYTES."""
    text = b""
    for file in files:
        with open_decompressed(file, source.storage, None) as opened:
            text += opened.read(SAMPLE_BYTES - len(text))
        if len(text) >= SAMPLE_BYTES:
            return text[: text.rindex(b"\n") + 1]
        if file.format == "csv":  # further ones have their own header
            return text
        text = text if text.endswith(b"\n") else text + b"\n"
    return text
