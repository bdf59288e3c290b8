"""Checks for combinations of settings that cannot work. Each check yields (path, message with the fix).

Each check is listed with the keys that it reads. If one of these keys is invalid itself, the check is skipped, so that
one mistake is reported once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from bessemer.spec.document import KeyPath
from bessemer.spec.model import ModelSpec, model_shape
from bessemer.spec.objective_checks import OBJECTIVE_CHECKS, Problem
from bessemer.spec.optimizer import FUSED, SETTINGS, MuonSpec, memory_problems
from bessemer.spec.preference import ANSWER_OBJECTIVES
from bessemer.spec.quantity import format_names
from bessemer.spec.recipe import recipe_problems
from bessemer.spec.schedule import schedule_problems
from bessemer.spec.schema import OBJECTIVES, RunSpec
from bessemer.spec.shape import preset
from bessemer.spec.sweep import sweep_problems
from bessemer.spec.text_steps import StepSpec

MIN_VOCABS = {"bpe": 257, "char": 257, "wordpiece": 258, "unigram": 279}


def check_length(spec: RunSpec) -> Iterator[Problem]:
    lengths = [key for key in ("steps", "epochs") if getattr(spec.budget, key) is not None]
    if spec.budget.tokens != "auto":
        lengths.insert(0, "tokens")
    for extra in lengths[1:]:
        yield (("budget", extra), f"the length of the run is set twice, by {lengths[0]} and {extra}: keep one of them")


def check_warmup(spec: RunSpec) -> Iterator[Problem]:
    steps, warmup = spec.budget.steps, spec.schedule.warmup
    if steps is not None and isinstance(warmup, int) and warmup >= steps:
        yield ("schedule", "warmup"), f"{warmup:,} steps are the whole run of {steps:,}: write 2%"


def check_model_complete(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    missing = [key for key in ("width", "layers", "heads") if getattr(model, key) is None]
    if model.preset is None and model.hf is None and missing:
        yield ("model",), f"missing {', '.join(missing)}: write them, or a preset such as `model: 10M`"


def check_heads(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if model.hf or (model.preset is None and None in (model.width, model.layers, model.heads)):
        return  # the shape of a folder is checked when it is opened
    if model.mla or (model.moe and None in (model.moe.experts, model.moe.top_k)):
        return
    shape = model_shape(model, vocab=1)
    if model.head_dim is None and shape.width % shape.heads:
        fits = [n for n in range(1, shape.heads) if shape.width % n == 0 and shape.width // n % 2 == 0]
        fix = f"write heads: {fits[-1]}, or set head_dim" if fits else "set head_dim, such as head_dim: 64"
        yield ("model", "heads"), f"width {shape.width} is not divisible by {shape.heads} heads: {fix}"
        return
    if shape.head_dim % 2 and shape.positions == "rope":
        fix = f"write head_dim: {shape.head_dim + 1}"
        yield ("model", "head_dim"), f"{shape.head_dim} is odd, but rotary positions need an even size: {fix}"
    if shape.heads % shape.kv_heads:
        fits = [n for n in range(1, min(shape.kv_heads, shape.heads) + 1) if shape.heads % n == 0]
        yield (
            ("model", "kv_heads"),
            f"{shape.kv_heads} does not divide heads ({shape.heads}): write kv_heads: {fits[-1]}",
        )


def check_tasks(spec: RunSpec) -> Iterator[Problem]:
    """Objectives that rewrite rows need separated documents, and conflict with noise."""
    kinds = [task.kind for task in spec.tasks]
    separate = [kind for kind in kinds if kind not in ("causal", "infill")]
    if separate and spec.data.cross_documents:
        yield ("data", "cross_documents"), f"{separate[0]} needs attention within documents only: write false"
    rewritten = [kind for kind in kinds if kind in ("masked", "denoise", "infill")]
    if rewritten and spec.data.noise != type(spec.data.noise)():
        yield ("data", "noise"), f"{rewritten[0]} rewrites the inputs: remove noise, or the task"
    for i, task in enumerate(spec.tasks):
        for name in task.sources:
            if name not in spec.data.sources:
                yield ("tasks", i, "sources"), f"no source {name!r}: sources are {format_names(spec.data.sources)}"


def check_shape(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if model.mixers and "mamba" in model.mixers:
        if model.mamba is None and model.hf is None:
            yield ("model", "mamba"), "mixers has mamba layers: add for example mamba: {heads: 24}"
        if model.causal is False:
            yield ("model", "causal"), "mamba layers are always causal: remove causal: false, or the mamba layers"
    if model.mamba and model.mamba.heads % model.mamba.groups:
        yield (
            ("model", "mamba", "groups"),
            f"{model.mamba.groups} does not divide heads ({model.mamba.heads}): write a divisor",
        )
    if model.ffn == 0 and (model.norm_place == "post" or model.parallel not in (None, "none")):
        yield ("model", "ffn"), "a block without a feed-forward layer cannot be post-norm or parallel: set ffn"
    if model.moe and model.hf is None and None in (model.moe.experts, model.moe.top_k):
        yield ("model", "moe"), "needs experts and top_k: write for example {experts: 8, top_k: 2}"
    if model.mla and model.mla.rope_dim % 2:
        yield (
            ("model", "mla", "rope_dim"),
            f"{model.mla.rope_dim} is odd, but rotary positions need an even size: write {model.mla.rope_dim + 1}",
        )
    yield from _check_experts(model)


def _check_experts(model: ModelSpec) -> Iterator[Problem]:
    moe = model.moe
    if moe is None:
        return
    if moe.experts and moe.top_k and moe.top_k > moe.experts:
        yield ("model", "moe", "top_k"), f"{moe.top_k} exceeds the {moe.experts} experts: lower it"
    if moe.experts and moe.groups and moe.experts % moe.groups:
        yield (
            ("model", "moe", "groups"),
            f"{moe.groups} groups do not divide the {moe.experts} experts: write a divisor",
        )
    if moe.groups and moe.top_groups and moe.top_groups > moe.groups:
        yield ("model", "moe", "top_groups"), f"{moe.top_groups} exceeds the {moe.groups} groups: lower it"
    layers = model.layers or (shape.layers if model.preset and (shape := preset(model.preset)) else None)
    if layers and (beyond := [layer for layer in moe.dense_layers or () if layer >= layers]):
        yield ("model", "moe", "dense_layers"), f"no layer {beyond[0]}: write numbers from 0 to {layers - 1}"


def check_vocab(spec: RunSpec) -> Iterator[Problem]:
    vocab = spec.tokenizer.vocab
    if vocab == "auto":
        return
    if spec.tokenizer.path is not None:
        yield (("tokenizer", "vocab"), "a loaded tokenizer has a fixed size: remove vocab, or remove path to train one")
    else:
        minimum = MIN_VOCABS[spec.tokenizer.kind] + len(spec.tokenizer.special)
        if vocab < minimum:
            need = f"the bytes and special tokens of {spec.tokenizer.kind} need at least {minimum}"
            yield ("tokenizer", "vocab"), f"{vocab} is too small: {need}; write vocab: auto or 8K"


def check_folder_vocab(spec: RunSpec) -> Iterator[Problem]:
    """Continuing a folder's model with its own tokenizer leaves no vocabulary to choose."""
    if spec.model.hf is not None and spec.tokenizer.path is None and spec.tokenizer.vocab != "auto":
        yield ("tokenizer", "vocab"), "the tokenizer of model.hf has a fixed size: remove vocab"


