"""Checks of the training loop: clearing, accumulation, clipping, loss scaling, schedules, kept graphs."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bessemer.diagnose.review.catalogue import ScriptFault
from bessemer.diagnose.review.edits import SourceEdit
from bessemer.diagnose.review.flow import (
    accumulation,
    ancestry,
    before,
    definitions,
    mentions,
    range_end,
    same_iteration,
    sibling,
    visible,
)
from bessemer.diagnose.review.script import TrainingScript
from bessemer.diagnose.review.trace import Trace, TrainingEvent, last_part, training_loops

READS = ("item", "detach", "float", "tolist", "numpy")


def move_after(script: TrainingScript, node: ast.AST, target: ast.AST) -> tuple[SourceEdit, ...]:
    """Move the statement of a node behind that of another."""
    statement, below = script.statement(node), script.statement(target)
    return (
        script.source.remove(statement, script.alone(statement)),
        script.source.after(below, script.source.body([statement])),
    )


def move_before(script: TrainingScript, node: ast.AST, target: ast.AST) -> tuple[SourceEdit, ...]:
    statement, above = script.statement(node), script.statement(target)
    return (
        script.source.remove(statement, script.alone(statement)),
        script.source.before(above, script.source.body([statement])),
    )


def loss_of(script: TrainingScript, backward: TrainingEvent) -> ast.expr | None:
    """The expression whose gradients a backward pass computes, without the scaler around it."""
    subject = backward.subject
    if script.name(subject) == "scale" and isinstance(subject, ast.Call) and subject.args:
        return subject.args[0]
    return subject


def optimizer_text(step: TrainingEvent) -> str:
    return ast.unparse(step.subject) if step.subject is not None else "optimizer"


def has_closure(step: TrainingEvent) -> bool:
    """optimizer.step(closure) clears and computes gradients itself."""
    return bool(step.node.args) and step.subject is not step.node.args[0]


def clears_by_hand(script: TrainingScript) -> bool:
    """Whether gradients are set to None or zero without an optimizer's or model's zero_grad."""
    for node in script.nodes:
        if isinstance(node, ast.Assign) and any(last_part(target) == "grad" for target in node.targets):
            return True
        if isinstance(node, ast.Call) and script.name(node) in ("zero_", "_foreach_zero_"):
            return True
    return False


def check_clearing(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for step in trace.of("step"):
        if not step.loops or has_closure(step) or script.deepspeed:
            continue
        backwards = trace.inside(step.loops[-1], "backward")
        clears = trace.inside(step.loops[0], "zero_grad")
        others = {optimizer_text(other) for other in trace.of("step")} - {optimizer_text(step)}
        if others:
            clears = [clear for clear in clears if ast.unparse(clear.subject or step.node) not in others]
        statement = script.statement(step.node)
        clear_line = script.source.after(statement, f"{optimizer_text(step)}.zero_grad()")
        if backwards and not clears and not clears_by_hand(script):
            yield ScriptFault(
                "zero-grad-missing", step.node.lineno, f"`{optimizer_text(step)}` steps in a loop that never clears "
                "its gradients", (clear_line,),
            )  # fmt: skip
        if others:
            continue
        for clear in clears:
            lost = [b for b in backwards if b.order < clear.order < step.order]
            removed = script.source.remove(script.statement(clear.node), script.alone(script.statement(clear.node)))
            edits = (removed,) if len(clears) > 1 else (removed, clear_line)
            if any(same_iteration(clear, b) and len(step.loops) == len(clear.loops) for b in lost) and not any(
                b.order > clear.order and b.order < step.order for b in backwards
            ):  # fmt: skip
                yield ScriptFault(
                    "zero-grad-before-step", clear.node.lineno,
                    "the gradients are cleared between backward pass and step", edits,
                )  # fmt: skip
                continue
            for backward in backwards:
                period = accumulation(script, backward, step)
                if period is not None and same_iteration(clear, backward) and not clear.conditions(clear.loops[-1]):
                    yield ScriptFault(
                        "zero-grad-in-accumulation", clear.node.lineno, "gradients are cleared at every micro-batch, "
                        f"but the optimizer steps every `{ast.unparse(period)}`", edits,
                    )  # fmt: skip


def is_divided(script: TrainingScript, loss: ast.expr) -> bool:
    """Whether the loss, or the gradient, is divided or summed in a way that may already be right."""
    for part in ancestry(script, loss):
        for node in ast.walk(part):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                return True
            if isinstance(node, ast.Call):
                name = script.name(node)
                function = script.local_function(node)
                divides = function is not None and any(
                    isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div) for inner in ast.walk(function)
                )
                if name in ("div", "div_", "mul", "mul_") or divides:
                    return True
            if isinstance(node, ast.keyword) and node.arg == "reduction" and "sum" in ast.unparse(node.value):
                return True
    text = ast.unparse(loss)
    for node in script.nodes:
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult):
            if ast.unparse(node.target) == text or "grad" in ast.unparse(node.target):
                return True
        if isinstance(node, ast.Call) and script.name(node) in ("div_", "mul_") and "grad" in ast.unparse(node.func):
            return True
    return False


def check_accumulation(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for backward, steps in training_loops(trace):
        by_engine = script.name(backward.node) == "backward" and backward.subject in backward.node.args
        loss = loss_of(script, backward)
        for step in steps:
            period = accumulation(script, backward, step)
            if period is None or loss is None or by_engine or is_divided(script, loss):
                continue
            text, divisor = script.text(loss), ast.unparse(period)
            edit = script.source.replace(loss, f"{text} / {divisor}" if loss is not backward.subject else
                                         f"({text} / {divisor})")  # fmt: skip
            yield ScriptFault(
                "accumulation-not-divided", backward.node.lineno,
                f"gradients of `{divisor}` micro-batches are summed without dividing `{text}`", (edit,),
            )  # fmt: skip
        if not steps and not trace.of("engine_step") and not by_engine:
            yield from _step_missing(script, backward)
    for backward, _ in training_loops(trace):
        yield from _graph_kept_by_request(script, trace, backward)


def _step_missing(script: TrainingScript, backward: TrainingEvent) -> Iterator[ScriptFault]:
    for node in script.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if "optimizer" not in script.kinds(node.value):
                continue
            uses = [n for n in script.nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
            parents = [script.parents[use] for use in uses]
            if all(isinstance(p, ast.Attribute) and p.attr in ("zero_grad", "param_groups") for p in parents):
                statement = script.statement(backward.node)
                edits = (script.source.after(statement, f"{name}.step()"),) if visible(script, name, statement) else ()
                yield ScriptFault("step-missing", backward.node.lineno, f"`{name}` never steps", edits)


def _graph_kept_by_request(script: TrainingScript, trace: Trace, backward: TrainingEvent) -> Iterator[ScriptFault]:
    word = next((word for word in backward.node.keywords if word.arg == "retain_graph"), None)
    if word is None or not (isinstance(word.value, ast.Constant) and word.value.value is True):
        return
    others = [b for b in trace.inside(backward.loops[-1], "backward") if b.order > backward.order]
    if not others and not calls_grad(script):
        call = backward.node
        arguments = ", ".join([*map(script.text, call.args), *(
            f"{w.arg}={script.text(w.value)}" for w in call.keywords if w is not word)])  # fmt: skip
        edit = script.source.replace(call, f"{script.text(call.func)}({arguments})")
        yield ScriptFault("retain-graph", call.lineno, "the graph is retained after its last backward pass", (edit,))


def calls_grad(script: TrainingScript) -> bool:
    return any("autograd" in script.qualified(call.func) for call in script.calls("grad"))


def check_order(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    """Clipping and stepping on the right side of backward pass and update."""
    for step in trace.of("step", "engine_step"):
        if not step.loops:
            continue
        loop = step.loops[-1]
        backwards = [b for b in trace.inside(loop, "backward")]
        clips = [clip for clip in trace.inside(loop, "clip") if clip.loops[-1] is loop]
        steps = trace.inside(loop, "step", "engine_step")
        direct = [b for b in backwards if b.loops[-1] is loop and not b.conditions(loop)]
        if (
            len(direct) == len(backwards) == len(steps) == 1 and step.order < direct[0].order
            and not step.conditions(loop) and not has_closure(step)
        ):  # fmt: skip
            together = script.block(script.statement(step.node)) is script.block(script.statement(direct[0].node))
            edits = move_after(script, step.node, direct[0].node) if together else ()
            yield ScriptFault("step-before-backward", step.node.lineno, "the optimizer steps before backward", edits)
        for clip in clips:
            if len(clips) == 1 and len(steps) == 1 and len({id(b.node) for b in backwards}) == 1:
                yield from _misplaced_clip(script, clip, backwards[-1], step)


def _misplaced_clip(
    script: TrainingScript, clip: TrainingEvent, backward: TrainingEvent, step: TrainingEvent
) -> Iterator[ScriptFault]:
    block = script.block(script.statement(clip.node))
    if clip.order > step.order > backward.order:
        above = sibling(script, block, step)
        edits = move_before(script, clip.node, above) if above is not None else ()
        yield ScriptFault("clip-after-step", clip.node.lineno, "gradients are clipped after the step", edits)
    elif clip.order < backward.order:
        below = sibling(script, block, backward)
        edits = move_after(script, clip.node, below) if below is not None else ()
        yield ScriptFault("clip-before-backward", clip.node.lineno, "gradients are clipped before backward", edits)


def check_scaler(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for step in trace.of("step"):
        scaled = step.node.args and step.subject is step.node.args[0] and isinstance(step.node.func, ast.Attribute)
        if scaled and isinstance(step.node.func, ast.Attribute):
            scaler = script.text(step.node.func.value)
            if not trace.of("scaler_update"):
                edit = script.source.after(script.statement(step.node), f"{scaler}.update()")
                yield ScriptFault("scaler-update-missing", step.node.lineno, f"`{scaler}` is never updated", (edit,))
            for clip in trace.inside(step.loops[-1], "clip") if step.loops else []:
                unscaled = [u for u in trace.inside(step.loops[-1], "unscale")]
                if clip.order < step.order and not any(u.order < clip.order for u in unscaled):
                    statement = script.statement(clip.node)
                    insert = script.source.before(statement, f"{scaler}.unscale_({optimizer_text(step)})")
                    edits = [insert] + [
                        script.source.remove(script.statement(u.node), script.alone(script.statement(u.node)))
                        for u in unscaled[:1]
                    ]
                    yield ScriptFault(
                        "clip-before-unscale", clip.node.lineno, "scaled gradients are clipped", tuple(edits)
                    )
        else:
            for backward in trace.inside(step.loops[-1], "backward") if step.loops else []:
                if isinstance(backward.subject, ast.Call) and script.name(backward.subject) == "scale":
                    scaler = script.text(backward.subject.func.value)  # type: ignore[attr-defined]
                    text = f"{scaler}.step({optimizer_text(step)})"
                    edits = [script.source.replace(step.node, text)]
                    if not trace.of("scaler_update"):
                        edits.append(script.source.after(script.statement(step.node), f"{scaler}.update()"))
                    yield ScriptFault(
                        "scaler-step-bypassed", step.node.lineno, f"`{scaler}` scales the loss but does not step",
                        tuple(edits),
                    )  # fmt: skip


def check_kept_graph(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    """`total += loss` and `losses.append(loss)` in a training loop."""
    for backward, _ in training_loops(trace):
        loss = loss_of(script, backward)
        if loss is None or not (key := script.key(loss)):
            continue
        text, summed = ast.unparse(loss), {ast.unparse(part) for part in ancestry(script, loss)}
        for node in ast.walk(script.function_of(backward.node) or script.tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
                target, value = ast.unparse(node.target), node.value
            elif isinstance(node, ast.Call) and script.name(node) == "append" and node.args:
                target, value = ast.unparse(node.func), node.args[0]
            else:
                continue
            uses = [part for part in _plain_parts(script, value) if script.key(part) == key]
            looped = any(isinstance(above, ast.For | ast.While) for above in script.ancestors(node))
            if uses and looped and target != text and target.split(".")[0] not in summed:
                edits = tuple(script.source.replace(use, f"{script.text(use)}.detach()") for use in uses)
                yield ScriptFault("loss-keeps-graph", node.lineno, f"`{target}` collects `{text}` with graph", edits)


def _plain_parts(script: TrainingScript, value: ast.expr) -> Iterator[ast.expr]:
    """The tensors in a sum or product that keep their graph."""
    if isinstance(value, ast.BinOp):
        yield from _plain_parts(script, value.left)
        yield from _plain_parts(script, value.right)
    elif isinstance(value, ast.Name | ast.Attribute) and not (
        isinstance(value, ast.Attribute) and value.attr == "data"
    ):
        yield value


def horizon_of(script: TrainingScript, call: ast.Call) -> ast.expr | None:
    """The argument of a schedule that says how long it is."""
    for keyword in ("num_training_steps", "T_max", "total_steps", "total_iters"):
        if (value := script.argument(call, keyword)) is not None:
            return value
    name = script.name(call)
    if name == "CosineAnnealingLR":
        return script.argument(call, "T_max", 1)
    if name in ("get_linear_schedule_with_warmup", "get_cosine_schedule_with_warmup") and len(call.args) > 2:
        return call.args[2]
    return None


def horizon_unit(script: TrainingScript, call: ast.Call) -> tuple[str, ast.expr | None]:
    """`epochs`, `steps` or "" for a schedule, and the expression that says so."""
    horizon = horizon_of(script, call)
    if horizon is None:
        return ("steps", None) if script.argument(call, "steps_per_epoch") is not None else ("", None)
    if isinstance(horizon, ast.Name):
        horizon = before(definitions(script, horizon), call) or horizon
    if any(isinstance(part, ast.Call) and script.name(part) == "len" for part in ast.walk(horizon)):
        return "steps", horizon
    if "epoch" in last_part(horizon).lower() and "step" not in last_part(horizon).lower():
        return "epochs", horizon
    return "", horizon


def schedules(script: TrainingScript) -> dict[str, ast.Call]:
    """The constructor of each scheduler by the last part of its variable's name."""
    made = {}
    for node in script.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and not script.local_function(node.value):
            if "scheduler" in script.kinds(node.value) and last_part(node.targets[0]):
                made[last_part(node.targets[0])] = node.value
    return made


