"""Predicts the step times of measured runs from their configuration and reports the errors (`bessemer plan check`).

Reads two published tables: vTrain's (Megatron-LM on A100s) and llm-foundry's (MPT with FSDP on A100s and H100s).
Settings that a table does not state are constants here.
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
HDR_4, HDR_8, NDR_8 = 100e9, 200e9, 400e9  # bytes/s per node


@dataclass(frozen=True)
class CheckCase:
    """One row: configuration, cluster and measured step time."""

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
        """Relative to the measured time; positive: predicted too slow."""
        return self.predicted_s / self.case.measured_s - 1


def check_file(path: Path) -> list[CheckedCase]:
    return check(read_rows(path), place=f"{path}: ")


def check(cases: Iterable[CheckCase], fitted: Constants | None = None, place: str = "") -> list[CheckedCase]:
    checked = []
    for case in cases:
        try:
            time = step_time(case.setup, case.cluster, fitted)
        except UserError as error:
            raise UserError(f"{place}row {case.number}: {error}") from None
        checked.append(CheckedCase(case, time.total_s, time.parts))
    return checked


def mean_absolute_error(checked: list[CheckedCase]) -> float:
    return sum(abs(row.error) for row in checked) / len(checked)


def to_json(checked: list[CheckedCase]) -> dict[str, Any]:
    rows = [
        {"row": row.case.number, "configuration": row.case.words, "predicted_s": row.predicted_s,
         "measured_s": row.case.measured_s, "error": row.error, "parts_s": row.parts}
        for row in checked
    ]  # fmt: skip
    return {"mean_absolute_error": mean_absolute_error(checked), "rows": rows}


def table(checked: list[CheckedCase]) -> list[str]:
    """One line per row, and the mean."""
    width = max(len(row.case.words) for row in checked)
    lines = [f"{'row':>4}  {'configuration':<{width}}  {'predicted':>10}  {'measured':>10}  {'error':>7}"]
    for row in checked:
        times = f"{row.predicted_s:>8.4g} s  {row.case.measured_s:>8.4g} s"
        lines.append(f"{row.case.number:>4}  {row.case.words:<{width}}  {times}  {row.error:>+7.1%}")
    lines.append(f"\nmean absolute error {mean_absolute_error(checked):.2%} over {len(checked)} rows")
    return lines


def read_rows(path: Path) -> list[CheckCase]:
    """The rows of a table in either format. An unreadable or impossible row is refused by its number (the header is row
    1)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from error
    table = csv.DictReader(text.splitlines())
    columns = set(table.fieldnames or ())
    read: Callable[[dict[str, str], int], CheckCase]
    if {*VTRAIN.values(), VTRAIN_TIME} <= columns:
        read = _vtrain
    elif {*FOUNDRY, FOUNDRY_RATE} <= columns:
        read = _foundry
    else:
        missing = min(
            sorted({*VTRAIN.values(), VTRAIN_TIME} - columns), sorted({*FOUNDRY, FOUNDRY_RATE} - columns), key=len
        )
        raise UserError(f"{path}: neither vTrain's nor llm-foundry's columns: {', '.join(map(repr, missing))} missing")
    cases = []
    for number, row in enumerate(table, start=2):
        try:
            if None in row.values() or None in row:
                raise UserError("has more or fewer fields than the header")
            cases.append(read(row, number))
        except UserError as error:
            raise UserError(f"{path}: row {number}: {error}") from None
    if not cases:
        raise UserError(f"{path}: a header and no rows")
    return cases


def _integer(row: dict[str, str], column: str) -> int:
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
    """Megatron-LM on nodes of eight A100-80GB. Assumed: fp16, unfused attention, GPT-2's vocabulary, four HDR adapters
    per node.

    Inferred from the table: multi-node runs recompute layers, pad the vocabulary and sum gradients in fp32; single-node
    runs do none of it. Other assumptions fit worse (6.3 instead of 5.6 % on several nodes with fp16 sums and an
    unpadded head, in a fit to that table alone)."""
    n = {key: _integer(row, column) for key, column in VTRAIN.items()}
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
        layout=Layout(dp_replicate=n["dp"], tp=n["tp"], pp=n["pp"]), micro_batch=n["micro"], global_batch=n["rows"],
        context=n["context"], precision="fp16", recompute="full" if several else "none", attention="unfused",
        framework="megatron", reduce_bytes=4 if several else 2,
    )  # fmt: skip
    constants = "vtrain-512" if several else "vtrain-node"
    gpu = find_gpu("A100-80GB")
    cluster = Cluster(gpu, n["gpus"], min(8, n["gpus"]), HDR_4, "InfiniBand HDR", constants=constants)
    step_s = _number(row, VTRAIN_TIME) / 1e3
    words = (
        f"h {n['width']} L {n['layers']} tp {n['tp']} dp {n['dp']} pp {n['pp']} micro {n['micro']} batch {n['rows']}"
    )
    return CheckCase(number, words, setup, cluster, step_s, "megatron", row)


def _foundry(row: dict[str, str], number: int) -> CheckCase:
    """MPT: FSDP over all GPUs, Triton flash attention, learned positions, nodes of eight."""
    name, gpu_name = row["Model"].strip().lower(), row["GPU"].strip().lower()
    if name not in MPT:
        raise UserError(f"Model is {row['Model']!r}: write one of {', '.join(MPT)}")
    if gpu_name not in FOUNDRY_GPUS:
        raise UserError(f"GPU is {row['GPU']!r}: write one of {', '.join(FOUNDRY_GPUS)}")
    width, layers, heads = MPT[name]
    context, count = _integer(row, "SeqLen (T)"), _integer(row, "# GPUs")
    micro, batches = _integer(row, "MicroBatchSize"), _integer(row, "GradAccum")
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
        work=gpt(width, layers, heads, MPT_VOCAB, context), layout=Layout(dp_shard=count), micro_batch=micro,
        global_batch=micro * batches * count, context=context, precision=precision.removeprefix("amp_"),
        recompute="full" if _flag(row, "Activation Checkpointing") else "none", attention="triton", framework="fsdp",
        reduce_bytes=2 if row["MP Mode"].strip().upper() == "PURE" else 4, keeps_weights=sharding == "SHARD_GRAD_OP",
        autocast=precision.startswith("amp"),
    )  # fmt: skip
    gpu = find_gpu(FOUNDRY_GPUS[gpu_name])
    network, kind = (NDR_8, "mosaic-h100") if hopper else (HDR_8, "mosaic-a100")
    cluster = Cluster(gpu, count, min(8, count), network, "RoCE", constants=kind)
    step_s = setup.global_batch * context / _number(row, FOUNDRY_RATE)
    words = f"{name} T {context} {count} x {gpu.name} micro {micro} x {batches} {precision} {sharding.lower()}"
    words += " recompute" if setup.recompute == "full" else ""
    return CheckCase(number, words, setup, cluster, step_s, "fsdp", row)