def check_conversations(spec: RunSpec) -> Iterator[Problem]:
    """Steps that cut text cannot be applied to conversations, whose turns would no longer match."""
    chats = [name for name, source in spec.data.sources.items() if source.is_chat]
    lists: list[tuple[KeyPath, list[StepSpec]]] = [
        (("data", "sources", name, "clean"), spec.data.sources[name].clean) for name in chats
    ]
    if chats:
        lists.append((("data", "clean"), spec.data.clean))
    for name, source in spec.data.sources.items():
        if source.compares and spec.objective in OBJECTIVES and spec.objective not in ANSWER_OBJECTIVES:
            problem = f"objective: {spec.objective} would learn the rejected answers too"
            yield ("data", "sources", name, "columns"), f"{problem}: name an objective that compares them"
        if source.message_weights and spec.objective != "sft":
            yield ("data", "sources", name, "message_weights"), "only objective: sft weighs messages: remove the key"
    for path, steps in lists:
        for i, step in enumerate(steps):
            cuts = step.step in ("dedup_paragraphs", "dedup_substrings") or getattr(step, "action", "") == "cut"
            if cuts:
                fix = f"put it into clean of the other sources (conversations: {format_names(chats)})"
                yield (*path, i), f"{step.step} cuts text, which is not possible in conversations: {fix}"