def check_schedule(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    made = schedules(script)
    for advance in trace.of("scheduler_step"):
        if not advance.loops or advance.subject is None or advance.node.args:
            continue
        steps = [step for step in trace.inside(advance.loops[0], "step")]
        if not steps:
            continue
        yield from _schedule_first(script, trace, advance, steps)
        call = made.get(last_part(advance.subject))
        backwards = trace.inside(advance.loops[0], "backward")
        if call is not None and backwards and not any("prepared" in script.kinds(x) for x in (advance.subject,)):
            yield from _schedule_unit(script, advance, steps[0], backwards[0], call)


def _schedule_first(
    script: TrainingScript, trace: Trace, advance: TrainingEvent, steps: list[TrainingEvent]
) -> Iterator[ScriptFault]:
    if any(step.order < advance.order for step in trace.inside(advance.loops[-1], "step")):
        return
    later = [step for step in steps if step.order > advance.order and advance.loops[-1] in step.loops]
    below = sibling(script, script.block(script.statement(advance.node)), later[0]) if later else None
    if below is not None:
        yield ScriptFault(
            "scheduler-before-optimizer", advance.node.lineno, "the schedule advances before the optimizer steps",
            move_after(script, advance.node, below),
        )  # fmt: skip


def _schedule_unit(
    script: TrainingScript, advance: TrainingEvent, step: TrainingEvent, backward: TrainingEvent, call: ast.Call
) -> Iterator[ScriptFault]:
    unit, horizon = horizon_unit(script, call)
    text = ast.unparse(advance.subject) if advance.subject is not None else ""
    per_batch = advance.loops[-1] is backward.loops[-1]
    removed = script.source.remove(script.statement(advance.node), script.alone(script.statement(advance.node)))
    if unit == "epochs" and per_batch and len(backward.loops) > 1:
        outer = backward.loops[-2]
        end = range_end(outer)
        if end is None or horizon is None or last_part(end) != last_part(horizon):
            return
        below = sibling(script, outer.body, backward)
        edits: tuple[SourceEdit, ...] = ()
        if below is not None and visible(script, text, below):
            edits = (removed, script.source.after(below, f"{text}.step()"))
        yield ScriptFault(
            "scheduler-unit", advance.node.lineno,
            f"the schedule is `{ast.unparse(horizon)}` long but advances at every batch", edits,
        )  # fmt: skip
        return
    period = accumulation(script, backward, step)
    if unit == "steps" and len(advance.loops) < len(step.loops) and period is None:
        statement = script.statement(step.node)
        edits = (removed, script.source.after(statement, f"{text}.step()")) if visible(script, text, statement) else ()
        yield ScriptFault(
            "scheduler-unit", advance.node.lineno, "the schedule counts steps but advances once per epoch", edits
        )
    if unit != "steps" or horizon is None or period is None or len(step.loops) != len(backward.loops):
        return
    divided = any(isinstance(p, ast.BinOp) and isinstance(p.op, ast.FloorDiv | ast.Div) for p in ast.walk(horizon))
    conditional = bool(advance.conditions(advance.loops[-1]))
    if conditional and not divided:
        edit = script.source.replace(horizon, f"({script.text(horizon)}) // {ast.unparse(period)}")
        yield ScriptFault(
            "schedule-in-micro-steps", horizon.lineno,
            f"the schedule counts batches but advances once per `{ast.unparse(period)}` of them", (edit,),
        )  # fmt: skip
    elif divided and per_batch and not conditional:
        edits = (removed, script.source.after(script.statement(step.node), f"{text}.step()"))
        yield ScriptFault(
            "scheduler-every-micro-step", advance.node.lineno, "the schedule advances at every micro-batch", edits
        )


def check_detached_loss(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    """`torch.tensor(loss, requires_grad=True)` before the backward pass, and a loss of detached outputs."""
    for backward, _ in training_loops(trace):
        loss = loss_of(script, backward)
        for part in ancestry(script, loss) if loss is not None else ():
            name = script.name(part)
            if not isinstance(part, ast.Call) or not part.args:
                continue
            if name in ("tensor", "Variable", "as_tensor") and script.argument(part, "requires_grad") is not None:
                inner = part.args[0]
                if isinstance(inner, ast.Call) and script.name(inner) == "item":
                    inner = inner.func.value  # type: ignore[attr-defined]
                if mentions(inner, "loss") or isinstance(inner, ast.Name):
                    edit = script.source.replace(part, script.text(inner))
                    yield ScriptFault("loss-detached", part.lineno, "the loss is copied into a new tensor", (edit,))
            elif name == "cross_entropy" or "criterion" in script.kinds(part.func):
                first = part.args[0]
                if isinstance(first, ast.Call) and script.name(first) == "detach":
                    edit = script.source.replace(first, script.text(first.func.value))  # type: ignore[attr-defined]
                    yield ScriptFault(
                        "loss-detached", first.lineno, "the loss is computed of detached outputs", (edit,)
                    )


CHECKS = (
    check_clearing, check_accumulation, check_order, check_scaler, check_kept_graph, check_schedule,
    check_detached_loss,
)  # fmt: skip
