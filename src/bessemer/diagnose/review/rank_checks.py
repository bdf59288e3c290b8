"""Checks of scripts that run as several processes: samplers, wrapping order, saves, loads, collectives."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

from bessemer.diagnose.review.catalogue import ScriptFault
from bessemer.diagnose.review.edits import SourceEdit
from bessemer.diagnose.review.flow import (
    accumulation,
    definitions,
    mentions,
    on_one_rank,
    one_rank_condition,
    sibling,
    visible,
)
from bessemer.diagnose.review.module_checks import import_line
from bessemer.diagnose.review.script import TrainingScript
from bessemer.diagnose.review.trace import Frame, Trace, TrainingEvent, last_part, training_loops


def dist_name(script: TrainingScript) -> str:
    """How the script calls torch.distributed."""
    for alias, name in script.imports.items():
        if name == "torch.distributed":
            return alias
    return "torch.distributed" if "torch" in script.imports.values() else ""


def check_samplers(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for call in script.calls("DataLoader"):
        shuffle = next((word for word in call.keywords if word.arg == "shuffle"), None)
        sampler = script.argument(call, "sampler")
        on = shuffle is not None and isinstance(shuffle.value, ast.Constant) and shuffle.value.value is True
        if shuffle is not None and on and sampler is not None and not isinstance(sampler, ast.Constant | ast.IfExp):
            start, end = script.source.span(shuffle.value)
            begin = script.source.text.rindex("shuffle", 0, start)
            tail = script.source.text[end:]
            cut = len(tail) - len(tail.lstrip(", \n")) if tail.lstrip().startswith(",") else 0
            edits = (SourceEdit(begin, end + cut, ""),) if cut else (script.source.replace(shuffle.value, "False"),)
            yield ScriptFault("shuffle-with-sampler", shuffle.value.lineno, "shuffle=True beside a sampler", edits)
    yield from _set_epoch(script, trace)
    yield from _sampler_missing(script, trace)


def _set_epoch(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    samplers = [call for call in script.calls("DistributedSampler") if not _is_false(script.argument(call, "shuffle"))]
    if not samplers or trace.of("set_epoch") or any(True for _ in script.calls("set_epoch")):
        return
    for backward, _ in training_loops(trace):
        outer = backward.loops[0]
        if len(backward.loops) < 2 or not isinstance(outer, ast.For) or not isinstance(outer.target, ast.Name):
            continue
        loader_loop = backward.loops[1]
        statement = script.statement(samplers[0])
        first = outer.body[0]
        edits: tuple[SourceEdit, ...] = ()
        sampler = ""
        if isinstance(statement, ast.Assign) and script.name(statement.value) == "DistributedSampler":
            sampler = ast.unparse(statement.targets[0])
        if sampler and visible(script, sampler, first):
            edits = (script.source.before(first, f"{sampler}.set_epoch({outer.target.id})"),)
        elif isinstance(loader_loop, ast.For):
            edits = _through_loader(script, outer, loader_loop)
        yield ScriptFault("set-epoch-missing", outer.lineno, "the sampler's epoch is never set", edits)
        return


def _through_loader(script: TrainingScript, outer: ast.For, inner: ast.For) -> tuple[SourceEdit, ...]:
    """`loader.sampler.set_epoch(epoch)`, where the loader's loop is; a method gets the epoch as argument."""
    loaders = [part for part in ast.walk(inner.iter) if isinstance(part, ast.Name | ast.Attribute)
               and "loader" in script.kinds(part)]  # fmt: skip
    assert isinstance(outer.target, ast.Name)
    if not loaders:
        return ()
    text = ast.unparse(loaders[0])
    for place in (outer.body[0], inner):
        if visible(script, text, place) and visible(script, outer.target.id, place):
            return (script.source.before(place, f"{text}.sampler.set_epoch({outer.target.id})"),)
    return ()


