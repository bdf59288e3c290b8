"""`bessemer plan check`: predicts measured runs from their configuration alone and says how far off it was.

Two published tables are read by their columns: vTrain's (Megatron-LM on A100s) and llm-foundry's (MPT under FSDP on
A100s and H100s). What a table does not say of its setup is written here, once for all its rows.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.errors import UserError
from bessemer.plan.cost_model.operators import Constants, gpt
from bessemer.plan.cost_model.step_time import StepSetup, step_time
from bessemer.plan.hardware import Cluster, find_gpu
from bessemer.plan.search.layout import Layout

VTRAIN = {
    "gpus": "# GPUs", "rows": "global batch", "micro": "micro batch", "width": "hidden size", "layers": "# layers",
    "heads": "attention heads", "context": "sequence length", "tp": "tensor parallelism", "dp": "data parallelism",
    "pp": "pipeline parallelism",
}  # fmt: skip
VTRAIN_TIME = "iteration time (ms)"
FOUNDRY = (
    "Model", "SeqLen (T)", "# GPUs", "GPU", "MicroBatchSize", "GradAccum", "Precision", "MP Mode", "Sharding Strategy",
    "Activation Checkpointing",
)  # fmt: skip
FOUNDRY_RATE = "Throughput (T/s)"
# llm-foundry's MPT sizes: width, layers, heads (its scripts/train/yamls/pretrain; the parameters of its table agree).
MPT = {
    "125m": (768, 12, 12), "350m": (1024, 24, 16), "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20),
    "7b": (4096, 32, 32), "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
MPT_VOCAB = 50_368
GPT2_VOCAB = 50_257
FOUNDRY_GPUS = {"a100_40gb": "A100-40GB", "a100_80gb": "A100-80GB", "h100_80gb": "H100"}
HDR_4, HDR_8, NDR_8 = 100e9, 200e9, 400e9  # bytes/s of a node


@dataclass(frozen=True)
class CheckCase:
    """One row: what ran, where, and how many seconds a step took."""

    number: int
    words: str
    setup: StepSetup
    cluster: Cluster
    measured_s: float
    kind: str
    columns: dict[str, str] = field(repr=False, compare=False, default_factory=dict)


@dataclass(frozen=True)
class CheckedCase:
    case: CheckCase
    predicted_s: float
    parts: dict[str, float]

    @property
    def error(self) -> float:
        """As a fraction of what was measured; positive: predicted too slow."""
        return self.predicted_s / self.case.measured_s - 1


def check_file(path: Path, known: Constants | None = None) -> list[CheckedCase]:
    return check(read_rows(path), known, f"{path}: ")


def check(cases: Iterable[CheckCase], known: Constants | None = None, place: str = "") -> list[CheckedCase]:
    found = []
    for case in cases:
        try:
            time = step_time(case.setup, case.cluster, known)
        except UserError as fault:
            raise UserError(f"{place}row {case.number}: {fault}") from None
        found.append(CheckedCase(case, time.total_s, time.parts))
    return found


def mean_absolute_error(found: list[CheckedCase]) -> float:
    return sum(abs(one.error) for one in found) / len(found)


def to_json(found: list[CheckedCase]) -> dict[str, Any]:
    rows = [
        {
            "row": one.case.number,
            "configuration": one.case.words,
            "predicted_s": one.predicted_s,
            "measured_s": one.case.measured_s,
            "error": one.error,
            "parts_s": one.parts,
        }
        for one in found
    ]
    return {"mean_absolute_error": mean_absolute_error(found), "rows": rows}


def table(found: list[CheckedCase]) -> list[str]:
    """Lines to print: a row each, and the mean."""
    width = max(len(one.case.words) for one in found)
    lines = [f"{'row':>4}  {'configuration':<{width}}  {'predicted':>10}  {'measured':>10}  {'error':>7}"]
    for one in found:
        times = f"{one.predicted_s:>8.4g} s  {one.case.measured_s:>8.4g} s"
        lines.append(f"{one.case.number:>4}  {one.case.words:<{width}}  {times}  {one.error:>+7.1%}")
    lines.append(f"\nmean absolute error {mean_absolute_error(found):.2%} over {len(found)} rows")
    return lines


def read_rows(path: Path) -> list[CheckCase]:
    """Every row of a table in either form; a row that cannot be read or be true is refused by its number (the header is
    row 1, as an editor counts)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{path}: cannot be read as text ({fault})") from fault
    table = csv.DictReader(text.splitlines())
    columns = set(table.fieldnames or ())
    read: Callable[[dict[str, str], int], CheckCase]
    if {*VTRAIN.values(), VTRAIN_TIME} <= columns:
        read = _vtrain
    elif {*FOUNDRY, FOUNDRY_RATE} <= columns:
        read = _foundry
    else:
        lacks = min(
            sorted({*VTRAIN.values(), VTRAIN_TIME} - columns), sorted({*FOUNDRY, FOUNDRY_RATE} - columns), key=len
        )
        raise UserError(f"{path}: neither vTrain's nor llm-foundry's columns: {', '.join(map(repr, lacks))} missing")
    cases = []
    for number, row in enumerate(table, start=2):
        try:
            if None in row.values() or None in row:
                raise UserError("has more or fewer fields than the header")
            cases.append(read(row, number))
        except UserError as fault:
            raise UserError(f"{path}: row {number}: {fault}") from None
    if not cases:
        raise UserError(f"{path}: a header and no rows")
    return cases


