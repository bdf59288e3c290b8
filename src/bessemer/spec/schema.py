"""RunSpec: the specification of one run. Every key has a description, default and example; the planner decides `auto`.

Descriptions appear in error messages, `bessemer spec schema` and docs/configuration.md, so they are written for users.
`checks.py` refuses combinations that cannot work. `python -m bessemer.spec.schema > docs/configuration.md` writes the
configuration reference; a test compares the two.

The parallel section: device, degrees of each kind of parallelism, and how processes communicate.
"""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from bessemer.spec.adapter import AdapterSpec
from bessemer.spec.classify import ClassifySpec
from bessemer.spec.data import STEPS, DataSpec, TokenizerSpec
from bessemer.spec.distill import DistillSpec
from bessemer.spec.guard import GuardSpec
from bessemer.spec.model import DropoutSpec, LossSpec, ModelSpec, ObjectiveSpec, OtherModelSpec
from bessemer.spec.observers import AlertsSpec, TrackerSpec
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec
from bessemer.spec.preference import DpoSpec, KtoSpec
from bessemer.spec.quantity import (
    AutoBatch,
    AutoCount,
    AutoDegree,
    AutoInterval,
    AutoSequences,
    AutoThreads,
    BatchTokens,
    Bytes,
    Seconds,
    SpecSection,
    StepCount,
    check_url,
    section,
    setting,
)
from bessemer.spec.recipe import expand_recipe
from bessemer.spec.reward_model import RewardModelSpec
from bessemer.spec.rl import GKD, RL_OBJECTIVES, RlSpec
from bessemer.spec.schedule import ScheduleSpec
from bessemer.spec.sweep import SweepSpec
from bessemer.spec.text_steps import StepSpec


class CheckpointSpec(SpecSection):
    """When checkpoints are saved and which are kept. A checkpoint stays if any of the keep rules matches it."""

    every: AutoInterval = setting(
        "auto", "interval between saves; auto balances the cost of a save against the cost of a failure", "500 steps"
    )
    asynchronous: bool | Literal["auto"] = setting(
        "auto", "write a copy of the state in the background; auto does so if it shortens the stall", True
    )
    keep_last: int = setting(2, "number of newest checkpoints to keep", 2, ge=1, le=1_000_000)
    keep_best: bool = setting(
        True,
        "also keep the checkpoint with the best validation: the lowest loss, of preferences the highest accuracy, "
        "of RL the highest reward (or judge); every new best is saved, in addition to `every`",
        True,
    )
    keep_every: StepCount | None = setting(None, "also keep the first checkpoint of every N steps", 10000)
    keep_age: Seconds | None = setting(None, "also keep checkpoints younger than this", "24h", gt=0)
    keep_bytes: Bytes | None = setting(
        None,
        "maximum total size; the oldest are deleted first, but never the newest, confirmed, best or tagged",
        "500GB",
    )
    archive_model_only: bool = setting(False, "reduce keep_every checkpoints to the weights, a third of the size", True)
    remote: str | None = setting(
        None,
        "fsspec URL to copy checkpoints to in the background, under the run's name; credentials come from the "
        "environment",
        "s3://bucket/checkpoints",
    )
    remote_keep_last: int | None = setting(
        None, "newest checkpoints to keep there (default: keep_last)", 5, ge=1, le=1_000_000
    )

    @field_validator("remote")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        return None if value is None else check_url(value, "s3://bucket/checkpoints or file:///mnt/durable/checkpoints")


class BatchChange(SpecSection):
    """Another batch size from a step on."""

    from_step: StepCount = setting(..., "first step with the new size", 1000)
    batch: BatchTokens = setting(..., "tokens per batch from there on", "512K")


class StopSpec(SpecSection):
    """Rules that finish a run before its budget is used up."""

    validation_loss: float | None = setting(None, "stop when the validation loss reaches this", 2.5, gt=0, le=1e6)
    patience: int | None = setting(None, "stop after this many evaluations without a new best", 5, ge=1, le=1_000_000)
    time: Seconds | None = setting(None, "stop after this much training time", "2h", gt=0)
    forecast: float | None = setting(
        None, "stop at an evaluation whose forecast of the final loss lies above this, with its 95 % interval", 2.5,
        gt=0, le=1e6,
    )  # fmt: skip


