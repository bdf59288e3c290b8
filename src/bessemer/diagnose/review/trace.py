"""The calls of a script that matter to training, in the order in which they run.

Calls of the script's own functions and methods are followed, so that a loop whose step is in a method reads like one
that is written in place. Each event knows the loops, conditions and `with` blocks that it runs in.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from bessemer.diagnose.review.script import STATES, Function, TrainingScript

Loop = ast.For | ast.While | ast.AsyncFor
CLIPS = ("clip_grad_norm_", "clip_grad_value_")
COLLECTIVES = ("barrier", "all_reduce", "all_gather", "reduce", "broadcast", "gather", "all_gather_object",
               "broadcast_object_list", "reduce_scatter", "all_gather_into_tensor", "gather_object",
               "get_model_state_dict", "get_state_dict", "get_optimizer_state_dict")  # fmt: skip
ACCELERATE = ("wait_for_everyone", "gather", "gather_for_metrics", "reduce", "save_state")
DEEPEST, MOST_CALLS = 8, 500  # a training script's loop is a few calls deep; a library's may be followed for ever
NO_GRAD = ("no_grad", "inference_mode", "set_grad_enabled")
OPTIMIZER_NAMES = ("opt", "optim", "optimizer")
SCHEDULER_NAMES = ("sched", "scheduler", "lr_scheduler", "lr_sched")


@dataclass(frozen=True)
class Frame:
    """A compound statement or function that an event runs in; `branch` is that of an `if`, `call` what entered it."""

    node: ast.AST
    branch: str = "body"
    call: ast.Call | None = None


@dataclass(frozen=True)
class TrainingEvent:
    """A call of interest. `subject` is the expression that it acts on, such as the optimizer."""

    kind: str
    node: ast.Call
    subject: ast.expr | None
    frames: tuple[Frame, ...]
    order: int

    @property
    def statement_nodes(self) -> list[ast.AST]:
        """The event's call and those through which it is reached, from the inside out."""
        return [self.node, *(frame.call for frame in reversed(self.frames) if frame.call is not None)]

    @property
    def loops(self) -> list[Loop]:
        return [frame.node for frame in self.frames if isinstance(frame.node, Loop)]

    def conditions(self, inside: ast.AST | None = None) -> list[Frame]:
        """The `if` branches that the event is in, only those inside a frame if one is named."""
        nodes = [frame.node for frame in self.frames]
        start = nodes.index(inside) + 1 if inside in nodes else 0
        return [frame for frame in self.frames[start:] if isinstance(frame.node, ast.If)]


class Trace:
    """The events of one root: the module's own statements, or a function that nothing in the script calls."""

    def __init__(self, script: TrainingScript) -> None:
        self.script = script
        self.events: list[TrainingEvent] = []
        self.entered: set[Function] = set()
        self._stack: list[Function] = []
        self._followed = 0

    def of(self, *kinds: str) -> list[TrainingEvent]:
        return [event for event in self.events if event.kind in kinds]

    def inside(self, node: ast.AST, *kinds: str) -> list[TrainingEvent]:
        """The events of these kinds that run inside a loop or other compound statement."""
        return [event for event in self.of(*kinds) if any(frame.node is node for frame in event.frames)]

    def walk(self, statements: list[ast.stmt], frames: tuple[Frame, ...]) -> None:
        for statement in statements:
            if isinstance(statement, Function | ast.ClassDef):
                continue
            for field, value in ast.iter_fields(statement):
                if field in ("body", "orelse", "finalbody"):
                    self.walk(value, (*frames, Frame(statement, field)))
                elif field == "handlers":
                    for handler in value:
                        self.walk(handler.body, (*frames, Frame(statement, field)))
                elif field == "test" and isinstance(statement, ast.While):
                    self._expression(value, (*frames, Frame(statement)))
                else:
                    for child in value if isinstance(value, list) else [value]:
                        if isinstance(child, ast.AST):
                            self._expression(child, frames)

    def _expression(self, node: ast.AST, frames: tuple[Frame, ...]) -> None:
        """Visit an expression's calls, arguments first, as they are evaluated."""
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.comprehension | ast.GeneratorExp | ast.ListComp | ast.DictComp | ast.SetComp):
            frames = (*frames, Frame(node))
        for child in ast.iter_child_nodes(node):
            self._expression(child, frames)
        if isinstance(node, ast.Call):
            function = self.script.local_function(node)
            kind, subject = classify(self.script, node)
            if kind:
                self.events.append(TrainingEvent(kind, node, subject, frames, len(self.events)))
            deep = function in self._stack or len(self._stack) >= DEEPEST or self._followed >= MOST_CALLS
            if function is not None and not deep:
                self._followed += 1
                self._stack.append(function)
                self.entered.add(function)
                self.walk(function.body, (*frames, Frame(function, call=node)))
                self._stack.pop()


def traces(script: TrainingScript) -> list[Trace]:
    """One trace of the module, and one of each function that no trace has entered, such as callbacks."""
    first = Trace(script)
    first.walk(script.tree.body, ())
    all_traces, entered = [first], set(first.entered)
    functions = [node for node in script.nodes if isinstance(node, Function)]
    called = {script.local_function(node) for node in script.nodes if isinstance(node, ast.Call)}
    for function in sorted(functions, key=lambda function: function in called):
        if function not in entered:
            trace = Trace(script)
            trace.walk(function.body, (Frame(function),))
            entered |= trace.entered | {function}
            all_traces.append(trace)
    return all_traces