def _is_false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _sampler_missing(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    several = any(True for _ in script.calls("init_process_group")) and any(True for _ in training_loops(trace))
    shards = ("DistributedSampler", "split_dataset_by_node", "StatefulDistributedSampler", "shard", "Subset")
    if not several or any(True for _ in script.calls(*shards)):
        return
    for call in script.calls("DataLoader"):
        shuffle = script.argument(call, "shuffle")
        given = {word.arg for word in call.keywords}
        if not (isinstance(shuffle, ast.Constant) and shuffle.value is True) or not call.args:
            continue
        if given & {"sampler", "batch_sampler"} or None in given:
            continue
        sampler = f"torch.utils.data.DistributedSampler({script.text(call.args[0])})"
        start, end = script.source.span(shuffle)
        begin = script.source.text.rindex("shuffle", 0, start)
        edits = (SourceEdit(begin, end, f"sampler={sampler}"), *import_line(script, "import torch"))
        yield ScriptFault("sampler-missing", call.lineno, "each rank's loader reads the complete data", edits)


def check_wrapping(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for wrap in trace.of("wrap"):
        if script.name(wrap.node) != "DistributedDataParallel" or wrap.subject is None:
            continue
        statement = script.statement(wrap.node)
        target = statement.targets[0] if isinstance(statement, ast.Assign) else wrap.subject
        keys = {script.key(target), script.key(wrap.subject)}
        if any(move.order < wrap.order and move.subject is not None and script.key(move.subject) in keys
               for move in trace.of("move")):  # fmt: skip
            continue
        later = [m for m in trace.of("move") if m.order > wrap.order and m.subject and script.key(m.subject) in keys]
        if later and all(script.name(value) not in ("to", "cuda") for value in definitions(script, wrap.subject)):
            move = later[0].node
            below = script.statement(move)
            text = script.text(move)[len(script.text(move.func.value)) :]  # type: ignore[attr-defined]
            edits = (
                script.source.replace(wrap.subject, f"{script.text(wrap.subject)}{text}"),
                script.source.remove(below, script.alone(below)),
            )
            yield ScriptFault("ddp-before-to", wrap.node.lineno, "DDP wraps a model that is moved later", edits)
        for conversion in trace.of("sync_bn"):
            inner = conversion.subject
            if conversion.order > wrap.order and inner is not None and script.key(inner) in keys:
                below = script.statement(conversion.node)
                call = f"{script.text(conversion.node.func)}({script.text(wrap.subject)})"
                edits = (script.source.replace(wrap.subject, call), script.source.remove(below, script.alone(below)))
                yield ScriptFault(
                    "sync-batchnorm-after-ddp", conversion.node.lineno, "batch norms are converted after DDP", edits
                )


def check_device_number(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name | ast.Attribute):
            continue
        value = node.value
        text = ast.unparse(value)
        is_global = script.name(value) == "get_rank" or (
            "'RANK'" in text and "%" not in text and ("environ" in text or "getenv" in text)
        )
        if not is_global:
            continue
        name = ast.unparse(node.targets[0])
        uses = [call for call in script.calls("set_device", "device", "to", "cuda", "DistributedDataParallel")
                if _uses_as_device(script, call, name)]  # fmt: skip
        if not uses:
            continue
        local = 'int(os.environ["LOCAL_RANK"])'
        if "local" in name.lower() or "gpu" in name.lower():
            edits = (script.source.replace(value, local), *import_line(script, "import os"))
            yield ScriptFault("global-rank-as-device", node.lineno, f"`{name}` is the global rank", edits)
        else:
            parts = [part for use in uses for argument in _device_arguments(use) for part in ast.walk(argument)
                     if isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part) == name]  # fmt: skip
            edits = (*(script.source.replace(part, local) for part in parts), *import_line(script, "import os"))
            if any(isinstance(script.parents[part], ast.FormattedValue) for part in parts):
                edits = ()
            yield ScriptFault("global-rank-as-device", uses[0].lineno, f"`{name}` is the global rank", edits)


def _device_arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(word.value for word in call.keywords if word.arg in ("device_ids", "output_device", "index"))]