def check_context(spec: RunSpec) -> Iterator[Problem]:
    context = spec.data.context
    if context != "auto" and context < 2:
        yield ("data", "context"), f"{context} is too short: write at least 2 tokens, such as 2048"


def check_batch(spec: RunSpec) -> Iterator[Problem]:
    budget, context = spec.budget, spec.data.context
    if context == "auto":
        return
    sizes: list[tuple[KeyPath, int]] = []
    if budget.batch != "auto":
        sizes.append((("budget", "batch"), budget.batch))
    sizes += [(("budget", "batch_changes", i, "batch"), change.batch) for i, change in enumerate(budget.batch_changes)]
    for path, batch in sizes:
        if batch < context:
            fix = f"write at least {context}, or lower data.context"
            yield path, f"{batch} tokens are less than one sequence of {context}: {fix}"


def check_micro_batch(spec: RunSpec) -> Iterator[Problem]:
    batch, micro, context = spec.budget.batch, spec.budget.micro_batch, spec.data.context
    if batch == "auto" or micro == "auto" or context == "auto":
        return
    rows = max(1, round(batch / context))
    if micro > rows:
        fix = f"write {rows} or less, or a larger budget.batch"
        yield (
            ("budget", "micro_batch"),
            f"{micro} sequences exceed the batch of {rows} sequences of {context} tokens: {fix}",
        )


def check_batch_changes(spec: RunSpec) -> Iterator[Problem]:
    changes = spec.budget.batch_changes
    for i, change in enumerate(changes[1:], 1):
        before = changes[i - 1].from_step
        if change.from_step <= before:
            yield (
                ("budget", "batch_changes", i, "from_step"),
                f"{change.from_step} must be after {before}, the start of the previous change: sort them",
            )


def check_sources(spec: RunSpec) -> Iterator[Problem]:
    for name, source in spec.data.sources.items():
        if not re.fullmatch(r"\w[\w.-]{0,99}", name):
            fix = "use letters, digits, '.', '_' and '-', 100 at most, beginning with a letter or digit"
            yield ("data", "sources", name), f"not a valid name of a source: {fix}"
        if spec.data.store is None and not any(path.strip() for path in source.path):
            yield ("data", "sources", name, "path"), "no file: write a file, a folder or a glob"


def check_weights(spec: RunSpec) -> Iterator[Problem]:
    if not any(source.weight > 0 for source in spec.data.sources.values()):
        yield ("data", "sources"), "at least one source needs a weight above 0"


def check_phase_sources(spec: RunSpec) -> Iterator[Problem]:
    for i, phase in enumerate(spec.data.phases):
        path: KeyPath = ("data", "phases", i, "weights")
        wrong = False
        for name in phase.weights:
            if name not in spec.data.sources:
                wrong = True
                yield (*path, name), f"no source {name!r}: sources are {format_names(spec.data.sources)}"
        if not wrong and not any(weight > 0 for weight in phase.weights.values()):
            yield path, "at least one source needs a weight above 0"


def check_phase_order(spec: RunSpec) -> Iterator[Problem]:
    for i, (before, phase) in enumerate(zip(spec.data.phases, spec.data.phases[1:], strict=False), 1):
        if phase.start <= before.start:
            yield (
                ("data", "phases", i, "start"),
                f"{phase.start:,} must be after {before.start:,}, the start of the previous phase: sort them",
            )


def check_validation_share(spec: RunSpec) -> Iterator[Problem]:
    if spec.data.validation > 0.5:
        held_out = f"{spec.data.validation:.3g} of the documents held out"
        yield ("data", "validation"), f"{held_out} leaves too little to train on: write validation: 1%"


def check_stop_rules(spec: RunSpec) -> Iterator[Problem]:
    if spec.budget.stop.forecast is not None and spec.objective != "pretrain":
        yield ("budget", "stop", "forecast"), f"the loss of {spec.objective} follows no known law: remove this rule"
    if spec.data.validation > 0:
        return
    for key in ("validation_loss", "patience", "forecast"):
        if getattr(spec.budget.stop, key) is not None:
            yield (("budget", "stop", key), "needs held-out documents: write data.validation: 1%, or remove this rule")