class BudgetSpec(SpecSection):
    """The length of the run in tokens, steps or epochs, and the batch sizes."""

    tokens: AutoCount = setting("auto", "tokens to train on", "20M")
    steps: StepCount | None = setting(None, "steps instead of tokens", 1000)
    epochs: float | None = setting(None, "epochs instead of tokens", 1.0, gt=0, le=1_000_000)
    batch: AutoBatch = setting("auto", "tokens per batch (one optimizer step)", "256K")
    batch_changes: list[BatchChange] = setting([], "later batch sizes", [{"from_step": 1000, "batch": "512K"}])
    micro_batch: AutoSequences = setting("auto", "sequences per forward pass", 8)
    stop: StopSpec = section(StopSpec, "rules that end the run early")


class ObserveSpec(SpecSection):
    """Progress output and measurements."""

    line_every: Seconds = setting(5.0, "interval between lines when the output is not a terminal", "5s")
    noise_every: StepCount | None = setting(
        None, "steps between two measurements of the gradient noise scale, for `bessemer plan ramp`: one process with "
        "several micro-batches in a step; costs a norm of the gradients", 10,
    )  # fmt: skip


class EvaluateSpec(SpecSection):
    """Validation during the run: on held-out documents, tasks and fixed prompts. Tasks are registered by their hashes
    before the first step."""

    every: AutoInterval = setting("auto", "interval between evaluations", "500 steps")
    tokens: AutoCount = setting("auto", "held-out tokens per evaluation", "1M")
    tasks: list[str] = setting(
        [], "tasks to score: .jsonl files of questions, lm-eval's .yaml files, names such as gsm8k", ["questions.jsonl"]
    )
    tasks_every: int = setting(1, "score them at each n-th evaluation only, and at the end", 5, ge=1, le=1_000_000)
    limit: int | None = setting(None, "most questions of each task", 200, ge=1, le=10_000_000)
    shots: int | None = setting(None, "examples before a question, instead of the task's own number", 5, ge=0, le=100)
    chat: bool = setting(False, "ask in the chat template", True)
    data: str | None = setting(None, "folder with the data of named tasks", "eval-data")
    samples: list[str] = setting(
        [], "prompts that are continued at each evaluation, greedily; kept in samples/", ["Once upon a time"]
    )
    sample_tokens: int = setting(64, "tokens of each of these samples", 128, ge=1, le=100_000)


class LintsSpec(SpecSection):
    """Warnings of `bessemer spec check` about settings that run but rarely work, and checks of fine-tuning rows."""

    silence: list[str] = setting([], "warnings and checks to silence for this run", ["no_warmup"])


Degree = Annotated[int, Field(ge=1, le=1_000_000)]


class ReplicasSpec(SpecSection):
    """How complete replicas reduce their gradients (`dp_replicate` alone, torch's DDP)."""

    bucket_mb: int = setting(25, "MiB of gradients per all-reduce bucket", 50, ge=1, le=4096)
    compress: Literal["none", "bf16", "powersgd"] = setting(
        "none", "compression of gradients: none, bf16 or powersgd; the last two change the losses", "bf16"
    )
    rank: int = setting(4, "rank of the PowerSGD approximation", 4, ge=1, le=1024)
    static_graph: bool = setting(False, "tell DDP that every pass uses the same layers", True)
    divide_optimizer: bool = setting(False, "shard the optimizer state over the replicas (ZeRO-1)", True)


class ShardSpec(SpecSection):
    """How sharded weights are gathered (`dp_shard`, torch's FSDP2)."""

    reshard: Literal["auto", "always", "never"] = setting(
        "auto", "whether a layer is resharded after its forward pass; never keeps it gathered until backward", "never"
    )
    layers: Degree = setting(1, "layers gathered together", 2)
    prefetch: int = setting(1, "groups of layers prefetched", 2, ge=1, le=8)
    alone: bool = setting(False, "shard also with a single process, to measure the cost of sharding", True)


class PipelineSpec(SpecSection):
    """The pipeline schedule (`pp`)."""

    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = setting(
        "1f1b", "1f1b, gpipe, interleaved or zero_bubble", "interleaved"
    )
    stages: int = setting(2, "stages per process, for interleaved and zero_bubble", 2, ge=2, le=16)


