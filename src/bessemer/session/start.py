"""What a run starts with: the completed spec, the model shape, and the weights of a Hugging Face folder.

The vocabulary may grow: tokens of `tokenizer.special` that the folder lacks get new rows, initialised to the mean of
the others.

Resolves a spec to the settings of a run: layout, rows and training plan. `Session` uses it at each start;
`bessemer inspect`, the emitters and `bench scaling` use it without starting a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch

from bessemer.data.stream.rows import Rows
from bessemer.dtensor import copy_shard
from bessemer.errors import UserError
from bessemer.model.adapters import is_part
from bessemer.model.classifier import HEAD, body_family, head_of_folder, without_head
from bessemer.model.families.folder import HfFolder, check_folder, native_tensors
from bessemer.model.families.registry import Family, read_shape
from bessemer.model.transformer import Decoder, make_module
from bessemer.model.wrapped import LIMITS, WrappedModel, check_wrapped, load_wrapped, read_wrapped
from bessemer.parallel.world import World, set_timeouts
from bessemer.plan.adapter_choice import choose_adapter
from bessemer.plan.cost_model.memory import reserve_memory
from bessemer.plan.decide import TrainPlan, decide_context, decide_training
from bessemer.plan.decision import Plan
from bessemer.plan.hardware import Machine
from bessemer.plan.rollouts import log_rl
from bessemer.plan.search.layout import ONE_PROCESS, Layout, decide_layout, record_replicas
from bessemer.session.data import Data, held_out_rows, make_rows, open_data, sizes
from bessemer.session.models import COMPANIONS, ModelSource, check_tokenizers, open_models
from bessemer.session.preferences import log_preferences, with_preference_defaults
from bessemer.session.rl import with_rl_defaults
from bessemer.session.sft import log_sft, with_sft_defaults
from bessemer.spec.model import model_shape
from bessemer.spec.quantity import human_count
from bessemer.spec.reward_model import with_label_head
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.device import measure_machine
from bessemer.train.evaluate import HeldOutSet
from bessemer.train.speed import training_rate

PRECISION_ROUNDS = 3  # comparisons of two precisions
TOKEN_ROWS = ("embedding.weight", "head.weight", "head_bias")  # tensors with one row per token


@dataclass(frozen=True)
class WeightSource:
    """A folder of weights and the model that its config.json describes."""

    folder: HfFolder
    family: Family | None  # None: run by transformers
    shape: ModelShape

    @property
    def name(self) -> str:
        return self.family.name if self.family else "wrapped"


def open_source(spec: RunSpec) -> WeightSource | None:
    """The folder of `model.hf`, if the spec names one. Reads config.json but no weights."""
    if spec.model.hf is None:
        return None
    folder = HfFolder(spec.model.hf)
    if spec.model.wrap:
        return WeightSource(folder, None, read_wrapped(folder.path))
    if spec.objective in ("classify", "reward"):
        family = body_family(folder.config)
        return WeightSource(folder, family, family.shape(folder.config))
    return WeightSource(folder, *read_shape(folder.config))


def complete_spec(spec: RunSpec) -> RunSpec:
    """The spec with what it implies: the special tokens of its tasks, and the folder's tokenizer."""
    context = spec.data.context if isinstance(spec.data.context, int) else 0
    names = [name for task in spec.tasks if context or task.kind != "denoise" for name in task.special_tokens(context)]
    special = list(dict.fromkeys([*spec.tokenizer.special, *names]))
    if special != spec.tokenizer.special:
        spec = spec.model_copy(update={"tokenizer": spec.tokenizer.model_copy(update={"special": special})})
    spec = with_rl_defaults(with_preference_defaults(with_sft_defaults(spec)))
    return with_folder_tokenizer(with_whole_documents(spec))


def with_whole_documents(spec: RunSpec) -> RunSpec:
    """Labels are of whole documents: each gets a row of its own unless the spec packs them; long ones are cut off."""
    if spec.objective != "classify" or spec.data.packing == "best_fit":
        return spec
    fixed = spec.parallel.pp > 1 or spec.parallel.cp > 1  # stages and columns need micro-batches of one size
    to = "context" if fixed else spec.data.padding.to
    padding = spec.data.padding.model_copy(update={"long": "truncate", "to": to})
    return spec.model_copy(update={"data": spec.data.model_copy(update={"packing": "pad", "padding": padding})})