def check_forgetting(spec: RunSpec) -> Iterator[Problem]:
    forget, path = spec.guard.forget, ("guard", "forget")
    if forget is None:
        return
    if spec.start_from is None and spec.model.hf is None:
        yield path, "a run from random weights cannot forget: add start_from or model.hf, or remove this"
    if spec.data.validation == 0:
        yield path, "needs held-out documents: write data.validation: 1%, or remove this"
    for name in forget.sources:
        if name not in spec.data.sources:
            yield (*path, "sources"), f"no source {name!r}: sources are {format_names(spec.data.sources)}"


def check_mup(spec: RunSpec) -> Iterator[Problem]:
    if spec.model.init == "mup" and spec.model.hf:
        yield ("model", "init"), "mup would rescale the logits of trained weights: remove init, or hf"


def check_curriculum(spec: RunSpec) -> Iterator[Problem]:
    data = spec.data
    if data.curriculum.by != "none" and data.packing == "pad" and data.padding.buckets > 1:
        yield (
            ("data", "padding", "buckets"),
            "a curriculum already orders the rows: write buckets: 1, or curriculum: {by: none}",
        )


def check_mask_token(spec: RunSpec) -> Iterator[Problem]:
    if spec.data.noise.mask_spans > 0 and not spec.data.noise.mask:
        fix = "write mask: [<mask>] here and special: [<mask>] under tokenizer"
        yield ("data", "noise", "mask_spans"), f"no token replaces a span: {fix}"


def check_archive(spec: RunSpec) -> Iterator[Problem]:
    if spec.checkpoint.archive_model_only and spec.checkpoint.keep_every is None:
        fix = "write for example keep_every: 10000"
        yield ("checkpoint", "archive_model_only"), f"nothing is archived without keep_every: {fix}"


def check_optimizer(spec: RunSpec) -> Iterator[Problem]:
    optimizer = spec.optimizer
    for key in optimizer.unused():
        keys = "arguments, weight_decay" if optimizer.external else ", ".join(SETTINGS[optimizer.name])
        yield ("optimizer", key), f"{optimizer.name} has no {key}: remove it (keys of {optimizer.name}: {keys})"
    if optimizer.veto == "fused" and optimizer.name not in FUSED:
        fix = f"write veto: auto (fused kernels exist for {', '.join(FUSED)})"
        yield ("optimizer", "veto"), f"there is no fused {optimizer.name}: {fix}"
    if optimizer.name == "schedule_free" and optimizer.ema is not None:
        yield ("optimizer", "ema"), "schedule_free has its own average: remove this"
    special = [key for key in ("sam", "lookahead") if getattr(optimizer, key) is not None]
    special += ["name"] if optimizer.name in ("schedule_free", "sophia") else []
    yield from check_sampled_labels(spec)
    usual = ("norm", False, None)
    special += [key for key in ("clipping", "centralize", "noise") if getattr(optimizer, key) not in usual]
    for key in special:
        around = {
            "memory.update: in_backward": spec.memory.update == "in_backward",
            "parallel.engine: deepspeed": spec.parallel.engine == "deepspeed",
            "parallel.pp": spec.parallel.pp > 1 and key != "name",
            "parallel.tp": spec.parallel.tp > 1 and key in ("clipping", "centralize", "noise"),
            "parallel.replicas.divide_optimizer": spec.parallel.replicas.divide_optimizer,
        }
        if other := next((k for k, used in around.items() if used), None):
            yield ("optimizer", key), f"does not work with {other}: remove one of them"
    if optimizer.sam_adaptive and not optimizer.sam:
        yield ("optimizer", "sam_adaptive"), "without sam nothing is moved: write sam: 0.5, or remove this"
    if optimizer.arguments and not optimizer.external:
        yield ("optimizer", "arguments"), f"{optimizer.name} takes its settings as keys: remove this"
    yield from check_parameter_groups(spec)
    if optimizer.name != "muon" and optimizer.muon != MuonSpec():
        yield ("optimizer", "muon"), f"{optimizer.name} has no orthogonal updates: remove this, or write name: muon"
    settings = optimizer.settings()
    if optimizer.name == "sgd" and settings["nesterov"] and not settings["momentum"]:
        yield ("optimizer", "nesterov"), "Nesterov momentum needs momentum above 0: write momentum: 0.9"