class DeepSpeedSpec(SpecSection):
    """What DeepSpeed shards and offloads (`engine: deepspeed`)."""

    zero: Literal[0, 1, 2, 3] = setting(2, "ZeRO stage 0 to 3: shard nothing, optimizer state, gradients, weights", 3)
    offload: Literal["none", "cpu", "nvme"] = setting(
        "none", "offload optimizer state (and weights, with zero 3)", "cpu"
    )
    folder: str | None = setting(None, "folder on the NVMe disk, with offload: nvme", "/local")


class ParallelSpec(SpecSection):
    """Device and parallelism. The degrees lay the model out over the processes of the launcher."""

    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", "auto, cpu, cuda or mps", "cuda")
    threads: AutoThreads = setting("auto", "CPU threads; changes the last digits of a CPU run", 8)
    engine: Literal["torch", "deepspeed"] = setting("torch", "torch or deepspeed, which then clips", "deepspeed")
    dp_replicate: AutoDegree = setting("auto", "data-parallel replicas; each processes its share of a step's rows", 2)
    dp_shard: AutoDegree = setting("auto", "processes that shard the weights, gradients and moments of a replica", 8)
    tp: Degree = setting(1, "tensor parallel: processes that share every matrix of a layer", 2)
    cp: Degree = setting(1, "context parallel: processes that share the tokens of a row", 2)
    context: Literal["ulysses", "ring"] = setting(
        "ulysses",
        "with cp: ulysses exchanges tokens for heads (all-to-all), ring passes keys and values around",
        "ring",
    )
    pp: Degree = setting(1, "pipeline parallel: stages that hold consecutive layers", 2)
    ep: Degree = setting(1, "expert parallel: processes that share the experts of a layer", 2)
    patience: Seconds = setting(
        1800.0, "timeout of collectives; then the launcher restarts all processes", "10 min", gt=0
    )
    sequence: bool = setting(True, "with tp: also shard norms and residuals along the sequence", False)
    replicas: ReplicasSpec = section(ReplicasSpec, "how replicas reduce gradients")
    shard: ShardSpec = section(ShardSpec, "how sharded weights are gathered")
    pipeline: PipelineSpec = section(PipelineSpec, "the pipeline schedule")
    deepspeed: DeepSpeedSpec = section(DeepSpeedSpec, "what DeepSpeed shards and offloads")


class SftSpec(SpecSection):
    """Supervised fine-tuning (`objective: sft`)."""

    neftune: float = setting(
        0.0, "NEFTune: noise on the embeddings, alpha / sqrt(length * width) (Jain et al. 2023)", 5.0, ge=0, le=1000
    )


OBJECTIVES = ("pretrain", "sft", "classify", "distill", "dpo", "kto", "reward", *RL_OBJECTIVES)


def section_of(objective: str) -> str:
    """The key of an objective's settings: its name; of reinforcement learning rl, of gkd distill."""
    if objective == GKD:
        return "distill"
    return "rl" if objective in RL_OBJECTIVES else objective


def expand_objective(data: dict[str, Any]) -> dict[str, Any]:
    """`objective: {dpo: {loss: ipo}}` is `objective: dpo` and `dpo: {loss: ipo}`. Others are returned unchanged."""
    objective = data.get("objective")
    if not isinstance(objective, dict) or len(objective) != 1:
        return data
    [(name, settings)] = objective.items()
    expands = name in OBJECTIVES[1:] and section_of(name) not in data
    return {**data, "objective": name, section_of(name): {} if settings is None else settings} if expands else data