def with_folder_tokenizer(spec: RunSpec) -> RunSpec:
    """The spec with the folder's tokenizer, unless it names one itself."""
    if spec.model.hf is None or spec.tokenizer.path is not None:
        return spec
    files = HfFolder(spec.model.hf).tokenizer_files
    names = [name for name in ("tokenizer.json", "tokenizer.model") if name in files]
    if not names:
        raise UserError(
            f"model.hf: {spec.model.hf} has no tokenizer.json: write tokenizer: {{path: FILE}} with the tokenizer "
            "that it was trained with"
        )
    tokenizer = spec.tokenizer.model_copy(update={"path": str(files[names[0]])})
    return spec.model_copy(update={"tokenizer": tokenizer})


def decide_shape(spec: RunSpec, source: WeightSource | None, vocab: int, plan: Plan) -> tuple[ModelShape, int]:
    """The model's shape with a vocabulary of that size, and the context."""
    folder_shape = source.shape if source else None
    # Some models have spare rows, which stay.
    shape = model_shape(spec.model, max(vocab, folder_shape.vocab if folder_shape else 0), folder_shape)
    shape = scale_positions(shape, folder_shape)
    shape = with_label_head(spec, shape)
    if source:
        value = f"{source.name}, {human_count(shape.parameters)} parameters"
        plan.add("model", value, f"config.json of {source.folder.path}", "model")
    context = decide_context(spec, shape, plan)
    if folder_shape and folder_shape.wrapped:
        check_wrapped(folder_shape, vocab, context)
        plan.add("model.wrap", True, LIMITS, "asked")
    log_position_scaling(spec, shape, context, plan)
    if spec.recipe == "compatible":
        reason = "muon, norms of queries and keys, outputs that start at 0, linear to 0, unless the spec says otherwise"
        plan.add("recipe", spec.recipe, f"{reason}; measured in docs/optimizers.md", "asked", "empirical at this scale")
    log_sft(spec, plan)
    log_preferences(spec, plan)
    log_rl(spec, shape, context, plan)
    return fit_positions(shape, context), context


def scale_positions(shape: ModelShape, folder_shape: ModelShape | None) -> ModelShape:
    """If the spec scales a folder's rotary positions: by default from the folder's context on."""
    rope = shape.rope
    if folder_shape is None or rope.scaling == "none" or rope == folder_shape.rope:
        return shape
    original = rope.original or folder_shape.max_positions
    return replace(shape, rope=replace(rope, original=original), max_positions=int(original * rope.factor))


def log_position_scaling(spec: RunSpec, shape: ModelShape, context: int, plan: Plan) -> None:
    """Adds the scaling of rotary positions to the plan, or the advice to scale them."""
    rope = shape.rope
    if shape.positions != "rope":
        return
    if rope.scaling != "none":
        reason = f"positions of {rope.original:,} tokens are stretched to {int(rope.original * rope.factor):,}"
        plan.add("model.rope", f"{rope.scaling} x{rope.factor:g}", reason, "asked" if spec.model.rope else "model")
    elif shape.max_positions and context > shape.max_positions:
        reason = f"{context:,} tokens exceed the {shape.max_positions:,} that the model supports"
        plan.add("model.rope", "none", f"{reason}: stretch them (docs/context.md)", "model")


def fit_positions(shape: ModelShape, context: int) -> ModelShape:
    """The model has as many learned positions as the context, unless the spec sets them."""
    if shape.positions != "learned":
        return shape
    if not shape.max_positions:
        return replace(shape, max_positions=context)
    if context > shape.max_positions:
        raise UserError(
            f"data.context: {context} tokens exceed the model's {shape.max_positions} learned positions: "
            f"write context: {shape.max_positions} or less"
        )
    return shape


def load_source(model: Decoder, source: WeightSource) -> int:
    """Loads the folder's weights into the model, which may have more tokens; returns how many were added."""
    folder_vocab, shape = source.shape.vocab, model.shape
    if source.family is None:
        assert isinstance(model, WrappedModel)
        load_wrapped(model, source.folder.path)
        return 0
    with torch.device("meta"):
        body = without_head(shape) if shape.labels else shape
        family = source.family
        if shape.labels and (head := head_of_folder(source.folder.config, shape)) is not None:
            body, family = shape, head
        check_folder(make_module(replace(body, vocab=folder_vocab)), source.folder, family)
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(COMPANIONS) and not is_part(name)
    }
    if body is not shape:  # the head of labels stays as it was initialised
        state = {name: tensor for name, tensor in state.items() if not name.startswith(HEAD)}
    with torch.no_grad():
        for name, tensor in native_tensors(source.folder, replace(body, vocab=folder_vocab), family):
            target = state.pop(name, None)
            if target is None:  # belongs to another pipeline stage
                continue
            if name in TOKEN_ROWS[: 1 if shape.labels else 3] and len(target) > folder_vocab:
                mean = tensor.float().mean(dim=0, keepdim=tensor.ndim > 1).to(tensor.dtype)
                tensor = torch.cat((tensor, mean.expand(len(target) - folder_vocab, *tensor.shape[1:])))
            copy_shard(target, tensor)
    assert not state, f"no tensor of {source.family.name} fills {sorted(state)}"
    return model.shape.vocab - folder_vocab


