"""Combinations that cannot work, one named check each. A check yields (key, message with the fix)."""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.spec.schema import RunSpec

Problem = tuple[str, str]


def one_length(spec: RunSpec) -> Iterator[Problem]:
    given = [key for key in ("steps", "epochs") if getattr(spec.budget, key) is not None]
    if spec.budget.tokens != "auto":
        given.insert(0, "tokens")
    for extra in given[1:]:
        yield f"budget.{extra}", f"the run's length is given twice, by {given[0]} and {extra}: keep one of them"


def model_is_complete(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if model.preset is None:
        missing = [key for key in ("width", "layers", "heads") if getattr(model, key) is None]
        if missing:
            yield "model", f"{' and '.join(missing)} missing: write them, or a preset such as `model: 10M`"


def heads_divide(spec: RunSpec) -> Iterator[Problem]:
    from bessemer.spec.resolve import model_shape

    model = spec.model
    if model.preset is None and (model.width is None or model.layers is None or model.heads is None):
        return
    shape = model_shape(model, vocab=1)
    if model.head_dim is None and shape.width % shape.heads:
        fits = [n for n in range(1, shape.heads + 1) if shape.width % n == 0]
        yield "model.heads", f"width {shape.width} cannot be cut into {shape.heads} heads: write heads: {fits[-1]}, or give head_dim"
    elif shape.head_dim % 2:
        yield "model.head_dim", f"head_dim {shape.head_dim} is odd, rotary positions need pairs: write {shape.head_dim + 1}"
    if shape.heads % shape.kv_heads:
        fits = [n for n in range(1, min(shape.kv_heads, shape.heads) + 1) if shape.heads % n == 0]
        yield "model.kv_heads", f"{shape.kv_heads} does not divide heads ({shape.heads}): write kv_heads: {fits[-1]}"


def tokenizer_once(spec: RunSpec) -> Iterator[Problem]:
    tokenizer = spec.tokenizer
    if tokenizer.path is not None and tokenizer.vocab != "auto":
        yield "tokenizer.vocab", "a loaded tokenizer has its own size: remove vocab, or remove path to train one"
    if isinstance(tokenizer.vocab, int) and tokenizer.vocab < 257:
        yield "tokenizer.vocab", f"{tokenizer.vocab} is too small: 256 bytes and the end-of-document token need at least 257"


def batch_holds_sequences(spec: RunSpec) -> Iterator[Problem]:
    budget, context = spec.budget, spec.data.context
    if context != "auto" and context < 2:
        yield "data.context", f"{context} is too short: write at least 2 tokens, such as 2048"
        return
    sizes = [("budget.batch", budget.batch)]
    sizes += [(f"budget.batch_changes.{i}.batch", change.batch) for i, change in enumerate(budget.batch_changes)]
    for key, batch in sizes:
        if batch != "auto" and context != "auto" and batch < context:
            yield key, f"{batch} tokens do not hold one sequence of {context}: write at least {context}, or lower data.context"
    if "auto" not in (budget.batch, budget.micro_batch, context):
        rows = max(1, round(budget.batch / context))  # type: ignore[operator]
        if budget.micro_batch > rows:  # type: ignore[operator]
            yield "budget.micro_batch", f"{budget.micro_batch} sequences exceed the batch of {rows}: write {rows} or less"
    starts = [change.from_step for change in budget.batch_changes]
    if starts != sorted(set(starts)):
        yield "budget.batch_changes", "from_step must rise from one change to the next"


def phases_name_sources(spec: RunSpec) -> Iterator[Problem]:
    for i, phase in enumerate(spec.data.phases):
        key = f"data.phases.{i}"
        for name, weight in phase.weights.items():
            if name not in spec.data.sources:
                yield f"{key}.weights.{name}", f"no source {name!r}; there are {', '.join(spec.data.sources)}"
            elif weight < 0:
                yield f"{key}.weights.{name}", f"weight {weight} is negative: write 0 or more"
        if not any(weight > 0 for weight in phase.weights.values()):
            yield f"{key}.weights", "at least one source needs a weight above 0"
        before = spec.data.phases[i - 1].start if i else 0
        if phase.start <= before:
            yield f"{key}.start", f"{phase.start} must lie after {before}, where the phase before it starts"
    if not any(source.weight > 0 for source in spec.data.sources.values()):
        yield "data.sources", "at least one source needs a weight above 0"


def validation_is_there(spec: RunSpec) -> Iterator[Problem]:
    if spec.data.validation > 0.5:
        yield "data.validation", f"{spec.data.validation:.0%} held out leaves too little to train on: write 1%"
    if spec.data.validation > 0:
        return
    stop = spec.budget.stop
    for key in ("validation_loss", "patience"):
        if getattr(stop, key) is not None:
            yield f"budget.stop.{key}", "needs held-out documents: write data.validation: 1%, or remove this rule"


def one_device(spec: RunSpec) -> Iterator[Problem]:
    for key in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"):
        degree = getattr(spec.parallel, key)
        if degree > 1:
            yield f"parallel.{key}", f"{degree} devices were asked for and this version trains on one: write {key}: 1"


CHECKS = (
    one_length, model_is_complete, heads_divide, tokenizer_once, batch_holds_sequences,
    phases_name_sources, validation_is_there, one_device,
)


def check(spec: RunSpec) -> list[Problem]:
    """Every combination in the spec that cannot work."""
    return [problem for named in CHECKS for problem in named(spec)]