def last_part(node: ast.expr) -> str:
    """`optimizer` of self.optimizer or optimizers[0]'s base; "" for a call."""
    if isinstance(node, ast.Subscript):
        return last_part(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_optimizer(script: TrainingScript, node: ast.expr | None) -> bool:
    if node is None:
        return False
    if kinds := script.kinds(node) - STATES:
        return "optimizer" in kinds
    part = last_part(node).lower()
    return part.rstrip("s_0123456789") in OPTIMIZER_NAMES or part.startswith(("optimizer_", "opt_"))


def is_scheduler(script: TrainingScript, node: ast.expr) -> bool:
    kinds = script.kinds(node) - STATES
    return "scheduler" in kinds or (not kinds and last_part(node).lower() in SCHEDULER_NAMES)


def is_model(script: TrainingScript, node: ast.expr) -> bool:
    kinds = script.kinds(node) - STATES
    return bool(kinds & {"model", "engine"}) or (not kinds and last_part(node).lower() in ("model", "net", "network"))


def collective(script: TrainingScript, call: ast.Call) -> bool:
    """Whether a call needs all ranks."""
    name = script.name(call)
    kinds = script.kinds(call.func.value) if isinstance(call.func, ast.Attribute) else frozenset()
    if script.qualified(call.func).startswith("torch.distributed.") and name in COLLECTIVES:
        return True
    if name in ACCELERATE and "accelerator" in kinds:
        return True
    return (name == "save_checkpoint" and "engine" in kinds) or (name == "state_dict" and "fsdp" in kinds)


def classify(script: TrainingScript, call: ast.Call) -> tuple[str, ast.expr | None]:
    """The kind of event that a call is and what it acts on; "" for other calls."""
    name = script.name(call)
    receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
    kinds = script.kinds(receiver) if receiver is not None else frozenset()
    first = call.args[0] if call.args else None
    dotted = script.qualified(call.func)
    if receiver is None:
        if is_model(script, call.func) and call.func and script.kinds(call.func) & {"model", "engine"}:
            return "forward", call.func
        if isinstance(call.func, ast.Name) and call.func.id in ("model", "net") and first is not None:
            return "forward", call.func
    if collective(script, call):
        return "collective", first
    if name in ("save", "load") and dotted in ("torch.save", "torch.load"):
        return name, first
    if name == "fully_shard" or name in ("DistributedDataParallel", "FullyShardedDataParallel", "get_peft_model"):
        return "wrap", first
    if name == "convert_sync_batchnorm":
        return "sync_bn", first
    if name in CLIPS:
        return "clip", first
    if receiver is None:
        return ("new_optimizer", None) if "optimizer" in script.kinds(call) and name not in script.functions else (
            "", None
        )  # fmt: skip
    if script.kinds(call.func) & {"model", "engine"}:  # self.model(x)
        return "forward", call.func
    if name == "zero_grad":
        return "zero_grad", receiver
    if name == "backward":
        if "accelerator" in kinds or "engine" in kinds:
            return "backward", first
        return "backward", receiver
    if name == "step":
        if "engine" in kinds:
            return "engine_step", receiver
        if "scaler" in kinds or last_part(receiver) == "scaler":
            return "step", first
        if is_scheduler(script, receiver):
            return "scheduler_step", receiver
        return ("step", receiver) if is_optimizer(script, receiver) else ("", None)
    if name == "unscale_":
        return "unscale", first
    if name == "update" and "scaler" in kinds:
        return "scaler_update", receiver
    if name in ("eval", "train") and is_model(script, receiver):
        training = not (isinstance(first, ast.Constant) and first.value is False)
        return ("train_mode" if name == "train" and training else "eval_mode"), receiver
    if name == "generate" and is_model(script, receiver):
        return "generate", receiver
    if name in ("to", "cuda") and is_model(script, receiver):
        return "move", receiver
    if name == "set_epoch":
        return "set_epoch", receiver
    if "optimizer" in script.kinds(call) and name not in ("to", "cuda"):
        return "new_optimizer", None
    return "", None


def without_gradients(script: TrainingScript, event: TrainingEvent) -> bool:
    """Whether an event runs under no_grad, inference_mode or a function decorated with one."""
    for frame in event.frames:
        if isinstance(frame.node, ast.With):
            heads: list[ast.expr] = [item.context_expr for item in frame.node.items]
        else:
            heads = getattr(frame.node, "decorator_list", [])
        for head in heads:
            name = script.name(head) or (last_part(head) if isinstance(head, ast.expr) else "")
            if name in NO_GRAD:
                return True
    return False


def training_loops(trace: Trace) -> Iterator[tuple[TrainingEvent, list[TrainingEvent]]]:
    """Each backward pass in a loop, with the optimizer steps that share its outermost loop."""
    for backward in trace.of("backward"):
        if backward.loops:
            yield backward, trace.inside(backward.loops[0], "step", "engine_step")