def _whole(row: dict[str, str], column: str) -> int:
    value = _number(row, column)
    if value != int(value):
        raise UserError(f"{column} is {row[column]!r}: write a whole number above zero")
    return int(value)


def _number(row: dict[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = 0.0
    if not 0 < value < 1e15:
        raise UserError(f"{column} is {row[column]!r}: write a number above zero")
    return value


def _flag(row: dict[str, str], column: str) -> bool:
    words = {"true": True, "false": False}
    if row[column].strip().lower() not in words:
        raise UserError(f"{column} is {row[column]!r}: write True or False")
    return words[row[column].strip().lower()]


def _vtrain(row: dict[str, str], number: int) -> CheckCase:
    """Megatron-LM on nodes of eight A100-80GB. The rest is assumed: fp16, unfused attention, GPT-2's vocabulary, four
    HDR adapters a node.

    That runs of several nodes recompute layers, pad the vocabulary and sum gradients in fp32, and those of one node do
    none of it, was concluded from the table itself: other ways fit it worse (on several nodes 6.3 instead of 5.6 % with
    fp16 sums and an unpadded head, in a fit to that table alone)."""
    n = {key: _whole(row, column) for key, column in VTRAIN.items()}
    if n["tp"] * n["dp"] * n["pp"] != n["gpus"]:
        raise UserError(f"tensor {n['tp']} x data {n['dp']} x pipeline {n['pp']} parallelism is not {n['gpus']} GPUs")
    if n["width"] % n["heads"]:
        raise UserError(f"hidden size {n['width']} is no multiple of {n['heads']} attention heads")
    if n["layers"] % n["pp"]:
        raise UserError(f"{n['layers']} layers do not divide into {n['pp']} stages")
    several = n["gpus"] > 8
    if several and n["gpus"] % 8:
        raise UserError(f"{n['gpus']} GPUs are no whole nodes of 8")
    setup = StepSetup(
        work=gpt(n["width"], n["layers"], n["heads"], GPT2_VOCAB, n["context"], pads_vocab=several),
        layout=Layout(dp_replicate=n["dp"], tp=n["tp"], pp=n["pp"]),
        micro_batch=n["micro"],
        global_batch=n["rows"],
        context=n["context"],
        precision="fp16",
        recompute="full" if several else "none",
        attention="unfused",
        manner="megatron",
        reduce_bytes=4 if several else 2,
    )
    constants = "vtrain-512" if several else "vtrain-node"
    gpu = find_gpu("A100-80GB")
    cluster = Cluster(gpu, n["gpus"], min(8, n["gpus"]), HDR_4, "InfiniBand HDR", constants=constants)
    step_s = _number(row, VTRAIN_TIME) / 1e3
    words = (
        f"h {n['width']} L {n['layers']} tp {n['tp']} dp {n['dp']} pp {n['pp']} micro {n['micro']} batch {n['rows']}"
    )
    return CheckCase(number, words, setup, cluster, step_s, "megatron", row)


def _foundry(row: dict[str, str], number: int) -> CheckCase:
    """MPT: FSDP over all GPUs, Triton's flash attention, learned positions, nodes of eight."""
    name, gpu_name = row["Model"].strip().lower(), row["GPU"].strip().lower()
    if name not in MPT:
        raise UserError(f"Model is {row['Model']!r}: write one of {', '.join(MPT)}")
    if gpu_name not in FOUNDRY_GPUS:
        raise UserError(f"GPU is {row['GPU']!r}: write one of {', '.join(FOUNDRY_GPUS)}")
    width, layers, heads = MPT[name]
    context, count = _whole(row, "SeqLen (T)"), _whole(row, "# GPUs")
    micro, batches = _whole(row, "MicroBatchSize"), _whole(row, "GradAccum")
    if count > 8 and count % 8:
        raise UserError(f"{count} GPUs are no whole nodes of 8")
    precision = row["Precision"].strip().lower()
    if precision not in ("bf16", "amp_bf16", "amp_fp8"):
        raise UserError(f"Precision is {row['Precision']!r}: write bf16, amp_bf16 or amp_fp8")
    sharding = row["Sharding Strategy"].strip().upper()
    if sharding not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        raise UserError(f"Sharding Strategy is {row['Sharding Strategy']!r}: write FULL_SHARD or SHARD_GRAD_OP")
    hopper = gpu_name.startswith("h100")
    setup = StepSetup(
        work=gpt(width, layers, heads, MPT_VOCAB, context),
        layout=Layout(dp_shard=count),
        micro_batch=micro,
        global_batch=micro * batches * count,
        context=context,
        precision=precision.removeprefix("amp_"),
        recompute="full" if _flag(row, "Activation Checkpointing") else "none",
        attention="triton",
        manner="fsdp",
        reduce_bytes=2 if row["MP Mode"].strip().upper() == "PURE" else 4,
        keeps_weights=sharding == "SHARD_GRAD_OP",
        autocast=precision.startswith("amp"),
    )
    gpu = find_gpu(FOUNDRY_GPUS[gpu_name])
    network, kind = (NDR_8, "mosaic-h100") if hopper else (HDR_8, "mosaic-a100")
    cluster = Cluster(gpu, count, min(8, count), network, "RoCE", constants=kind)
    step_s = setup.global_batch * context / _number(row, FOUNDRY_RATE)
    words = f"{name} T {context} {count} x {gpu.name} micro {micro} x {batches} {precision} {sharding.lower()}"
    words += " recompute" if setup.recompute == "full" else ""
    return CheckCase(number, words, setup, cluster, step_s, "fsdp", row)
