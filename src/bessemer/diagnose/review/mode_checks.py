"""Checks of training and evaluation mode, gradients in evaluation, seeds, and numeric precision."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from bessemer.diagnose.review.catalogue import ScriptFault
from bessemer.diagnose.review.edits import SourceEdit
from bessemer.diagnose.review.flow import definitions, inside_of, visible
from bessemer.diagnose.review.loop_checks import move_before
from bessemer.diagnose.review.script import Function, TrainingScript
from bessemer.diagnose.review.trace import Loop, Trace, TrainingEvent, last_part, training_loops, without_gradients

EVALUATES = re.compile(r"(^|_)(eval\w*|val|valid\w*|test\w*|dev|predict\w*|infer\w*|accuracy|perplexity)(_|$)")
NOT_TRAINED = re.compile(r"ref|teacher|target|ema|old|reward|frozen|critic_target|vgg|clip")


def torch_name(script: TrainingScript) -> str:
    """How the script calls torch; "" if it does not import it."""
    return next((alias for alias, name in script.imports.items() if name == "torch"), "")


def evaluation_place(script: TrainingScript, event: TrainingEvent) -> ast.stmt | None:
    """The loop or statement of an evaluation that an event belongs to, if names or no_grad say that it evaluates."""
    loop = event.loops[-1] if event.loops else None
    function = script.function_of(event.node)
    if loop is not None and not inside_of(script, event.node, loop):
        loop = None  # the loop is that of a caller
    place: ast.stmt = loop if loop is not None else script.statement(event.node)
    if function is not None and EVALUATES.search(function.name.lower()):
        return place
    if drawn_for_evaluation(script, event):
        return script.statement(event.node)
    return place if isinstance(loop, ast.For) and names_evaluation(script, loop.iter) else None


def names_evaluation(script: TrainingScript, data: ast.expr) -> bool:
    """Whether the data of a loop are named for evaluation, or come from a loader of such data."""
    parts = [part for part in ast.walk(data) if isinstance(part, ast.Name | ast.Attribute)]
    for part in list(parts):
        for value in definitions(script, part):
            if script.name(value) == "DataLoader":
                parts += [inner for inner in ast.walk(value) if isinstance(inner, ast.Name | ast.Attribute)]
    return any(EVALUATES.search(last_part(part).lower()) for part in parts)


def drawn_for_evaluation(script: TrainingScript, event: TrainingEvent) -> bool:
    """Whether an event is in a comprehension over data of an evaluation: `sum(loss(x) for x in val)`."""
    drawn = ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp
    nodes = [frame.node for frame in event.frames if isinstance(frame.node, drawn)]
    return any(names_evaluation(script, part.iter) for node in nodes for part in getattr(node, "generators", ()))


def last_mode(trace: Trace, event: TrainingEvent) -> str:
    """`train_mode`, `eval_mode` or "" before an event, of the same variable if its mode is set anywhere above."""
    earlier = [other for other in trace.of("eval_mode", "train_mode") if other.order < event.order]
    name = last_part(event.subject) if event.subject is not None else ""
    same = [other for other in earlier if other.subject is not None and last_part(other.subject) == name]
    return (same or earlier)[-1].kind if same or earlier else ""


def evaluations(script: TrainingScript, trace: Trace) -> Iterator[tuple[TrainingEvent, ast.stmt]]:
    """Forward passes that evaluate, with the statement that holds them."""
    for forward in trace.of("forward"):
        function = script.function_of(forward.node)
        evaluates = drawn_for_evaluation(script, forward) or (
            function is not None and EVALUATES.search(function.name.lower()) is not None
        )
        if forward.loops and trace.inside(forward.loops[-1], "backward") and not evaluates:
            continue
        if function is not None and trace.inside(function, "backward") and not drawn_for_evaluation(script, forward):
            backward = trace.inside(function, "backward")[-1]
            if not forward.loops or forward.loops[-1] in backward.loops:
                continue
        owner = script.class_of(forward.node)
        if owner is not None and script.is_a(owner.name, "LightningModule", "Trainer"):
            continue
        place = evaluation_place(script, forward)
        if place is None and without_gradients(script, forward) and forward.loops and len(trace.of("backward")):
            local = inside_of(script, forward.node, forward.loops[-1])
            place = forward.loops[-1] if local else None
        if place is not None:
            yield forward, place


def check_evaluation(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for forward, place in evaluations(script, trace):
        assert forward.subject is not None
        model, mode = ast.unparse(forward.subject), last_mode(trace, forward)
        pretrained = "pretrained" in script.kinds(forward.subject) and not any(trace.of("train_mode"))
        unentered = not trace.of("backward") and not any(trace.of("eval_mode", "train_mode"))
        callers_decide = unentered and isinstance(
            trace.events[0].frames[:1] and trace.events[0].frames[0].node, Function
        )
        if mode != "eval_mode" and not pretrained and not callers_decide:
            edits: tuple[SourceEdit, ...] = (script.source.before(place, f"{model}.eval()"),)
            yield ScriptFault("eval-mode-missing", forward.node.lineno, f"`{model}` evaluates in training mode", edits)
        named = evaluation_place(script, forward) is not None
        if named and not without_gradients(script, forward) and not without_gradients_anywhere(script, trace):
            torch = torch_name(script)
            with_header = f"with {torch}.no_grad():"
            edits = (script.source.wrap([place], with_header),) if torch else ()
            yield ScriptFault("no-grad-missing", forward.node.lineno, f"`{model}` evaluates with gradients", edits)


def without_gradients_anywhere(script: TrainingScript, trace: Trace) -> bool:
    """set_grad_enabled as a statement changes everything below; it is not followed."""
    return any(isinstance(script.parents[call], ast.Expr) for call in script.calls("set_grad_enabled"))


def check_training_mode(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for backward, _ in training_loops(trace):
        outer, inner = backward.loops[0], backward.loops[-1]
        forwards = [f for f in trace.inside(inner, "forward") if f.order < backward.order]
        forwards = [f for f in forwards if f.subject is not None and not NOT_TRAINED.search(last_part(f.subject))
                    and not without_gradients(script, f)]  # fmt: skip
        names = {last_part(f.subject) for f in forwards if f.subject is not None}
        evals = [
            event for event in trace.inside(outer, "eval_mode")
            if event.subject is not None and last_part(event.subject) in names | {"model", "net"}
        ]  # fmt: skip
        if forwards and evals and not trace.inside(outer, "train_mode"):
            yield ScriptFault(
                "train-mode-not-restored", evals[0].node.lineno, "the loop evaluates but never calls train() again",
                _restore(script, backward, forwards[-1], outer, inner),
            )  # fmt: skip
        elif forwards and not any(trace.of("train_mode")) and not script_trains(script):
            subject = forwards[-1].subject
            if "pretrained" in script.kinds(subject) and not evals:
                edits = _insert_train(script, forwards[-1], backward.loops[0], first=False)
                yield ScriptFault(
                    "train-mode-missing", backward.node.lineno, "a pretrained model trains in evaluation mode", edits
                )


def script_trains(script: TrainingScript) -> bool:
    return any(True for _ in script.calls("train")) or any(
        True for _ in script.calls("prepare_model_for_kbit_training")
    )


def _restore(
    script: TrainingScript, backward: TrainingEvent, forward: TrainingEvent, outer: Loop, inner: Loop
) -> tuple[SourceEdit, ...]:
    return _insert_train(script, forward, inner if inner is not outer else outer.body[0], first=inner is outer)


def _insert_train(
    script: TrainingScript, forward: TrainingEvent, place: ast.stmt, first: bool
) -> tuple[SourceEdit, ...]:
    assert forward.subject is not None
    text = ast.unparse(forward.subject)
    place = place if visible(script, text, place) or first else script.statement(forward.node)
    return (script.source.before(place, f"{text}.train()"),) if visible(script, text, place) else ()


def check_generate(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    if not trace.of("backward"):
        return
    for event in trace.of("generate"):
        assert event.subject is not None
        mode = last_mode(trace, event)
        pretrained = "pretrained" in script.kinds(event.subject) and mode == ""
        if mode == "eval_mode" or pretrained:
            continue
        statement, model = script.statement(event.node), ast.unparse(event.subject)
        edits = [script.source.before(statement, f"{model}.eval()")]
        if event.loops and trace.inside(event.loops[0], "backward"):
            edits.append(script.source.after(statement, f"{model}.train()"))
        yield ScriptFault(
            "generate-in-train-mode", event.node.lineno, f"`{model}` generates with dropout", tuple(edits)
        )


def check_seeds(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for backward, _ in training_loops(trace):
        for call in script.calls(
            "manual_seed", "manual_seed_all", "seed_everything", "set_seed", inside=backward.loops[0]
        ):
            constant = call.args and (isinstance(call.args[0], ast.Constant) or not definitions_inside(
                script, call.args[0], backward.loops[0]))  # fmt: skip
            owner = ast.unparse(call.func)
            if constant and ("torch" in script.qualified(call.func) or "." not in owner):
                edits = move_before(script, call, backward.loops[0])
                yield ScriptFault("seed-in-loop", call.lineno, "the seed is set again in the training loop", edits)


def definitions_inside(script: TrainingScript, node: ast.expr, loop: Loop) -> bool:
    """Whether an expression uses a variable that the loop changes."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return any(
        isinstance(part, ast.Name) and part.id in names and isinstance(part.ctx, ast.Store) for part in ast.walk(loop)
    )


