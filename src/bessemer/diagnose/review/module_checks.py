"""Checks of modules, optimizers, checkpoints and data loaders on one process."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bessemer.diagnose.review.catalogue import ScriptFault
from bessemer.diagnose.review.edits import SourceEdit
from bessemer.diagnose.review.flow import ancestry, definitions, visible
from bessemer.diagnose.review.loop_checks import move_after
from bessemer.diagnose.review.script import TrainingScript
from bessemer.diagnose.review.trace import Trace, last_part, training_loops


def import_line(script: TrainingScript, line: str) -> tuple[SourceEdit, ...]:
    """The edit that adds an import unless the script has it."""
    if line.removeprefix("import ") in script.imports.values():
        return ()
    first = next((node for node in script.tree.body if isinstance(node, ast.Import | ast.ImportFrom)
                  and getattr(node, "module", "") != "__future__"), None)  # fmt: skip
    return (script.source.before(first, line),) if first is not None else ()


def module_classes(script: TrainingScript) -> Iterator[ast.ClassDef]:
    for name, node in script.classes.items():
        if script.is_a(name, "Module", "LightningModule", "PreTrainedModel"):
            yield node


def check_modules(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for owner in module_classes(script):
        for call in script.calls("dropout", inside=owner):
            functional = script.qualified(call.func) in ("torch.nn.functional.dropout", "torch.dropout")
            if functional and script.argument(call, "training", 2) is None and len(call.args) < 3:
                end = script.source.span(call)[1] - 1
                edit = SourceEdit(end, end, ", training=self.training")
                yield ScriptFault("dropout-always-on", call.lineno, "F.dropout without `training`", (edit,))
        for node in ast.walk(owner):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("self."):
                value = node.value
                element = value.elt if isinstance(value, ast.ListComp) else (
                    value.elts[0] if isinstance(value, ast.List) and value.elts else None)  # fmt: skip
                if element is not None and "model" in script.kinds(element):
                    edit = script.source.replace(value, f"{_nn(script)}.ModuleList({script.text(value)})")
                    yield ScriptFault(
                        "unregistered-layers", node.lineno,
                        f"`{ast.unparse(node.targets[0])}` is a plain list of layers", (edit,),
                    )  # fmt: skip


def _nn(script: TrainingScript) -> str:
    return next((alias for alias, name in script.imports.items() if name == "torch.nn"), "torch.nn")


def check_state(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    """Best weights without a copy; checkpoints whose optimizer state is not loaded; unsafe loads."""
    for node in script.nodes:
        if (
            isinstance(node, ast.Assign)
            and script.name(node.value) == "state_dict"
            and isinstance(node.value, ast.Call)
        ):
            receiver = node.value.func.value if isinstance(node.value.func, ast.Attribute) else None
            looped = any(isinstance(above, ast.For | ast.While) for above in script.ancestors(node))
            name = last_part(node.targets[0]).lower()
            conditional = any(isinstance(above, ast.If) for above in script.ancestors(node))
            if receiver is not None and "best" in name and (looped or conditional or script.function_of(node)):
                edits = (script.source.replace(node.value, f"copy.deepcopy({script.text(node.value)})"),
                         *import_line(script, "import copy"))  # fmt: skip
                yield ScriptFault("best-state-alias", node.lineno, f"`{name}` refers to the live weights", edits)
    for load in trace.of("load"):
        trusting = script.argument(load.node, "weights_only")
        if isinstance(trusting, ast.Constant) and trusting.value is False:
            edit = script.source.replace(trusting, "True")
            yield ScriptFault("load-without-weights-only", load.node.lineno, "torch.load may run code", (edit,))
        yield from _resume(script, load.node)


def _resume(script: TrainingScript, load: ast.Call) -> Iterator[ScriptFault]:
    """The script saves a state of the optimizer under a key and never loads it."""
    statement = script.statement(load)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
        return
    name = statement.targets[0].id
    saved = [
        (key.value, last_part(value.func.value)) for node in script.nodes if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Call) and script.name(value) == "state_dict"
        and isinstance(value.func, ast.Attribute) and "optim" in str(key.value).lower()
    ]  # fmt: skip
    reads = {ast.unparse(node.slice) for node in script.nodes
             if isinstance(node, ast.Subscript) and last_part(node.value) == name}  # fmt: skip
    loads = [call for call in script.calls("load_state_dict") if mentions_name(call, name)]
    resumes = any("epoch" in key.lower() or "step" in key.lower() or "iter" in key.lower() for key in reads)
    if saved and loads and resumes and not any(repr(key) in reads for key, _ in saved):
        key, optimizer = saved[0]
        subject = next((node for node in script.nodes if isinstance(node, ast.Attribute | ast.Name)
                        and last_part(node) == optimizer), None)  # fmt: skip
        below = script.statement(loads[-1])
        text = ast.unparse(subject) if subject is not None else optimizer
        edits = (script.source.after(below, f'{text}.load_state_dict({name}["{key}"])'),) if visible(
            script, text, below) else ()  # fmt: skip
        yield ScriptFault("resume-without-optimizer", loads[-1].lineno, "training resumes without moments", edits)


def mentions_name(node: ast.AST, name: str) -> bool:
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def check_optimizer(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for event in trace.of("new_optimizer"):
        call, name = event.node, script.name(event.node)
        decay = script.argument(call, "weight_decay")
        literal_zero = isinstance(decay, ast.Constant) and not decay.value
        if (
            name == "Adam"
            and decay is not None
            and not literal_zero
            and script.qualified(call.func).startswith("torch")
        ):
            imported = "" if isinstance(call.func, ast.Attribute) else "torch.optim."
            text = script.text(call.func)[: -len("Adam")] + imported + "AdamW"
            importing = import_line(script, "import torch") if imported else ()
            edits = (script.source.replace(call.func, text), *importing)
            yield ScriptFault("adam-l2", call.lineno, "Adam with weight_decay is L2 regularization", edits)
        if name == "AdamW" and isinstance(decay, ast.Constant) and decay.value and script.name(
            script.argument(call, "params", 0)) == "parameters":  # fmt: skip
            yield ScriptFault("weight-decay-on-norms", call.lineno, "weight decay on every parameter")
        yield from _built_too_early(script, trace, call, event.order)


def _built_too_early(script: TrainingScript, trace: Trace, call: ast.Call, order: int) -> Iterator[ScriptFault]:
    statement = script.statement(call)
    models = {script.key(inner.func.value) for inner in script.calls("parameters", "named_parameters", inside=call)
              if isinstance(inner.func, ast.Attribute)}  # fmt: skip
    block, changes = script.block(statement), []
    for event in trace.of("wrap"):
        fsdp = script.name(event.node) in ("fully_shard", "FullyShardedDataParallel", "get_peft_model")
        if fsdp and event.order > order and event.subject is not None and script.key(event.subject) in models:
            changes.append(event.node)
    for node in script.nodes:
        if not isinstance(node, ast.Assign | ast.Expr) or node.lineno <= call.lineno:
            continue
        if script.function_of(node) is not script.function_of(call):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if (
            isinstance(target, ast.Attribute)
            and script.key(target.value) in models
            and "model" in script.kinds(node.value)
        ):
            changes.append(node.value)  # type: ignore[arg-type]
        if script.name(node.value) == "resize_token_embeddings" and script.key(node.value.func.value) in models:  # type: ignore[attr-defined]
            changes.append(node.value)  # type: ignore[arg-type]
    if not changes:
        return
    last = max(changes, key=lambda node: node.lineno)
    edits: tuple[SourceEdit, ...] = ()
    below = next((s for s in reversed(block) if s.lineno <= last.lineno), None)
    if below is not None and below is not statement and isinstance(statement, ast.Assign):
        name = last_part(statement.targets[0])
        between = block[block.index(statement) + 1 : block.index(below) + 1]
        if not any(mentions_name(later, name) for later in between):
            edits = move_after(script, statement, below)
    yield ScriptFault(
        "optimizer-before-wrap", call.lineno, f"the model is changed in line {last.lineno}, after its optimizer", edits
    )


FRAMEWORKS = {"accelerator", "engine", "hf_trainer", "ddp", "fsdp", "prepared"}


def check_device(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    """A model that stays on the CPU while its batches move."""
    frameworks = any(script.is_a(name, "LightningModule", "Trainer") for name in script.classes)
    for backward, _ in training_loops(trace):
        loop = backward.loops[-1]
        moves = [
            call for call in script.calls("to", "cuda", inside=loop)
            if isinstance(call.func, ast.Attribute) and "model" not in script.kinds(call.func.value)
        ]  # fmt: skip
        yield from _unused_moves(script, moves)
        forwards = [event for event in trace.inside(loop, "forward") if event.order < backward.order]
        if frameworks or not moves or not forwards or trace.of("move") or "device_map" in script.source.text:
            continue
        subject = forwards[-1].subject
        if subject is None or script.kinds(subject) & FRAMEWORKS or "model" not in script.kinds(subject):
            continue
        yield from _unmoved_model(script, moves[0])


def _unused_moves(script: TrainingScript, moves: list[ast.Call]) -> Iterator[ScriptFault]:
    for call in moves:
        statement = script.parents[call]
        assert isinstance(call.func, ast.Attribute)
        if (
            isinstance(statement, ast.Expr)
            and isinstance(call.func.value, ast.Name)
            and not script.kinds(call.func.value)
        ):
            edit = script.source.replace(statement, f"{call.func.value.id} = {script.text(call)}")
            yield ScriptFault("to-result-unused", call.lineno, f"`{script.text(call)}` has no effect", (edit,))


def _unmoved_model(script: TrainingScript, move: ast.Call) -> Iterator[ScriptFault]:
    device = "" if script.name(move) == "cuda" else ast.unparse(move.args[0]) if move.args else ""
    for node in script.nodes:
        made = isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and "model" in script.kinds(node.value)
        local = made and script.class_of(node) is None
        if isinstance(node, ast.Assign) and local and isinstance(node.targets[0], ast.Name):
            text = f"{node.targets[0].id}.{'cuda()' if not device else f'to({device})'}"
            known = not device or visible(script, device.split("(")[0], script.statement(node))
            edits = (script.source.after(node, f"{node.targets[0].id} = {text}"),) if known else ()
            yield ScriptFault("model-not-moved", node.lineno, f"`{node.targets[0].id}` stays on the CPU", edits)
            return


def check_loading(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    """Random numbers of loader workers."""
    workers = [script.argument(call, "num_workers") for call in script.calls("DataLoader")]
    if not any(w is not None and not (isinstance(w, ast.Constant) and not w.value) for w in workers):
        return
    for call in script.calls("DataLoader"):
        given = script.argument(call, "worker_init_fn")
        function = script.functions.get(last_part(given)) if given is not None else None
        seeds = list(script.calls("seed", "manual_seed", inside=function)) if function is not None else []
        for seed in seeds:
            worker = function.args.args[0].arg if function is not None and function.args.args else ""
            depends = any(isinstance(part, ast.Name) and part.id != worker and isinstance(part.ctx, ast.Load)
                          and definitions(script, part) == [] and part.id.islower() for part in seed.args)  # fmt: skip
            uses = {ast.unparse(part) for argument in seed.args for part in ancestry(script, argument)}
            varied = any(
                worker and worker in text or "initial_seed" in text or "get_worker_info" in text for text in uses
            )
            if seed.args and worker and not varied and not depends:
                edit = script.source.replace(seed.args[0], f"{script.text(seed.args[0])} + {worker}")
                yield ScriptFault("workers-share-seed", seed.lineno, "each worker gets the same seed", (edit,))
    for owner in (node for name, node in script.classes.items() if script.is_a(name, "Dataset")):
        methods = script.methods(owner.name)
        if {"__init__", "__getitem__"} <= methods.keys():
            yield from _copied_generator(script, methods["__init__"], methods["__getitem__"])


def _copied_generator(
    script: TrainingScript, init: ast.AST, getter: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[ScriptFault]:
    for node in ast.walk(init):
        if isinstance(node, ast.Assign) and script.name(node.value) in ("default_rng", "RandomState", "Random"):
            name = ast.unparse(node.targets[0])
            uses = [part for part in ast.walk(getter) if isinstance(part, ast.Attribute) and ast.unparse(part) == name]
            if uses and isinstance(node.value, ast.Call):
                maker = script.text(node.value.func)
                seed = "torch.randint(2**31, ()).item()"
                edits = [script.source.replace(use, "rng") for use in uses]
                edits.append(script.source.before(getter.body[0], f"rng = {maker}({seed})"))
                yield ScriptFault(
                    "workers-share-seed", node.lineno, f"every worker has the same copy of `{name}`",
                    (*edits, *import_line(script, "import torch")),
                )  # fmt: skip


def check_cache(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    enabled = any(True for _ in script.calls("gradient_checkpointing_enable")) or any(
        isinstance(value := script.argument(call, "gradient_checkpointing"), ast.Constant) and value.value is True
        for call in script.calls("TrainingArguments", "SFTConfig", "DPOConfig")
    )
    if not enabled:
        return
    for node in script.nodes:
        value: ast.expr | None = None
        if isinstance(node, ast.keyword) and node.arg == "use_cache":
            owner = script.parents[node]
            value = None if script.name(owner) == "generate" else node.value
        elif isinstance(node, ast.Assign) and last_part(node.targets[0]) == "use_cache":
            value = node.value
        if isinstance(value, ast.Constant) and value.value is True:
            edit = script.source.replace(value, "False")
            yield ScriptFault("use-cache-with-checkpointing", value.lineno, "use_cache with checkpointing", (edit,))


def check_reads(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    """Three or more unconditional .item() calls in one training step."""
    for backward, _ in training_loops(trace):
        loop = backward.loops[-1]
        reads = [
            call for call in script.calls("item", "cpu", "tolist", inside=loop)
            if not any(isinstance(above, ast.If) for above in _until(script, call, loop))
        ]  # fmt: skip
        if len(reads) >= 3:
            first = min(reads, key=lambda call: call.lineno)
            yield ScriptFault("item-every-step", first.lineno, f"{len(reads)} reads from the device in every step")


def _until(script: TrainingScript, node: ast.AST, end: ast.AST) -> Iterator[ast.AST]:
    for above in script.ancestors(node):
        if above is end:
            return
        yield above


CHECKS = (check_modules, check_state, check_optimizer, check_device, check_loading, check_cache, check_reads)
