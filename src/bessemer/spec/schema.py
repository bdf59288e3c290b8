"""The checkpoint section: when the run is saved, how, where to, and what is kept.

RunSpec: one run in one document. Every field says what it is, its unit and its default; `auto` goes to the planner.

Field descriptions feed the error messages, `bessemer spec schema` and the configuration reference, so they are written
for users. Combinations that cannot work are refused by the named checks in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from bessemer.spec.data import DataSpec, TokenizerSpec
from bessemer.spec.guard import GuardSpec
from bessemer.spec.model import DropoutSpec, LossSpec, ModelSpec, ObjectiveSpec
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec
from bessemer.spec.parallel import ParallelSpec
from bessemer.spec.quantity import (
    AutoBatch,
    AutoCount,
    AutoInterval,
    AutoSequences,
    AutoSpan,
    BatchTokens,
    Bytes,
    Seconds,
    Share,
    SpecSection,
    StepCount,
)


class CheckpointSpec(SpecSection):
    """When the run is saved and what is kept. A checkpoint stays if any of the keep rules asks for it."""

    every: AutoInterval = Field(
        "auto",
        description="interval of saves; auto weighs what a save costs against what a failure would",
        examples=["500 steps"],
    )
    asynchronous: bool | Literal["auto"] = Field(
        "auto",
        description="train on while a copy of the state is written; auto does so where it shortens the stall",
        examples=[True],
    )
    keep_last: int = Field(2, ge=1, le=1_000_000, description="newest checkpoints kept", examples=[2])
    keep_best: bool = Field(
        True,
        description="also keep the one with the best validation loss; each evaluation that is a new best saves, beside "
        "`every`",
        examples=[True],
    )
    keep_every: StepCount | None = Field(
        None, description="also keep the first one of every so many steps", examples=[10000]
    )
    keep_age: Seconds | None = Field(None, gt=0, description="also keep those younger than this", examples=["24h"])
    keep_bytes: Bytes | None = Field(
        None,
        description="room for them all: beyond it the oldest go first, but never the newest, confirmed, best or tagged",
        examples=["500GB"],
    )
    archive_model_only: bool = Field(
        False, description="what keep_every keeps is a copy of the weights alone, a third of the size", examples=[True]
    )
    remote: str | None = Field(
        None,
        description="an fsspec URL that checkpoints are copied to in the background, under the run's name; "
        "credentials come from the environment",
        examples=["s3://bucket/checkpoints"],
    )
    remote_keep_last: int | None = Field(
        None, ge=1, le=1_000_000, description="newest checkpoints kept there (default: keep_last)", examples=[5]
    )

    @field_validator("remote")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        scheme, mark, rest = (value or "").partition("://")
        if value is not None and not (scheme and mark and rest.strip("/")):
            raise ValueError("a URL such as s3://bucket/checkpoints or file:///mnt/durable/checkpoints")
        if "@" in rest.partition("/")[0]:
            raise ValueError("the address holds a password; set it in the environment")
        return value


class BatchChange(SpecSection):
    """From a step on, another batch size."""

    from_step: StepCount = Field(description="first step of the new size", examples=[1000])
    batch: BatchTokens = Field(description="tokens in a batch from there on", examples=["512K"])


class StopSpec(SpecSection):
    """Rules that end a run as finished, before its budget is spent."""

    validation_loss: float | None = Field(None, gt=0, le=1e6, description="stop when reached", examples=[2.5])
    patience: int | None = Field(
        None, ge=1, le=1_000_000, description="stop after so many evaluations without a new best", examples=[5]
    )
    time: Seconds | None = Field(None, gt=0, description="stop after so much training time", examples=["2h"])


class BudgetSpec(SpecSection):
    """How much is trained: tokens, or steps, or epochs; and in what portions."""

    tokens: AutoCount = Field("auto", description="tokens to train on", examples=["20M"])
    steps: StepCount | None = Field(None, description="steps instead of tokens", examples=[1000])
    epochs: float | None = Field(
        None, gt=0, le=1_000_000, description="passes over the data instead of tokens", examples=[1.0]
    )
    batch: AutoBatch = Field("auto", description="tokens in a batch (one optimizer step)", examples=["256K"])
    batch_changes: list[BatchChange] = Field(
        [], description="other batch sizes later in the run", examples=[[{"from_step": 1000, "batch": "512K"}]]
    )
    micro_batch: AutoSequences = Field("auto", description="sequences in one forward pass", examples=[8])
    stop: StopSpec = Field(default_factory=StopSpec, description="rules that end the run early")


class ScheduleSpec(SpecSection):
    """Learning rate over the run: warm-up from zero, then decay to a floor."""

    kind: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="cosine, linear or constant", examples=["cosine"]
    )
    warmup: AutoSpan = Field("auto", description="length of the warm-up", examples=["2%"])
    floor: Share = Field(0.1, description="last learning rate as a share of the peak", examples=["10%"])


class ObserveSpec(SpecSection):
    """What is shown while it runs."""

    line_every: Seconds = Field(5.0, description="interval of lines when not in a terminal", examples=["5s"])


class EvaluateSpec(SpecSection):
    """Validation inside the run, on the held-out documents."""

    every: AutoInterval = Field("auto", description="interval of evaluations", examples=["500 steps"])
    tokens: AutoCount = Field("auto", description="held-out tokens in one evaluation", examples=["1M"])


class LintsSpec(SpecSection):
    """Warnings of `bessemer spec check` about settings that would run and should not."""

    silence: list[str] = Field([], description="rules that are wrong for this run", examples=[["no_warmup"]])


class RunSpec(SpecSection):
    """One run, whatever its objective."""

    name: str = Field(
        "auto",
        pattern=r"^\w[\w.-]{0,99}$",
        description="the run's folder name (default: the file's name)",
        examples=["my-run"],
    )
    runs: str = Field("runs", min_length=1, description="folder that holds the runs", examples=["runs"])
    seed: int = Field(0, ge=0, lt=2**63, description="seed of everything random", examples=[0])
    objective: Literal["pretrain"] = Field("pretrain", description="pretrain", examples=["pretrain"])
    model: ModelSpec = Field(description="the network", examples=["10M"])
    start_from: str | None = Field(
        None,
        description="a checkpoint whose weights a new run begins with: a folder of another run or of an import",
        examples=["runs/base/checkpoints/step-00001000.a1"],
    )
    tokenizer: TokenizerSpec = Field(default_factory=TokenizerSpec, description="text to tokens")
    data: DataSpec = Field(description="what is read and how it is mixed", examples=[{"sources": {"code": "src/"}}])
    budget: BudgetSpec = Field(default_factory=BudgetSpec, description="how much is trained")
    optimizer: OptimizerSpec = Field(default_factory=OptimizerSpec, description="the optimizer")
    schedule: ScheduleSpec = Field(default_factory=ScheduleSpec, description="learning rate over the run")
    tasks: list[ObjectiveSpec] = Field(
        [ObjectiveSpec()],
        min_length=1,
        description="what is learnt from a row: causal, masked, denoise, prefix, infill, or several with their shares",
        examples=[["causal", {"kind": "infill", "share": 0.5}]],
    )
    loss: LossSpec = Field(default_factory=LossSpec, description="what is added to the cross-entropy")
    dropout: DropoutSpec = Field(default_factory=DropoutSpec, description="dropout in training")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8_rowwise"] = Field(
        "auto",
        description="of the passes: fp32, tf32, bf16, fp16 (with loss scaling), or fp8 in layers' products with one "
        "scale a tensor or one a row (torchao); auto is the faster of fp32 and bf16",
        examples=["bf16"],
    )
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0, le=2.0**32)] = Field(
        "dynamic", description="of fp16: dynamic, or a fixed factor such as 1024", examples=["dynamic"]
    )
    compile: Literal["auto", "off", "block", "chain"] = Field(
        "auto",
        description="torch.compile of each block's parts, or of what lies between two layers' attention (chain); auto "
        "is chain on one GPU, block on several, off elsewhere",
        examples=["block"],
    )
    memory: MemorySpec = Field(default_factory=MemorySpec, description="room on the device, and what is paid for it")
    parallel: ParallelSpec = Field(default_factory=ParallelSpec, description="where it runs")
    guard: GuardSpec = Field(default_factory=GuardSpec, description="the judge of every step")
    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec, description="saves")
    observe: ObserveSpec = Field(default_factory=ObserveSpec, description="what is shown")
    evaluate: EvaluateSpec = Field(default_factory=EvaluateSpec, description="validation inside the run")
    lints: LintsSpec = Field(default_factory=LintsSpec, description="warnings about classic mistakes")
