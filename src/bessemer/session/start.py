"""A run that begins with somebody's weights: a Hugging Face folder gives shape, tokenizer and tensors.

The vocabulary may grow: tokens of `tokenizer.special` that the folder lacks get rows of their own, which begin as the
mean of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from bessemer.errors import UserError
from bessemer.model.attention import SelfAttention
from bessemer.model.attention_backends import choose, set_backend
from bessemer.model.block import TransformerBlock
from bessemer.model.families.family import Family
from bessemer.model.families.folder import Folder, check_folder, ours
from bessemer.model.families.registry import read_shape
from bessemer.model.transformer import Decoder, network
from bessemer.model.wrapped import LIMITS, WrappedModel, check_wrapped, load_wrapped, read_wrapped
from bessemer.parallel.shard import fill
from bessemer.plan.decide import decide_context
from bessemer.plan.decision import Plan
from bessemer.spec.model import model_shape
from bessemer.spec.quantity import human_count
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.compile import compute_type
from bessemer.train.engine import Engine

GROWN = ("embedding.weight", "head.weight", "head_bias")  # one row for each token


@dataclass(frozen=True)
class WeightSource:
    """A folder of weights and what its config.json describes."""

    folder: Folder
    family: Family | None  # None: transformers runs it
    shape: ModelShape

    @property
    def name(self) -> str:
        return self.family.name if self.family else "wrapped"


def open_source(spec: RunSpec) -> WeightSource | None:
    """What `model.hf` names, if anything. Reads config.json and no weights."""
    if spec.model.hf is None:
        return None
    folder = Folder(spec.model.hf)
    if spec.model.wrap:
        return WeightSource(folder, None, read_wrapped(folder.path))
    return WeightSource(folder, *read_shape(folder.config))


def completed(spec: RunSpec) -> RunSpec:
    """The spec with what follows from its own words: the special tokens of its tasks, and the folder's tokenizer."""
    context = spec.data.context if isinstance(spec.data.context, int) else 0
    names = [name for task in spec.tasks if context or task.kind != "denoise" for name in task.special_tokens(context)]
    wanted = list(dict.fromkeys([*spec.tokenizer.special, *names]))
    if wanted != spec.tokenizer.special:
        spec = spec.model_copy(update={"tokenizer": spec.tokenizer.model_copy(update={"special": wanted})})
    return with_its_tokenizer(spec)


def with_its_tokenizer(spec: RunSpec) -> RunSpec:
    """The spec with the folder's tokenizer named, unless it names one itself."""
    if spec.model.hf is None or spec.tokenizer.path is not None:
        return spec
    files = Folder(spec.model.hf).tokenizer_files
    known = [name for name in ("tokenizer.json", "tokenizer.model") if name in files]
    if not known:
        raise UserError(
            f"model.hf: {spec.model.hf} has no tokenizer.json: write tokenizer: {{path: FILE}} with the one it was "
            "trained with"
        )
    tokenizer = spec.tokenizer.model_copy(update={"path": str(files[known[0]])})
    return spec.model_copy(update={"tokenizer": tokenizer})


def decide_shape(spec: RunSpec, source: WeightSource | None, vocab: int, plan: Plan) -> tuple[ModelShape, int]:
    """The model's shape with a tokenizer of that size, and the context."""
    given = source.shape if source else None
    # Some models have rows to spare, which stay.
    shape = model_shape(spec.model, max(vocab, given.vocab if given else 0), given)
    shape = stretched(shape, given)
    if source:
        what = f"{source.name}, {human_count(shape.parameters)} parameters"
        plan.add("model", what, f"config.json of {source.folder.path}", "model")
    context = decide_context(spec, shape, plan)
    if given and given.wrapped:
        check_wrapped(given, vocab, context)
        plan.add("model.wrap", True, LIMITS, "asked")
    note_stretch(spec, shape, context, plan)
    return fit_positions(shape, context), context


def stretched(shape: ModelShape, given: ModelShape | None) -> ModelShape:
    """Where the spec stretches a folder's positions: from the folder's context on, unless it says otherwise."""
    rope = shape.rope
    if given is None or rope.scaling == "none" or rope == given.rope:
        return shape
    original = rope.original or given.max_positions
    return replace(shape, rope=replace(rope, original=original), max_positions=int(original * rope.factor))


def note_stretch(spec: RunSpec, shape: ModelShape, context: int, plan: Plan) -> None:
    """What was done to rotary positions, or should have been, in the plan."""
    rope = shape.rope
    if shape.positions != "rope":
        return
    if rope.scaling != "none":
        told = f"positions of {rope.original:,} tokens are stretched to {int(rope.original * rope.factor):,}"
        plan.add("model.rope", f"{rope.scaling} x{rope.factor:g}", told, "asked" if spec.model.rope else "model")
    elif shape.max_positions and context > shape.max_positions:
        told = f"{context:,} tokens exceed the {shape.max_positions:,} that the model is good for"
        plan.add("model.rope", "none", f"{told}: stretch them (docs/context.md)", "model")


def fit_positions(shape: ModelShape, context: int) -> ModelShape:
    """Learned positions are as many as the context, unless said otherwise; a longer context has none to learn."""
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
    """Fill the model, which may have more tokens than the folder; how many were added."""
    given = source.shape.vocab
    if source.family is None:
        assert isinstance(model, WrappedModel)
        load_wrapped(model, source.folder.path)
        return 0
    with torch.device("meta"):
        check_folder(network(replace(model.shape, vocab=given)), source.folder, source.family)
    state = dict(model.state_dict())
    with torch.no_grad():
        for name, tensor in ours(source.folder, replace(model.shape, vocab=given), source.family):
            target = state.pop(name, None)
            if target is None:  # of another stage
                continue
            if name in GROWN and len(target) > given:
                mean = tensor.float().mean(dim=0, keepdim=tensor.ndim > 1).to(tensor.dtype)
                tensor = torch.cat((tensor, mean.expand(len(target) - given, *tensor.shape[1:])))
            fill(target, tensor)
    assert not state, f"no piece of {source.family.name} fills {sorted(state)}"
    return model.shape.vocab - given


def set_dropout(model: nn.Module, embedding: float, attention: float, residual: float) -> None:
    for module in model.modules():
        if isinstance(module, Decoder):
            module.dropout = embedding
        elif isinstance(module, SelfAttention):
            module.dropout = attention
        elif isinstance(module, TransformerBlock):
            module.dropout = residual


def choose_attention(engine: Engine, plan: Plan, previous: Plan | None) -> None:
    """The kernel that is fastest here and right, by measurement; a resumed run keeps the one it had."""
    if engine.device.type != "cuda" or engine.model.shape.wrapped:
        plan.add("attention", "sdpa", "torch's own choice; nothing to measure here", "rule")
        return
    if engine.world.layout.cp > 1 and engine.spec.parallel.context == "ring":
        plan.add("attention", "sdpa", "a ring attends block by block, with kernels that say their log-sum-exp", "rule")
        return
    name = plan.keep("attention", "auto", previous)
    if name is None:
        dtype = compute_type(engine.plan.precision)
        tasks = {task.kind for task in engine.spec.tasks}
        packed, prefix = not engine.spec.data.cross_documents, not tasks <= {"causal", "infill"}
        choice = choose(
            engine.model.shape, engine.plan.context, engine.plan.micro_rows, dtype, engine.device, packed,
            prefix=prefix, dropout=engine.spec.dropout.attention > 0,
        )  # fmt: skip
        name = plan.add("attention", choice.name, choice.reason, "measured")
    set_backend(engine.model, str(name))