class RunSpec(SpecSection):
    """One run."""

    name: str = setting("auto", "name of the run (default: of the spec file)", "my-run", pattern=r"^\w[\w.-]{0,99}$")
    runs: str = setting("runs", "folder that holds the runs", "runs", min_length=1)
    seed: int = setting(0, "seed of all random draws", 0, ge=0, lt=2**63)
    objective: str = setting(
        "pretrain",
        "pretrain, sft, classify, distill, gkd, dpo, kto, reward, grpo, rloo, reinforce, ppo, raft, online_dpo, or "
        "your own class: path/to/file.py:Class or module:Class; {dpo: {loss: ipo}} is short for the objective and "
        "its section",
        "sft",
    )
    classify: ClassifySpec | None = setting(
        None, "with objective: classify: what is classified", {"labels": ["negative", "positive"]}
    )
    sft: SftSpec | None = setting(None, "with objective: sft: its settings", {"neftune": 5.0})
    distill: DistillSpec = section(DistillSpec, "with objective: distill or gkd: how the teacher is compared")
    dpo: DpoSpec = section(DpoSpec, "with objective: dpo or online_dpo: the loss of pairs")
    kto: KtoSpec = section(KtoSpec, "with objective: kto: the loss of answers with labels")
    reward: RewardModelSpec = section(RewardModelSpec, "with objective: reward: the reward model")
    rl: RlSpec = section(
        RlSpec, "with objective: grpo, rloo, reinforce, ppo, raft or online_dpo: rollouts and rewards; gkd: rollouts"
    )
    recipe: Literal["standard", "compatible"] = setting(
        "standard",
        "compatible: what reaches a loss soonest among settings that export as a known family, where the spec leaves "
        "them open: muon, weights that start at zero, norms of queries and keys, a linear decay to zero",
        "compatible",
    )
    model: ModelSpec = setting(..., "the network", "10M")
    models: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")], OtherModelSpec] = setting(
        {}, "further models that the objective uses, by name", {"reference": "runs/base"}
    )
    start_from: str | None = setting(
        None,
        "checkpoint whose weights a new run starts with: a folder of another run or of an import",
        "runs/base/checkpoints/step-00001000.a1",
    )
    adapter: AdapterSpec | None = setting(
        None,
        "train low-rank adapters beside the frozen weights of model.hf or start_from",
        {"kind": "lora", "rank": 16},
    )
    tokenizer: TokenizerSpec = section(TokenizerSpec, "text to tokens")
    data: DataSpec = setting(..., "sources, curation and mixture", {"sources": {"code": "src/"}})
    budget: BudgetSpec = section(BudgetSpec, "length of the run and batch sizes")
    optimizer: OptimizerSpec = section(OptimizerSpec, "the optimizer")
    schedule: ScheduleSpec = section(ScheduleSpec, "learning-rate schedule")
    tasks: list[ObjectiveSpec] = setting(
        [ObjectiveSpec()],
        "training objectives: causal, masked, denoise, prefix, infill, or several with their shares",
        ["causal", {"kind": "infill", "share": 0.5}],
        min_length=1,
    )
    loss: LossSpec = section(LossSpec, "terms added to the cross-entropy")
    dropout: DropoutSpec = section(DropoutSpec, "dropout during training")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8_rowwise"] = setting(
        "auto",
        "precision of forward and backward: fp32, tf32, bf16, fp16 (with loss scaling), or fp8 matrix products with "
        "one scale per tensor or per row (torchao); auto is the faster of fp32 and bf16",
        "bf16",
    )
    loss_scale: Literal["dynamic"] | Annotated[float, Field(gt=0, le=2.0**32)] = setting(
        "dynamic", "loss scale of fp16: dynamic, or a fixed factor such as 1024", "dynamic"
    )
    compile: Literal["auto", "off", "block", "chain"] = setting(
        "auto",
        "torch.compile of the parts of each block (block), or of everything between two attentions (chain); auto is "
        "chain on one GPU, block on several, off elsewhere",
        "block",
    )
    memory: MemorySpec = section(MemorySpec, "how device memory is saved")
    parallel: ParallelSpec = section(ParallelSpec, "device and parallelism")
    guard: GuardSpec = section(GuardSpec, "checks of every step")
    checkpoint: CheckpointSpec = section(CheckpointSpec, "saving and retention")
    observe: ObserveSpec = section(ObserveSpec, "progress output")
    trackers: list[TrackerSpec] = setting(
        [], "where metrics, samples and reports are forwarded", ["tensorboard", {"wandb": {"project": "llm"}}]
    )
    alerts: AlertsSpec | None = setting(None, "messages about events and metrics", {"routes": [{"to": "SLACK_URL"}]})
    evaluate: EvaluateSpec = section(EvaluateSpec, "validation during the run")
    lints: LintsSpec = section(LintsSpec, "warnings about common mistakes")
    sweep: SweepSpec | None = setting(
        None, "what `bessemer sweep` varies", {"parameters": {"optimizer.lr": [1e-4, 3e-4, 1e-3]}}
    )

    @model_validator(mode="before")
    @classmethod
    def _sample_once(cls, value: Any) -> Any:
        """On-policy distillation has one answer to a prompt: the usual eight are for comparisons."""
        if isinstance(value, dict) and value.get("objective") == GKD and isinstance(rl := value.get("rl", {}), dict):
            return {**value, "rl": {"samples": 1, **rl}}
        return value

    @model_validator(mode="before")
    @classmethod
    def _expand_recipe(cls, value: Any) -> Any:
        return expand_recipe(value) if isinstance(value, dict) else value

    @model_validator(mode="before")
    @classmethod
    def _expand_objective(cls, value: Any) -> Any:
        return expand_objective(value) if isinstance(value, dict) else value

    @field_validator("objective", mode="before")
    @classmethod
    def _is_one_name(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = [name for name in value if name in OBJECTIVES]
        if len(value) != 1:
            fix = f"objective: {{{known[0] if known else 'dpo'}: ...}} with all its settings below it"
            raise ValueError(f"it has the keys {', '.join(map(str, value))}: name one objective, such as {fix}")
        if not known:
            return str(next(iter(value)))
        key = section_of(known[0])
        if key not in cls.model_fields:
            raise ValueError(f"{known[0]} has no settings of its own: write objective: {known[0]}")
        raise ValueError(f"{known[0]} has settings here and below {key}: write all of them below {key}")

    @field_validator("objective")
    @classmethod
    def _known_objective(cls, value: str) -> str:
        if value not in OBJECTIVES and not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", value):
            near = difflib.get_close_matches(value.lower(), OBJECTIVES, n=1, cutoff=0.5)
            meant = f" (did you mean {near[0]}?)" if near else ""
            own = "your own class as path/to/file.py:Class"
            raise ValueError(f"no objective {value!r}{meant}; write {', '.join(OBJECTIVES)}, or {own}")
        return value


def _to_markdown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_to_markdown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, BaseModel):  # a section: its non-default keys, or its first key
        changed = value.model_dump(exclude_defaults=True)
        first = next(iter(type(value).model_fields))
        return _to_markdown(changed or {first: getattr(value, first)})
    if isinstance(value, list):
        return "[" + ", ".join(_to_markdown(item) for item in value) + "]"
    return "-" if value is None else str(value)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required" if field.default_factory is None else "-"
    return _to_markdown(field.default)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, possibly inside a list or a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return None if issubclass(annotation, StepSpec) else annotation
    return next((inner for part in typing.get_args(annotation) if (inner := _section_of(part))), None)