def check_rope_scaling(spec: RunSpec) -> Iterator[Problem]:
    """Check that rotary scaling is complete, and that the context fits within it."""
    model, context, path = spec.model, spec.data.context, ("model", "rope")
    rope = model.rope
    if rope is None or (rope.scaling is None and model.hf):
        return  # the folder may define scaling
    if rope.scaling in (None, "none"):
        for key in ("factor", "original"):
            if getattr(rope, key) is not None:
                yield (*path, key), f"has no effect without scaling: write scaling: yarn, or remove {key}"
        return
    if rope.original is None and not model.hf:  # a folder states its training context
        yield path, f"{rope.scaling} needs original: write the context, in tokens, that the model was trained with"
    if rope.scaling not in ("dynamic", "longrope") and (rope.factor or 1.0) == 1.0:
        # Dynamic scaling grows with the length; LongRoPE has a divisor for each frequency.
        yield path, f"{rope.scaling} with factor 1 has no effect: write factor: the new context divided by the old"
    elif rope.original and isinstance(context, int) and rope.scaling in ("linear", "ntk", "yarn"):
        # llama3 is left out: Llama 3.1 is used up to twice its factor.
        reach = int(rope.original * (rope.factor or 1.0))
        if context > reach:
            excess = f"{context} tokens exceed original {rope.original} x factor {rope.factor:g} = {reach}"
            fix = f"write factor: {-(-context // rope.original)} under model.rope, or context: {reach}"
            yield ("data", "context"), f"{excess}: {fix}"


def check_wrapped(spec: RunSpec) -> Iterator[Problem]:
    if not spec.model.wrap:
        return
    if not spec.model.hf:
        yield ("model", "wrap"), "needs a Hugging Face folder: add hf: PATH"
    for key, field in type(spec.model).model_fields.items():
        if key not in ("hf", "wrap") and getattr(spec.model, key) != field.default:
            yield ("model", key), "the folder defines a wrapped model: remove this, or wrap"
    if spec.optimizer.name == "muon":
        yield (
            ("optimizer", "name"),
            "muon needs to know the hidden matrices, which a wrapped model does not state: write adamw",
        )
    if spec.optimizer.layer_decay is not None:
        yield ("optimizer", "layer_decay"), "needs the order of layers, which a wrapped model does not state: remove it"
    if any(spec.dropout.model_dump().values()):
        yield ("dropout",), "a wrapped model trains without dropout: remove this, or wrap"


def check_sampled_labels(spec: RunSpec) -> Iterator[Problem]:
    """Sophia draws labels from the logits of all columns of a row, on one process."""
    if spec.optimizer.name != "sophia":
        return
    others = {
        f"objective: {spec.objective}": spec.objective != "pretrain", "parallel.pp": spec.parallel.pp > 1,
        "parallel.tp": spec.parallel.tp > 1, "parallel.cp": spec.parallel.cp > 1, "model.moe": bool(spec.model.moe),
        "model.wrap": spec.model.wrap,
    }  # fmt: skip
    if other := next((key for key, used in others.items() if used), None):
        yield ("optimizer", "name"), f"sophia draws labels from the logits, not with {other}: write adamw, or muon"


def check_parameter_groups(spec: RunSpec) -> Iterator[Problem]:
    optimizer, at = spec.optimizer, ("optimizer", "groups")
    if optimizer.groups and spec.parallel.engine == "deepspeed":
        yield at, "DeepSpeed's flat partitions have no groups by name: write parallel.engine: torch, or remove this"
    if optimizer.groups and spec.memory.update == "in_backward":
        yield at, "an update in backward knows no groups: write memory.update: after, or remove this"
    for name, group in optimizer.groups.items():
        if group.betas is not None and ("betas" not in SETTINGS.get(optimizer.name, ()) or spec.memory.lean):
            owner = "the low-memory step" if spec.memory.lean else optimizer.name
            yield (*at, name, "betas"), f"{owner} has no betas by group: remove it"
        if None not in (group.train_from, group.train_until) and group.train_from >= group.train_until:  # type: ignore[operator]
            yield (*at, name, "train_until"), f"{group.train_until} is not after train_from: {group.train_from}"
        for key in ("segments", "decay_segments"):
            for i, segment in enumerate(getattr(group, key)):
                if segment.to is not None and not isinstance(segment.length, int):
                    yield (*at, name, key, i, "length"), "a group's segment needs a length in steps: write 500"


