"""Combinations that cannot work, one named check each. A check yields (path, message with the fix).

Each check is listed with the keys it reads: where one of them is itself wrong, the check has nothing to go by and is
left out, so that one mistake is told once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from bessemer.spec.curate.step import StepSpec
from bessemer.spec.document import Path
from bessemer.spec.model import ModelSpec, model_shape
from bessemer.spec.optimizer import FUSED, SETTINGS, memory_problems
from bessemer.spec.quantity import listed
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import preset

Problem = tuple[Path, str]
SMALLEST_VOCABS = {"bpe": 257, "char": 257, "wordpiece": 258, "unigram": 279}


def one_length(spec: RunSpec) -> Iterator[Problem]:
    given = [key for key in ("steps", "epochs") if getattr(spec.budget, key) is not None]
    if spec.budget.tokens != "auto":
        given.insert(0, "tokens")
    for extra in given[1:]:
        yield (("budget", extra), f"the run's length is given twice, by {given[0]} and {extra}: keep one of them")


def model_is_complete(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    missing = [key for key in ("width", "layers", "heads") if getattr(model, key) is None]
    if model.preset is None and model.hf is None and missing:
        yield ("model",), f"{' and '.join(missing)} missing: write them, or a preset such as `model: 10M`"


def heads_divide(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if model.hf or (model.preset is None and None in (model.width, model.layers, model.heads)):
        return  # a folder's own shape is checked when it is opened
    if model.mla or (model.moe and None in (model.moe.experts, model.moe.top_k)):
        return
    shape = model_shape(model, vocab=1)
    if model.head_dim is None and shape.width % shape.heads:
        fits = [n for n in range(1, shape.heads) if shape.width % n == 0 and shape.width // n % 2 == 0]
        fix = f"write heads: {fits[-1]}, or give head_dim" if fits else "give head_dim, such as head_dim: 64"
        yield ("model", "heads"), f"width {shape.width} cannot be cut into {shape.heads} heads: {fix}"
        return
    if shape.head_dim % 2 and shape.positions == "rope":
        why = f"head_dim {shape.head_dim} is odd, rotary positions need pairs"
        yield ("model", "head_dim"), f"{why}: write head_dim: {shape.head_dim + 1}"
    if shape.heads % shape.kv_heads:
        fits = [n for n in range(1, min(shape.kv_heads, shape.heads) + 1) if shape.heads % n == 0]
        yield (
            ("model", "kv_heads"),
            f"{shape.kv_heads} does not divide heads ({shape.heads}): write kv_heads: {fits[-1]}",
        )


def tasks_fit(spec: RunSpec) -> Iterator[Problem]:
    """What rewrites rows needs documents kept apart, and overwrites noise."""
    kinds = [task.kind for task in spec.tasks]
    apart = [kind for kind in kinds if kind not in ("causal", "infill")]
    if apart and spec.data.cross_documents:
        yield ("data", "cross_documents"), f"{apart[0]} hides what it asks for inside a document: write false"
    rewritten = [kind for kind in kinds if kind in ("masked", "denoise", "infill")]
    if rewritten and spec.data.noise != type(spec.data.noise)():
        yield ("data", "noise"), f"{rewritten[0]} writes the inputs anew: remove noise, or the task"
    for i, task in enumerate(spec.tasks):
        for name in task.sources:
            if name not in spec.data.sources:
                known = listed(spec.data.sources)
                yield ("tasks", i, "sources"), f"there is no source {name!r}; there are {known}"


def shape_holds_together(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if model.mixers and "mamba" in model.mixers:
        if model.mamba is None and model.hf is None:
            yield ("model", "mamba"), "mixers has mamba layers: describe them, such as mamba: {heads: 24}"
        if model.causal is False:
            yield ("model", "causal"), "a state space only looks back: remove causal: false, or the mamba layers"
    if model.mamba and model.mamba.heads % model.mamba.groups:
        yield ("model", "mamba", "groups"), f"{model.mamba.groups} does not divide its heads ({model.mamba.heads})"
    if model.ffn == 0 and (model.norm_place == "post" or model.parallel not in (None, "none")):
        yield ("model", "ffn"), "a block without a feed-forward part cannot be post-norm or parallel: give ffn"
    if model.moe and model.hf is None and None in (model.moe.experts, model.moe.top_k):
        yield ("model", "moe"), "experts and top_k are both needed: write for example {experts: 8, top_k: 2}"
    if model.mla and model.mla.rope_dim % 2:
        yield (("model", "mla", "rope_dim"), f"{model.mla.rope_dim} is odd: rotary positions need pairs")
    yield from experts_hold_together(model)


def experts_hold_together(model: ModelSpec) -> Iterator[Problem]:
    moe = model.moe
    if moe is None:
        return
    if moe.experts and moe.top_k and moe.top_k > moe.experts:
        yield ("model", "moe", "top_k"), f"{moe.top_k} is more than the {moe.experts} experts"
    if moe.experts and moe.groups and moe.experts % moe.groups:
        yield ("model", "moe", "groups"), f"{moe.groups} groups do not divide the {moe.experts} experts evenly"
    if moe.groups and moe.top_groups and moe.top_groups > moe.groups:
        yield ("model", "moe", "top_groups"), f"{moe.top_groups} is more than the {moe.groups} groups"
    layers = model.layers or (shape.layers if model.preset and (shape := preset(model.preset)) else None)
    if layers and (beyond := [layer for layer in moe.dense_layers or () if layer >= layers]):
        yield ("model", "moe", "dense_layers"), f"there is no layer {beyond[0]}: write numbers from 0 to {layers - 1}"


def tokenizer_once(spec: RunSpec) -> Iterator[Problem]:
    vocab = spec.tokenizer.vocab
    if vocab == "auto":
        return
    if spec.tokenizer.path is not None:
        yield (("tokenizer", "vocab"), "a loaded tokenizer has its own size: remove vocab, or remove path to train one")
    else:
        least = SMALLEST_VOCABS[spec.tokenizer.kind] + len(spec.tokenizer.special)
        if vocab < least:
            need = f"the bytes and special tokens of {spec.tokenizer.kind} need at least {least}"
            yield ("tokenizer", "vocab"), f"{vocab} is too small: {need}; write vocab: auto or 8K"


def conversations_stay_whole(spec: RunSpec) -> Iterator[Problem]:
    """What a step that compares documents cuts out of a joined text cannot be given back to the turns."""
    chats = [name for name, source in spec.data.sources.items() if source.messages_field]
    lists: list[tuple[Path, list[StepSpec]]] = [
        (("data", "sources", name, "clean"), spec.data.sources[name].clean) for name in chats
    ]
    if chats:
        lists.append((("data", "clean"), spec.data.clean))
    for path, steps in lists:
        for i, step in enumerate(steps):
            cuts = step.step in ("dedup_paragraphs", "dedup_substrings") or getattr(step, "action", "") == "cut"
            if cuts:
                fix = f"name it in the clean of the other sources (conversations: {listed(chats)})"
                yield (*path, i), f"{step.step} cuts text, which a conversation cannot lose: {fix}"


def context_is_a_sequence(spec: RunSpec) -> Iterator[Problem]:
    context = spec.data.context
    if context != "auto" and context < 2:
        yield ("data", "context"), f"{context} is too short: write at least 2 tokens, such as 2048"


def batch_holds_sequences(spec: RunSpec) -> Iterator[Problem]:
    budget, context = spec.budget, spec.data.context
    if context == "auto":
        return
    sizes: list[tuple[Path, int]] = []
    if budget.batch != "auto":
        sizes.append((("budget", "batch"), budget.batch))
    sizes += [(("budget", "batch_changes", i, "batch"), change.batch) for i, change in enumerate(budget.batch_changes)]
    for path, batch in sizes:
        if batch < context:
            fix = f"write at least {context}, or lower data.context"
            yield path, f"{batch} tokens do not hold one sequence of {context}: {fix}"


def micro_batch_fits(spec: RunSpec) -> Iterator[Problem]:
    batch, micro, context = spec.budget.batch, spec.budget.micro_batch, spec.data.context
    if batch == "auto" or micro == "auto" or context == "auto":
        return
    rows = max(1, round(batch / context))
    if micro > rows:
        fix = f"write {rows} or less, or a larger budget.batch"
        yield (
            ("budget", "micro_batch"),
            f"{micro} sequences exceed the batch, which holds {rows} of {context} tokens: {fix}",
        )


def batch_changes_rise(spec: RunSpec) -> Iterator[Problem]:
    changes = spec.budget.batch_changes
    for i, change in enumerate(changes[1:], 1):
        before = changes[i - 1].from_step
        if change.from_step <= before:
            yield (
                ("budget", "batch_changes", i, "from_step"),
                f"{change.from_step} must lie after {before}, where the change before it begins",
            )


def sources_have_names_and_files(spec: RunSpec) -> Iterator[Problem]:
    for name, source in spec.data.sources.items():
        if not re.fullmatch(r"\w[\w.-]{0,99}", name):
            fix = "use letters, digits, '.', '_' and '-', 100 at most, beginning with a letter or digit"
            yield ("data", "sources", name), f"not a source's name: {fix}"
        if spec.data.store is None and not any(path.strip() for path in source.path):
            yield ("data", "sources", name, "path"), "names no file: write a file, a folder or a glob"


def a_source_has_weight(spec: RunSpec) -> Iterator[Problem]:
    if not any(source.weight > 0 for source in spec.data.sources.values()):
        yield ("data", "sources"), "at least one source needs a weight above 0"


def phases_name_sources(spec: RunSpec) -> Iterator[Problem]:
    for i, phase in enumerate(spec.data.phases):
        path: Path = ("data", "phases", i, "weights")
        wrong = False
        for name in phase.weights:
            if name not in spec.data.sources:
                wrong = True
                yield (*path, name), f"no source {name!r}: there are {listed(spec.data.sources)}"
        if not wrong and not any(weight > 0 for weight in phase.weights.values()):
            yield path, "at least one source needs a weight above 0"


def phases_rise(spec: RunSpec) -> Iterator[Problem]:
    for i, (before, phase) in enumerate(zip(spec.data.phases, spec.data.phases[1:], strict=False), 1):
        if phase.start <= before.start:
            yield (
                ("data", "phases", i, "start"),
                f"{phase.start:,} must lie after {before.start:,}, where the phase before it starts",
            )


def most_is_trained_on(spec: RunSpec) -> Iterator[Problem]:
    if spec.data.validation > 0.5:
        held_out = f"{spec.data.validation:.3g} of the documents held out"
        yield ("data", "validation"), f"{held_out} leaves too little to train on: write validation: 1%"


def stop_rules_can_be_judged(spec: RunSpec) -> Iterator[Problem]:
    if spec.data.validation > 0:
        return
    for key in ("validation_loss", "patience"):
        if getattr(spec.budget.stop, key) is not None:
            yield (("budget", "stop", key), "needs held-out documents: write data.validation: 1%, or remove this rule")


def forgetting_can_be_judged(spec: RunSpec) -> Iterator[Problem]:
    forget, path = spec.guard.forget, ("guard", "forget")
    if forget is None:
        return
    if spec.start_from is None and spec.model.hf is None:
        yield path, "a run from random weights has nothing to forget: add start_from or model.hf, or remove this"
    if spec.data.validation == 0:
        yield path, "needs held-out documents: write data.validation: 1%, or remove this"
    for name in forget.sources:
        if name not in spec.data.sources:
            yield (*path, "sources"), f"no source {name!r}: there are {listed(spec.data.sources)}"


def mup_is_from_the_start(spec: RunSpec) -> Iterator[Problem]:
    if spec.model.init == "mup" and spec.model.hf:
        yield ("model", "init"), "mup scales the logits of weights that were trained without it: remove init, or hf"


def one_ranking(spec: RunSpec) -> Iterator[Problem]:
    data = spec.data
    if data.curriculum.by != "none" and data.packing == "pad" and data.padding.buckets > 1:
        yield (("data", "padding", "buckets"), "a curriculum has an order of its own: write buckets: 1, or by: none")


def masked_spans_have_a_token(spec: RunSpec) -> Iterator[Problem]:
    if spec.data.noise.mask_spans > 0 and not spec.data.noise.mask:
        fix = "write mask: [<mask>] here and special: [<mask>] under tokenizer"
        yield ("data", "noise", "mask_spans"), f"no token to put in place of a span: {fix}"


def archive_of_something(spec: RunSpec) -> Iterator[Problem]:
    if spec.checkpoint.archive_model_only and spec.checkpoint.keep_every is None:
        fix = "say of which checkpoints, such as keep_every: 10000"
        yield ("checkpoint", "archive_model_only"), f"nothing is archived without keep_every: {fix}"


def optimizer_has_these(spec: RunSpec) -> Iterator[Problem]:
    optimizer = spec.optimizer
    for key in optimizer.unused():
        takes = ", ".join(SETTINGS[optimizer.name])
        yield ("optimizer", key), f"{optimizer.name} has no {key}: remove it ({optimizer.name} takes {takes})"
    if optimizer.veto == "fused" and optimizer.name not in FUSED:
        fix = f"write veto: auto (such kernels exist for {', '.join(FUSED)})"
        yield ("optimizer", "veto"), f"torch has no fused {optimizer.name}: {fix}"
    settings = optimizer.settings()
    if optimizer.name == "sgd" and settings["nesterov"] and not settings["momentum"]:
        yield ("optimizer", "nesterov"), "Nesterov's momentum needs momentum above 0: write momentum: 0.9"


def rope_stretch_is_told(spec: RunSpec) -> Iterator[Problem]:
    """How far positions are stretched, from where, and whether the context fits in that."""
    model, context, path = spec.model, spec.data.context, ("model", "rope")
    rope = model.rope
    if rope is None or (rope.scaling is None and model.hf):
        return  # a folder may have a stretch of its own
    if rope.scaling in (None, "none"):
        for key in ("factor", "original"):
            if getattr(rope, key) is not None:
                yield (*path, key), f"means nothing without scaling: write scaling: yarn, or remove {key}"
        return
    if rope.original is None and not model.hf:  # a folder says what it was trained with
        yield path, f"{rope.scaling} needs original: the context, in tokens, that the model was trained with"
    if rope.scaling not in ("dynamic", "longrope") and (rope.factor or 1.0) == 1.0:
        # Dynamic scaling grows with the text, LongRoPE has a divisor for each frequency.
        yield path, f"{rope.scaling} by factor 1 changes nothing: write factor: the new context over the old"
    elif rope.original and isinstance(context, int) and rope.scaling in ("linear", "ntk", "yarn"):
        # Llama 3.1 goes to twice its factor.
        reach = int(rope.original * (rope.factor or 1.0))
        if context > reach:
            told = f"{context} tokens exceed original {rope.original} times factor {rope.factor:g}, which is {reach}"
            fix = f"write factor: {-(-context // rope.original)} under model.rope, or context: {reach}"
            yield ("data", "context"), f"{told}: {fix}"


def wrapped_is_as_it_is(spec: RunSpec) -> Iterator[Problem]:
    if not spec.model.wrap:
        return
    if not spec.model.hf:
        yield ("model", "wrap"), "wraps a Hugging Face folder: write hf: PATH beside it"
    for key, field in type(spec.model).model_fields.items():
        if key not in ("hf", "wrap") and getattr(spec.model, key) != field.default:
            yield ("model", key), "a wrapped model is what its folder says: remove this, or wrap"
    if spec.optimizer.name == "muon":
        yield ("optimizer", "name"), "muon has to know which matrices are hidden, which a wrapped model does not tell"
    if spec.optimizer.layer_decay is not None:
        yield ("optimizer", "layer_decay"), "needs the order of the layers, which a wrapped model does not tell"
    if any(spec.dropout.model_dump().values()):
        yield ("dropout",), "a wrapped model trains without dropout: remove this, or wrap"


def memory_fits(spec: RunSpec) -> Iterator[Problem]:
    for key, why in memory_problems(spec.optimizer, spec.memory, spec.precision):
        yield ("memory", key), why
    batch, micro, context = spec.budget.batch, spec.budget.micro_batch, spec.data.context
    whole = spec.memory.update == "in_backward"
    if whole and spec.budget.batch_changes:
        yield ("memory", "update"), "in_backward cannot add up micro-batches: remove budget.batch_changes, or this"
    if whole and isinstance(batch, int) and isinstance(micro, int) and isinstance(context, int):
        rows = max(1, round(batch / context))
        if micro < rows:
            yield ("memory", "update"), f"in_backward cannot add up micro-batches: write budget.micro_batch: {rows}"


CHECKS: tuple[tuple[Callable[[RunSpec], Iterator[Problem]], tuple[str, ...]], ...] = (
    (one_length, ("budget.tokens", "budget.steps", "budget.epochs")),
    (model_is_complete, ("model",)),
    (heads_divide, ("model",)),
    (shape_holds_together, ("model",)),
    (tasks_fit, ("tasks", "data.cross_documents", "data.noise", "data.sources")),
    (tokenizer_once, ("tokenizer",)),
    (conversations_stay_whole, ("data",)),
    (context_is_a_sequence, ("data.context",)),
    (batch_holds_sequences, ("data.context", "budget.batch", "budget.batch_changes")),
    (micro_batch_fits, ("data.context", "budget.batch", "budget.micro_batch")),
    (memory_fits, ("memory", "optimizer", "precision", "budget", "data.context")),
    (batch_changes_rise, ("budget.batch_changes",)),
    (sources_have_names_and_files, ("data.sources", "data.store")),
    (a_source_has_weight, ("data.sources",)),
    (phases_name_sources, ("data.sources", "data.phases")),
    (phases_rise, ("data.phases",)),
    (most_is_trained_on, ("data.validation",)),
    (stop_rules_can_be_judged, ("data.validation", "budget.stop")),
    (forgetting_can_be_judged, ("guard", "data", "model", "start_from")),
    (mup_is_from_the_start, ("model",)),
    (one_ranking, ("data.curriculum", "data.padding", "data.packing")),
    (masked_spans_have_a_token, ("data.noise",)),
    (optimizer_has_these, ("optimizer",)),
    (archive_of_something, ("checkpoint",)),
    (rope_stretch_is_told, ("model", "data.context")),
    (wrapped_is_as_it_is, ("model", "optimizer", "dropout")),
)


def _touches(read: str, broken: Path) -> bool:
    path: Path = tuple(read.split("."))
    shared = min(len(path), len(broken))
    return path[:shared] == broken[:shared]


def check(spec: RunSpec, broken: Collection[Path] = ()) -> list[Problem]:
    """Every combination in the spec that cannot work, judged only by keys that are not `broken` themselves."""
    return [
        problem
        for named, reads in CHECKS
        if not any(_touches(read, path) for read in reads for path in broken)
        for problem in named(spec)
    ]
