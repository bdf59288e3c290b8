"""RunSpec: one run in one document. Every field says what it is, its unit and its default; `auto` goes to the planner.

Field descriptions feed the error messages, `bessemer spec schema` and the configuration reference, so they are written
for users. Combinations that cannot work are refused by the named checks in `checks.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bessemer.spec.checkpoint import CheckpointSpec
from bessemer.spec.data import DataSpec, TokenizerSpec
from bessemer.spec.guard import GuardSpec
from bessemer.spec.memory import MemorySpec
from bessemer.spec.model import ModelSpec
from bessemer.spec.objectives import DropoutSpec, LossSpec, ObjectiveSpec
from bessemer.spec.optimizer import OptimizerSpec
from bessemer.spec.parallel import ParallelSpec
from bessemer.spec.part import Part
from bessemer.spec.quantity import (
    AutoBatch,
    AutoCount,
    AutoInterval,
    AutoSequences,
    AutoSpan,
    BatchTokens,
    Seconds,
    Share,
    StepCount,
)


class BatchChange(Part):
    """From a step on, another batch size."""

    from_step: StepCount = Field(description="first step of the new size", examples=[1000])
    batch: BatchTokens = Field(description="tokens in a batch from there on", examples=["512K"])


class StopSpec(Part):
    """Rules that end a run as finished, before its budget is spent."""

    validation_loss: float | None = Field(None, gt=0, le=1e6, description="stop when reached", examples=[2.5])
    patience: int | None = Field(
        None, ge=1, le=1_000_000, description="stop after so many evaluations without a new best", examples=[5]
    )
    time: Seconds | None = Field(None, gt=0, description="stop after so much training time", examples=["2h"])


class BudgetSpec(Part):
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


class ScheduleSpec(Part):
    """Learning rate over the run: warm-up from zero, then decay to a floor."""

    kind: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="cosine, linear or constant", examples=["cosine"]
    )
    warmup: AutoSpan = Field("auto", description="length of the warm-up", examples=["2%"])
    floor: Share = Field(0.1, description="last learning rate as a share of the peak", examples=["10%"])


class ObserveSpec(Part):
    """What is shown while it runs."""

    line_every: Seconds = Field(5.0, description="interval of lines when not in a terminal", examples=["5s"])


class EvaluateSpec(Part):
    """Validation inside the run, on the held-out documents."""

    every: AutoInterval = Field("auto", description="interval of evaluations", examples=["500 steps"])
    tokens: AutoCount = Field("auto", description="held-out tokens in one evaluation", examples=["1M"])


class LintsSpec(Part):
    """Warnings of `bessemer spec check` about settings that would run and should not."""

    silence: list[str] = Field([], description="rules that are wrong for this run", examples=[["no_warmup"]])


class RunSpec(Part):
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