@dataclass(frozen=True)
class ResolvedRun:
    """Everything that is decided before a job is built."""

    plan: Plan
    training: TrainPlan
    shape: ModelShape
    context: int
    data: Data
    rows: dict[str, Rows]
    held_out: dict[str, HeldOutSet]
    source: WeightSource | None = None
    others: Sequence[ModelSource] = ()  # further models of the run

    def summary(self, training: TrainPlan) -> str:
        """The plan in one line."""
        rows = training.batch_rows[0][1]
        return (
            f"{human_count(self.shape.parameters)} parameters, vocabulary {self.shape.vocab:,}, "
            f"{training.total_steps:,} steps of {rows} x {training.context} tokens, peak lr {training.peak_lr:g}, "
            f"{training.precision}"
        )


def dry_run(spec: RunSpec, device: torch.device) -> ResolvedRun:
    """Resolves a spec without starting a run. Prepares the spec's data if that has not been done."""
    plan, source = Plan(), open_source(spec)
    data = open_data(spec, plan)
    shape, context = decide_shape(spec, source, data.tokenizer.vocab_size, plan)
    machine = measure_machine(device)
    spec = decide_adapter_kind(spec, shape, context, machine, plan)
    return replace(resolve_run(spec, data, shape, context, machine, plan), source=source)


def decide_adapter_kind(
    spec: RunSpec, shape: ModelShape, context: int, machine: Machine, plan: Plan, previous: Plan | None = None,
    processes: int = 1,
) -> RunSpec:  # fmt: skip
    """The spec with `adapter: auto` decided, beside the run's further models."""
    if spec.adapter is None or spec.adapter.kind != "auto":
        return spec
    reserved = reserve_memory(spec, [other.size for other in open_models(spec)], machine, 1, Plan())
    return choose_adapter(spec, shape, context, reserved, plan, previous, processes)


def resolve_run(
    spec: RunSpec,
    data: Data,
    shape: ModelShape,
    context: int,
    machine: Machine,
    plan: Plan,
    previous: Plan | None = None,
    layout: Layout = ONE_PROCESS,
) -> ResolvedRun:
    """Rows and training plan; `previous` is the plan of the checkpoint to continue from."""
    others = open_models(spec)
    check_tokenizers(others, data.tokenizer)
    machine = reserve_memory(spec, [other.size for other in others], machine, layout.held, plan)
    rows, held_out = make_rows(spec, data, context), held_out_rows(spec, data, context)
    held_out_tokens = sum(held.tokens for held in held_out.values())
    sources = sizes(spec, rows, data, context)
    training = decide_training(spec, shape, context, machine, sources, held_out_tokens, plan, previous, layout)
    return ResolvedRun(plan, training, shape, context, data, rows, held_out, others=others)


def choose_layout(
    spec: RunSpec, world: World, shape: ModelShape, context: int, machine: Machine, plan: Plan, previous: Plan | None
) -> Machine:
    """Decides how the model is parallelized and sets it up in `world`. A new run also measures precisions: the machine
    with the result."""
    if previous is None:
        machine = world.agree(measure_precision(spec, machine, shape, context, world.device) if world.main else machine)
    reserved = reserve_memory(spec, [other.size for other in open_models(spec)], machine, 1, Plan())
    layout = decide_layout(spec, shape, context, reserved, world.size, plan)
    record_replicas(spec, layout, plan)
    world.set_layout(layout, alone=spec.parallel.shard.alone)
    set_timeouts(timedelta(seconds=spec.parallel.patience))
    return machine


def measure_precision(
    spec: RunSpec, machine: Machine, shape: ModelShape, context: int, device: torch.device
) -> Machine:
    """On a CPU a fast bf16 matmul does not imply a fast step: trains two layers in both precisions, in turns. Other
    work on the machine may slow one of them down: the comparison that speaks least for bf16 counts."""
    promising = machine.matmul["bf16"] > 1.3 * machine.matmul["fp32"]
    if device.type != "cpu" or spec.precision != "auto" or not promising or shape.wrapped:
        return machine
    short, rows = replace(shape, layers=min(2, shape.layers)), max(1, 1024 // context)
    rounds = [
        {key: training_rate(short, context, rows, key, device, budget_s=0.15) for key in ("fp32", "bf16")}
        for _ in range(PRECISION_ROUNDS)
    ]
    return replace(machine, training=min(rounds, key=lambda rates: rates["bf16"] / rates["fp32"]))
