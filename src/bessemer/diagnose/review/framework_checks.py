"""Checks of scripts that use Accelerate, Lightning, DeepSpeed or the Hugging Face Trainer."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bessemer.diagnose.review.catalogue import ScriptFault
from bessemer.diagnose.review.edits import SourceEdit
from bessemer.diagnose.review.flow import ancestry, modulo_period, visible
from bessemer.diagnose.review.loop_checks import loss_of
from bessemer.diagnose.review.script import Function, TrainingScript
from bessemer.diagnose.review.trace import Trace, TrainingEvent, last_part, training_loops


def by_kind(script: TrainingScript, kind: str) -> list[str]:
    """The texts of the variables of a kind, where they are assigned."""
    names = []
    for node in script.nodes:
        if isinstance(node, ast.Assign):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            names += [ast.unparse(target) for target in targets if kind in script.kinds(target)]
    return names


def scope_name(script: TrainingScript, names: list[str], place: ast.AST) -> str:
    """The first of some variables that has a value at a place; "" if none has."""
    return next((name for name in names if visible(script, name, script.statement(place))), "")


def check_accelerate(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    accelerators = by_kind(script, "accelerator")
    if not accelerators:
        return
    contexts = list(script.calls("accumulate"))
    for backward in trace.of("backward"):
        loss = loss_of(script, backward)
        name = scope_name(script, [*accelerators, "accelerator"], backward.node)
        if loss is not None and backward.subject not in backward.node.args:
            forwards = [event for event in trace.of("forward") if event.order < backward.order]
            if forwards and "prepared" not in script.kinds(forwards[-1].subject):
                continue  # a model that Accelerate does not know
            edits = (script.source.replace(backward.node, f"{name}.backward({script.text(loss)})"),) if name else ()
            yield ScriptFault("accelerate-backward", backward.node.lineno, "backward() bypasses Accelerate", edits)
        elif loss is not None and contexts:
            yield from divided_twice(script, loss, backward)
    for call in script.calls("Accelerator"):
        steps = script.argument(call, "gradient_accumulation_steps")
        several = steps is not None and not (isinstance(steps, ast.Constant) and steps.value == 1)
        if several and not contexts:
            yield from _context_missing(script, trace)
    for clip in trace.of("clip"):
        receiver = clip.node.func.value if isinstance(clip.node.func, ast.Attribute) else None
        name = scope_name(script, [*accelerators, "accelerator"], clip.node)
        if "accelerator" not in script.kinds(receiver):
            edits = (script.source.replace(clip.node.func, f"{name}.{script.name(clip.node)}"),) if name else ()
            yield ScriptFault("accelerate-torch-clip", clip.node.lineno, "torch clips what Accelerate scales", edits)
        elif contexts and not any(
            "sync_gradients" in ast.unparse(frame.node.test) for frame in clip.conditions()
            if isinstance(frame.node, ast.If)
        ) and accumulates(script):  # fmt: skip
            edits = (script.source.wrap([script.statement(clip.node)], f"if {name}.sync_gradients:"),) if name else ()
            yield ScriptFault("clip-without-sync-gradients", clip.node.lineno, "clipping at every micro-batch", edits)
    yield from _unprepared(script, trace)


def accumulates(script: TrainingScript) -> bool:
    """Whether Accelerate may accumulate: not if the number is left out or 1."""
    return any(
        value is not None and not (isinstance(value, ast.Constant) and value.value == 1)
        for call in script.calls("Accelerator")
        for value in (script.argument(call, "gradient_accumulation_steps"), script.argument(call, "gradient_accumulation_plugin"))
    )  # fmt: skip


def divided_twice(script: TrainingScript, loss: ast.expr, backward: TrainingEvent) -> Iterator[ScriptFault]:
    """A loss divided by a number of accumulation steps before a framework that divides it too."""
    for part in ancestry(script, loss):
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div):
            divisor = ast.unparse(part.right).lower()
            if "accum" in divisor or "grad_acc" in divisor or isinstance(part.right, ast.Constant):
                edit = script.source.replace(part, script.text(part.left))
                yield ScriptFault(
                    "accumulation-divided-twice", part.lineno, f"`{script.text(part)}` is divided by the framework too",
                    (edit,),
                )  # fmt: skip
                return
    for node in script.nodes:
        divides = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div)
        if not divides or ast.unparse(node.target) != ast.unparse(loss):  # type: ignore[attr-defined]
            continue
        if script.parents[node] in script.ancestors(backward.node):  # not in another branch
            edit = script.source.remove(node, script.alone(node))
            yield ScriptFault("accumulation-divided-twice", node.lineno, "the framework divides too", (edit,))


def _context_missing(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for backward, steps in training_loops(trace):
        loop = backward.loops[-1]
        if not steps or modulo_period(script, steps[0], loop) is not None or not isinstance(loop, ast.For):
            continue
        models = [f.subject for f in trace.inside(loop, "forward") if f.subject is not None]
        name = scope_name(script, [*by_kind(script, "accelerator"), "accelerator"], backward.node)
        edits: tuple[SourceEdit, ...] = ()
        if models and name:
            edits = (script.source.wrap(loop.body, f"with {name}.accumulate({ast.unparse(models[0])}):"),)
        yield ScriptFault("accumulate-context-missing", backward.node.lineno, "accumulation is never entered", edits)


def _unprepared(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    prepares = [
        call for call in script.calls("prepare") if "accelerator" in script.kinds(getattr(call.func, "value", None))
    ]
    if len(prepares) != 1 or any(isinstance(given, ast.Starred) for given in prepares[0].args):
        return
    call, statement = prepares[0], script.statement(prepares[0])
    for step in trace.of("step"):
        subject = step.subject
        if subject is None or "optimizer" not in script.kinds(subject) or "prepared" in script.kinds(subject):
            continue
        edits: tuple[SourceEdit, ...] = ()
        name = ast.unparse(subject)
        if isinstance(statement, ast.Assign) and visible(script, name, statement) and call.args:
            last = (
                statement.targets[0].elts[-1] if isinstance(statement.targets[0], ast.Tuple) else statement.targets[0]
            )
            ends = [script.source.span(last)[1], script.source.span(call.args[-1])[1]]
            edits = tuple(SourceEdit(end, end, f", {name}") for end in ends)
        yield ScriptFault("accelerate-unprepared", call.lineno, f"`{name}` is not prepared", edits)
        return


def lightning_modules(script: TrainingScript) -> Iterator[tuple[ast.ClassDef, bool]]:
    """LightningModules, and whether they optimize automatically."""
    for name, node in script.classes.items():
        if script.is_a(name, "LightningModule"):
            manual = any(
                isinstance(part, ast.Assign) and last_part(part.targets[0]) == "automatic_optimization"
                and isinstance(part.value, ast.Constant) and part.value.value is False for part in ast.walk(node)
            )  # fmt: skip
            yield node, not manual


def check_lightning(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for owner, automatic in lightning_modules(script):
        step = script.methods(owner.name).get("training_step")
        if step is None:
            continue
        backwards = list(script.calls("backward", inside=step))
        manual = list(script.calls("manual_backward", inside=step))
        if automatic:
            calls = [*backwards, *manual]
            if calls:
                yield ScriptFault(
                    "lightning-manual-backward", calls[0].lineno, "backward in automatic optimization",
                    _without_optimization(script, step),
                )  # fmt: skip
            yield from _loss_returned(script, step)
        elif not manual:
            for call in backwards:
                loss = call.func.value if isinstance(call.func, ast.Attribute) else None
                if loss is not None and not script.kinds(loss):
                    edit = script.source.replace(call, f"self.manual_backward({script.text(loss)})")
                    yield ScriptFault("lightning-raw-backward", call.lineno, "backward() bypasses Lightning", (edit,))
        yield from _kept_by_module(script, step)
    yield from _logged_per_rank(script)


def _without_optimization(script: TrainingScript, step: Function) -> tuple[SourceEdit, ...]:
    """Remove the statements of a training_step that are manual optimization."""
    names = ("backward", "manual_backward", "step", "zero_grad", "clip_gradients")
    removed = [
        node for node in ast.walk(step)
        if (isinstance(node, ast.Expr) and script.name(node.value) in names)
        or (isinstance(node, ast.Assign) and script.name(node.value) == "optimizers")
    ]  # fmt: skip
    edits = []
    for node in removed:
        assert isinstance(node, ast.stmt)
        block = script.block(node)
        emptied = all(statement in removed for statement in block)
        edits.append(script.source.remove(node, emptied and node is block[0]))
    return tuple(edits)


def _loss_returned(script: TrainingScript, step: Function) -> Iterator[ScriptFault]:
    returns = [node for node in ast.walk(step) if isinstance(node, ast.Return) and node.value is not None]
    if returns or isinstance(step.body[-1], ast.Raise):
        return
    names = [node.targets[0].id for node in ast.walk(step) if isinstance(node, ast.Assign)
             and isinstance(node.targets[0], ast.Name) and "loss" in node.targets[0].id]  # fmt: skip
    edits = (script.source.after(step.body[-1], f"return {names[-1]}"),) if names else ()
    yield ScriptFault("lightning-no-loss", step.lineno, "training_step returns no loss", edits)


def _kept_by_module(script: TrainingScript, step: Function) -> Iterator[ScriptFault]:
    losses = {
        node.value.id for node in ast.walk(step) if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)
    }
    for call in script.calls("append", inside=step):
        value = call.args[0] if call.args else None
        if isinstance(value, ast.Name) and value.id in losses and ast.unparse(call.func).startswith("self."):
            edit = script.source.replace(value, f"{value.id}.detach()")
            yield ScriptFault("loss-keeps-graph", call.lineno, "the module collects losses with their graph", (edit,))


def _logged_per_rank(script: TrainingScript) -> Iterator[ScriptFault]:
    several = False
    for call in script.calls("Trainer"):
        devices, strategy = script.argument(call, "devices"), script.argument(call, "strategy")
        several |= isinstance(devices, ast.Constant) and isinstance(devices.value, int) and devices.value > 1
        several |= any(
            isinstance(part, ast.Constant) and str(part.value).startswith(("ddp", "fsdp", "deepspeed"))
            for part in (ast.walk(strategy) if strategy is not None else ())
        )
    for owner, _ in lightning_modules(script) if several else ():
        for name in ("validation_step", "test_step"):
            method = script.methods(owner.name).get(name)
            for call in script.calls("log", "log_dict", inside=method) if method is not None else ():
                if script.argument(call, "sync_dist") is None and ast.unparse(call.func).startswith("self."):
                    end = script.source.span(call)[1] - 1
                    edit = SourceEdit(end, end, ", sync_dist=True")
                    yield ScriptFault("lightning-sync-dist", call.lineno, f"{name} logs one rank's value", (edit,))


def check_deepspeed(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    engines = by_kind(script, "engine")
    if not engines:
        return
    for backward in trace.of("backward"):
        loss = loss_of(script, backward)
        if loss is None:
            continue
        if backward.subject not in backward.node.args:
            name = scope_name(script, engines, backward.node)
            edits = (script.source.replace(backward.node, f"{name}.backward({script.text(loss)})"),) if name else ()
            yield ScriptFault("deepspeed-backward", backward.node.lineno, "backward() bypasses the engine", edits)
        else:
            yield from divided_twice(script, loss, backward)
    for step in trace.of("step"):
        name = scope_name(script, engines, step.node)
        if step.subject is not None and "optimizer" in script.kinds(step.subject):
            edits = (
                (script.source.replace(step.node, f"{name}.step()"),) if name and not trace.of("engine_step") else ()
            )
            yield ScriptFault("deepspeed-step", step.node.lineno, "the optimizer steps instead of the engine", edits)
    for step in trace.of("engine_step"):
        condition = step.loops and modulo_period(script, step, step.loops[-1])
        above = script.parents[script.statement(step.node)]
        if condition is not None and condition and isinstance(above, ast.If):
            removed = script.source.remove(script.statement(step.node), script.alone(script.statement(step.node)))
            edits = (removed, script.source.before(above, script.text(step.node)))
            if len(above.body) == 1 and not above.orelse:
                edits = (script.source.replace(above, script.text(step.node)),)
            yield ScriptFault(
                "deepspeed-conditional-step", step.node.lineno, "the engine does not step at every batch", edits
            )


def check_trainer(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for call in script.calls("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig"):
        words = {word.arg: word.value for word in call.keywords if word.arg}
        if None in (word.arg for word in call.keywords):
            continue
        if _is_true(words.get("fp16")) and _is_true(words.get("bf16")):
            edit = script.source.replace(words["fp16"], "False")
            yield ScriptFault("trainer-two-precisions", words["fp16"].lineno, "fp16 and bf16 together", (edit,))
        yield from _best_strategy(script, call, words)
    for name in script.classes:
        method = script.methods(name).get("compute_loss") if script.is_a(name, "Trainer", "SFTTrainer") else None
        if method is not None and method.args.kwarg is None:
            names = [argument.arg for argument in method.args.args + method.args.kwonlyargs]
            if "num_items_in_batch" not in names and len(names) >= 3:
                last = method.args.args[-1]
                end = max(getattr(part, "end_col_offset", 0) or 0 for part in [last, *method.args.defaults[-1:]]
                          if part.end_lineno == last.end_lineno)  # fmt: skip
                offset = script.source.starts[(last.end_lineno or 1) - 1] + end
                edit = SourceEdit(offset, offset, ", num_items_in_batch=None")
                yield ScriptFault("compute-loss-signature", method.lineno, "compute_loss lacks an argument", (edit,))


def _best_strategy(script: TrainingScript, call: ast.Call, words: dict[str, ast.expr]) -> Iterator[ScriptFault]:
    if not _is_true(words.get("load_best_model_at_end")):
        return
    saving = words.get("save_strategy") or ast.Constant("steps")
    evaluating = words.get("eval_strategy") or words.get("evaluation_strategy") or ast.Constant("no")
    if not isinstance(saving, ast.Constant) or not isinstance(evaluating, ast.Constant):
        return
    if saving.value != evaluating.value and saving.value != "best":
        place = words["load_best_model_at_end"]
        if hasattr(evaluating, "lineno"):
            edit = script.source.replace(evaluating, f'"{saving.value}"')
        else:
            end = script.source.span(place)[1]
            edit = SourceEdit(end, end, f', eval_strategy="{saving.value}"')
        yield ScriptFault(
            "trainer-best-without-evaluation", place.lineno,
            f"saves by {saving.value} but evaluates by {evaluating.value}", (edit,),
        )  # fmt: skip


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


CHECKS = (check_accelerate, check_lightning, check_deepspeed, check_trainer)