def check_recipe(spec: RunSpec) -> Iterator[Problem]:
    for message in recipe_problems(spec):
        yield ("recipe",), message


def check_schedule(spec: RunSpec) -> Iterator[Problem]:
    for key, message in schedule_problems(spec.schedule):
        yield ("schedule", *key), message


def check_sweep(spec: RunSpec) -> Iterator[Problem]:
    if spec.sweep is None:
        return
    for key, message in sweep_problems(spec.sweep):
        yield ("sweep", *key), message
    if spec.sweep.strategy == "asha" and spec.sweep.steps is None and spec.budget.steps is None:
        yield ("sweep", "strategy"), "asha shortens runs by their steps: write sweep.steps or budget.steps"


def check_memory(spec: RunSpec) -> Iterator[Problem]:
    for key, message in memory_problems(spec.optimizer, spec.memory, spec.precision):
        yield ("memory", key), message
    batch, micro, context = spec.budget.batch, spec.budget.micro_batch, spec.data.context
    in_backward = spec.memory.update == "in_backward"
    if in_backward and spec.budget.batch_changes:
        yield ("memory", "update"), "in_backward cannot accumulate gradients: remove budget.batch_changes, or this"
    if in_backward and isinstance(batch, int) and isinstance(micro, int) and isinstance(context, int):
        rows = max(1, round(batch / context))
        if micro < rows:
            yield ("memory", "update"), f"in_backward cannot accumulate gradients: write budget.micro_batch: {rows}"


CHECKS: tuple[tuple[Callable[[RunSpec], Iterator[Problem]], tuple[str, ...]], ...] = (
    (check_length, ("budget.tokens", "budget.steps", "budget.epochs")),
    (check_warmup, ("budget.steps", "schedule.warmup")),
    (check_model_complete, ("model",)),
    (check_heads, ("model",)),
    (check_shape, ("model",)),
    (check_tasks, ("tasks", "data.cross_documents", "data.noise", "data.sources")),
    (check_vocab, ("tokenizer",)),
    (check_folder_vocab, ("tokenizer", "model")),
    (check_conversations, ("data",)),
    (check_context, ("data.context",)),
    (check_batch, ("data.context", "budget.batch", "budget.batch_changes")),
    (check_micro_batch, ("data.context", "budget.batch", "budget.micro_batch")),
    (check_memory, ("memory", "optimizer", "precision", "budget", "data.context")),
    (check_batch_changes, ("budget.batch_changes",)),
    (check_sources, ("data.sources", "data.store")),
    (check_weights, ("data.sources",)),
    (check_phase_sources, ("data.sources", "data.phases")),
    (check_phase_order, ("data.phases",)),
    (check_validation_share, ("data.validation",)),
    (check_stop_rules, ("data.validation", "budget.stop")),
    (check_forgetting, ("guard", "data", "model", "start_from")),
    (check_mup, ("model",)),
    (check_curriculum, ("data.curriculum", "data.padding", "data.packing")),
    (check_mask_token, ("data.noise",)),
    (check_optimizer, ("optimizer", "memory", "parallel")),
    (check_archive, ("checkpoint",)),
    (check_recipe, ("recipe", "model", "objective", "start_from")),
    (check_schedule, ("schedule",)),
    (check_sweep, ("sweep", "budget.steps")),
    (check_rope_scaling, ("model", "data.context")),
    (check_wrapped, ("model", "optimizer", "dropout")),
    *OBJECTIVE_CHECKS,
)


def _touches(read: str, broken: KeyPath) -> bool:
    path: KeyPath = tuple(read.split("."))
    shared = min(len(path), len(broken))
    return path[:shared] == broken[:shared]


def check_spec(spec: RunSpec, broken: Collection[KeyPath] = ()) -> list[Problem]:
    """Every combination that cannot work. Checks that read a `broken` key are skipped."""
    return [
        problem
        for run_check, reads in CHECKS
        if not any(_touches(read, path) for read in reads for path in broken)
        for problem in run_check(spec)
    ]