def _section_lines(key: str, model: type[BaseModel]) -> list[str]:
    lines = [f"## {key}" if key else "## The top", "", inspect.cleandoc(model.__doc__ or ""), ""]
    lines += ["| key | default | what it is | example |", "|---|---|---|---|"]
    below: list[str] = []
    for name, field in model.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            below += _section_lines(f"{key}.{name}" if key else name, inner)
        example = f"`{_to_markdown(field.examples[0])}`" if field.examples else ""
        lines.append(f"| `{name}` | {_default(field)} | {field.description or ''} | {example} |")
    return [*lines, "", *below]


CONFIGURATION_HEAD = """# Configuration

Every key of a spec, generated from the schema (`python -m bessemer.spec.schema`). The planner decides `auto` when the
run starts; `plan.json` in the run folder states each decision and its reason. Counts take K, M, B, T (powers of ten)
and Ki, Mi, Gi (powers of 1024); shares take `2%` or `0.02`; times take `90s`, `10 min`, `2h`. Relative paths start at
the current folder, not at the folder of the spec.
"""
STEPS_HEAD = """# Curation steps

An entry of `data.clean`, or of `clean` of a source, is the name of a step, or its name and settings:
`- length: {min_chars: 100}`. The defaults are the published values where they exist.
"""


def configuration_markdown() -> str:
    """The content of docs/configuration.md."""
    steps = [line for name, spec in STEPS.items() for line in _section_lines(name, spec)]
    return "\n".join([CONFIGURATION_HEAD, *_section_lines("", RunSpec), STEPS_HEAD, *steps]).rstrip() + "\n"


if __name__ == "__main__":
    print(configuration_markdown(), end="")