def _uses_as_device(script: TrainingScript, call: ast.Call, name: str) -> bool:
    arguments = _device_arguments(call)
    if script.name(call) == "DistributedDataParallel":
        arguments = arguments[1:]
    if script.name(call) == "device" and not script.qualified(call.func).startswith("torch"):
        return False
    return any(mentions(argument, name) and "%" not in ast.unparse(argument) for argument in arguments)


def check_saves(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for save in trace.of("save") if script.distributed else []:
        call = save.node
        path = ast.unparse(script.argument(call, "f", 1) or ast.Constant(""))
        if on_one_rank(script, save) or "rank" in path.lower():
            continue
        accelerators = [alias for alias in _accelerators(script) if visible(script, alias, script.statement(call))]
        header = f"if {accelerators[0]}.is_main_process:" if accelerators else (
            f"if {dist_name(script)}.get_rank() == 0:" if dist_name(script) else "")  # fmt: skip
        sharded = any("fsdp" in script.kinds(inner.func.value) for inner in script.calls("state_dict", inside=call)
                      if isinstance(inner.func, ast.Attribute))  # fmt: skip
        statement = script.statement(call)
        edits = (script.source.wrap([statement], header),) if header and not sharded else ()
        yield ScriptFault("save-on-all-ranks", call.lineno, f"every rank writes {path}", edits)
    for call in script.calls("state_dict"):
        yield from _prefixed(script, call)


def _accelerators(script: TrainingScript) -> list[str]:
    return [ast.unparse(node.targets[0]) for node in script.nodes
            if isinstance(node, ast.Assign) and "accelerator" in script.kinds(node.value)]  # fmt: skip


def _prefixed(script: TrainingScript, call: ast.Call) -> Iterator[ScriptFault]:
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    kinds = script.kinds(receiver)
    wrappers = kinds & {"ddp", "compiled", "prepared"}
    if receiver is None or "model" not in kinds or not wrappers or "fsdp" in kinds:
        return
    if any(isinstance(part, ast.Attribute) and part.attr in ("module", "_orig_mod")
           for value in definitions(script, receiver) for part in ast.walk(value)):  # fmt: skip
        return  # `raw = model.module if ddp else model`
    wraps = [node.lineno for node in script.calls("DistributedDataParallel", "compile", "prepare")]
    for load in script.calls("load_state_dict"):
        inner = load.func.value if isinstance(load.func, ast.Attribute) else None
        if inner is not None and script.kinds(inner) & wrappers and load.lineno > min(wraps, default=0):
            return  # it is loaded into a wrapped model again
    statement = script.statement(call)
    written = any(True for _ in script.calls("save", inside=statement)) or isinstance(statement, ast.Assign)
    if not written:
        return
    text, accelerators = script.text(receiver), _accelerators(script)
    if "ddp" in wrappers:
        plain = f"{text}.module"
    elif "compiled" in wrappers:
        plain = f"{text}._orig_mod"
    elif accelerators and visible(script, accelerators[0], statement):
        plain = f"{accelerators[0]}.unwrap_model({text})"
    else:
        return
    edit = script.source.replace(receiver, plain)
    yield ScriptFault("module-prefix", call.lineno, f"the state of the wrapped `{text}` is saved", (edit,))


def check_loads(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    several = any(True for _ in script.calls("init_process_group", "init_distributed")) or bool(_accelerators(script))
    for load in trace.of("load") if several else []:
        if script.argument(load.node, "map_location", 1) is None and load.node.args:
            end = script.source.span(load.node.args[0])[1]
            edit = SourceEdit(end, end, ', map_location="cpu"')
            yield ScriptFault("load-without-map-location", load.node.lineno, "torch.load without map_location", (edit,))


def check_collectives(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    lonely: dict[str, list[tuple[TrainingEvent, Frame]]] = {}
    for event in trace.of("collective"):
        for frame in event.conditions():
            if isinstance(frame.node, ast.If) and one_rank_condition(frame.node.test):
                lonely.setdefault(script.name(event.node), []).append((event, frame))
                break
    for name, places in lonely.items():
        signs = set()
        for _, frame in places:
            assert isinstance(frame.node, ast.If)
            test = ast.unparse(frame.node.test)
            signs.add(("!=" in test or "not " in test) != (frame.branch == "orelse"))
        if len(signs) > 1:
            continue  # the other ranks call it in the other branch
        for event, frame in places:
            assert isinstance(frame.node, ast.If)
            edits = _leave_branch(script, event, frame.node)
            yield ScriptFault("collective-in-one-rank", event.node.lineno, f"`{name}` runs on some ranks only", edits)


def _leave_branch(script: TrainingScript, event: TrainingEvent, condition: ast.If) -> tuple[SourceEdit, ...]:
    """Move a collective out of `if rank == 0:`: above it if it makes a value, else below."""
    statement = sibling(script, condition.body, event)
    if statement is None or condition.orelse or condition not in script.block(condition):
        return ()
    if isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
        return ()
    text = script.source.body([statement])
    if len(condition.body) == 1:
        start, end = script.source.line_span(condition)
        return (SourceEdit(start, end, textwrap.indent(text + "\n", script.source.indent_of(condition))),)
    removed = script.source.remove(statement, False)
    names = [part for s in condition.body for part in ast.walk(s) if isinstance(part, ast.Name)]
    made = {part.id for part in names if isinstance(part.ctx, ast.Store) and part.lineno < statement.lineno}
    needs = {part.id for part in ast.walk(statement) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)}
    if script.name(event.node) in ("barrier", "wait_for_everyone", "save_checkpoint", "save_state"):
        return (removed, script.source.after(condition, text))
    return (removed, script.source.before(condition, text)) if not made & needs else ()


def check_reductions(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for call in script.calls("all_reduce", "reduce"):
        if not script.qualified(call.func).startswith("torch.distributed") or not call.args:
            continue
        op = script.argument(call, "op", 1 if script.name(call) == "all_reduce" else 2)
        if op is not None and last_part(op) != "SUM":
            continue
        value = call.args[0]
        text = ast.unparse(value)
        gradient = text.endswith((".grad", ".grad.data"))
        if not gradient and "loss" not in last_part(value).lower():
            continue
        if _divided_later(script, call, text):
            continue
        statement = script.statement(call)
        world = f"{dist_name(script)}.get_world_size()"
        edits = (script.source.after(statement, f"{text} /= {world}"),) if isinstance(statement, ast.Expr) else ()
        yield ScriptFault("reduce-not-averaged", call.lineno, f"`{text}` is summed over the ranks", edits)


def _divided_later(script: TrainingScript, call: ast.Call, text: str) -> bool:
    scope = script.function_of(call) or script.tree
    for node in ast.walk(scope):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and mentions(node.left, text):
            return True
        if (
            isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.Div | ast.Mult)
            and ast.unparse(node.target) == text
        ):
            return True
        if isinstance(node, ast.Call) and script.name(node) in ("div_", "div", "mul_") and mentions(node, text):
            return True
        if isinstance(node, ast.Return) and node.value is not None and mentions(node.value, text):
            return True  # the caller may divide
    loss_summed = any(isinstance(v, ast.BinOp) for v in definitions(script, call.args[0]))
    return loss_summed and not text.endswith("grad")


def check_no_sync(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    if any(True for _ in script.calls("no_sync")) or "require_backward_grad_sync" in script.source.text:
        return
    for backward, steps in training_loops(trace):
        models = [f for f in trace.inside(backward.loops[-1], "forward") if "ddp" in script.kinds(f.subject)]
        for step in steps:
            if models and accumulation(script, backward, step) is not None:
                yield ScriptFault(
                    "accumulation-without-no-sync", backward.node.lineno, "DDP reduces at every micro-batch"
                )


CHECKS = (
    check_samplers, check_wrapping, check_device_number, check_saves, check_loads, check_collectives, check_reductions,
    check_no_sync,
)  # fmt: skip