def autocast_dtypes(script: TrainingScript) -> set[str]:
    """The types that autocast computes in: bfloat16, float16, or ? where it cannot be known."""
    dtypes = set()
    for call in script.calls("autocast"):
        value = script.argument(call, "dtype", 1 if "cuda.amp" not in script.qualified(call.func) else None)
        values = [value] if value is not None else []
        if isinstance(value, ast.Name):
            values = definitions(script, value) or [value]
        for each in values:
            last = last_part(each)
            dtypes.add(last if last in ("bfloat16", "float16", "half") else "?")
        if value is None:
            device = ast.unparse(call.args[0]) if call.args else ast.unparse(
                script.argument(call, "device_type") or ast.Constant("?"))  # fmt: skip
            cuda = "cuda.amp" in script.qualified(call.func) or device in ("'cuda'", '"cuda"')
            dtypes.add("float16 by default" if cuda else "?")
    return dtypes


def check_precision(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    dtypes = autocast_dtypes(script)
    scalers = list(script.calls("GradScaler"))
    if dtypes == {"bfloat16"} and trace.of("backward"):
        for call in scalers:
            if script.argument(call, "enabled") is None:
                end = script.source.span(call)[1]
                separator = ", " if call.args or call.keywords else ""
                edit = SourceEdit(end - 1, end - 1, f"{separator}enabled=False")
                yield ScriptFault("scaler-with-bf16", call.lineno, "GradScaler is used with bfloat16", (edit,))
    own_loop = any(script.name(b.subject) != "scale" and b.subject not in b.node.args for b in trace.of("backward"))
    if not scalers and own_loop and dtypes and dtypes <= {"float16", "half", "float16 by default"}:
        for call in script.calls("autocast"):
            value = script.argument(call, "dtype", 1 if "cuda.amp" not in script.qualified(call.func) else None)
            torch = torch_name(script)
            if value is not None:
                edits = (script.source.replace(value, f"{torch}.bfloat16"),)
            else:
                end = script.source.span(call)[1] - 1
                edits = (SourceEdit(end, end, f"{', ' if call.args or call.keywords else ''}dtype={torch}.bfloat16"),)
            yield ScriptFault("fp16-without-scaler", call.lineno, "fp16 autocast without loss scaling", edits)
    for call in script.calls("GradScaler", "autocast"):
        dotted = script.qualified(call.func)
        if dotted.startswith("torch.cuda.amp."):
            name = dotted.rpartition(".")[2]
            text = script.text(call)
            inner = text[text.index("(") + 1 :]
            replacement = f'torch.amp.{name}("cuda"{"" if inner == ")" else ", "}{inner}'
            renamed = (script.source.replace(call, replacement),) if torch_name(script) == "torch" else ()
            yield ScriptFault("cuda-amp-deprecated", call.lineno, f"torch.cuda.amp.{name} is deprecated", renamed)


CHECKS = (check_evaluation, check_training_mode, check_generate, check_seeds, check_precision)
