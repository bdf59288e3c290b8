"""TrainingScript: a parsed script in which names are resolved through imports and variables have kinds.

A kind says what a variable may hold: `model`, `optimizer`, `ddp`, `loader`, ... Kinds follow assignments, calls of
the script's own functions and attributes of `self`. A name that cannot be resolved has none, and rules stay silent.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property

from bessemer.diagnose.review.edits import SourceText

Function = ast.FunctionDef | ast.AsyncFunctionDef
Kinds = frozenset[str]
NONE: Kinds = frozenset()
OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adafactor", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Lion", "Muon",
              "AdamW8bit", "Adam8bit", "PagedAdamW8bit", "LAMB", "Adadelta", "Rprop", "LBFGS")  # fmt: skip
LOSSES = ("CrossEntropyLoss", "NLLLoss", "BCELoss", "BCEWithLogitsLoss", "MSELoss", "L1Loss", "SmoothL1Loss",
          "KLDivLoss", "HuberLoss")  # fmt: skip
SAME_VALUE = ("to", "cuda", "cpu", "train", "eval", "half", "bfloat16", "float", "double", "requires_grad_", "type")
WRAPPERS = {
    "DistributedDataParallel": "ddp", "FullyShardedDataParallel": "fsdp", "fully_shard": "fsdp", "compile": "compiled",
    "get_peft_model": "peft", "convert_sync_batchnorm": "sync_bn", "DataParallel": "ddp", "prepare_model": "prepared",
}  # fmt: skip
STATES = frozenset({*WRAPPERS.values()})  # what was done to a value; they do not say what the value is
MODEL_WRAPPERS = STATES - {"compiled", "prepared"}  # what only a model can be wrapped by
# Constructors whose last name says enough.
BY_NAME = {
    "GradScaler": "scaler", "Accelerator": "accelerator", "DataLoader": "loader", "DistributedSampler": "sampler",
    "AutoTokenizer": "tokenizer", "Trainer": "hf_trainer", "Sequential": "model", "create_model": "model",
}  # fmt: skip


class TrainingScript:
    """A script's syntax tree with parents, imports, functions and the kinds of its variables."""

    def __init__(self, text: str, path: str) -> None:
        self.path = path
        self.source = SourceText(text)
        self.tree = ast.parse(text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.nodes = list(ast.walk(self.tree))
        self.imports: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    self.imports[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        self.classes = {node.name: node for node in self.nodes if isinstance(node, ast.ClassDef)}
        self.functions = {node.name: node for node in self.nodes if isinstance(node, Function)}
        self._kinds: dict[str, Kinds] = {}
        self._returned: dict[Function, Kinds] = {}  # what each function returns, by the pass before
        returns = [(self.function_of(n), n.value) for n in self.nodes if isinstance(n, ast.Return) and n.value]
        for _ in range(4):  # a value passes through at most a few names before it is used
            self._follow_assignments()
            for function, value in returns:
                if function is not None and (kinds := self.kinds(value)):
                    self._returned[function] = self._returned.get(function, NONE) | kinds

    # Names and places

    def qualified(self, node: ast.expr) -> str:
        """A dotted name with its import resolved, such as torch.nn.functional.cross_entropy; "" for other things."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ".".join(reversed(parts)) if parts and isinstance(node, ast.Call) else ""
        return ".".join([self.imports.get(node.id, node.id), *reversed(parts)])

    def name(self, node: ast.AST | None) -> str:
        """The last part of the called name: `step` of optimizer.step(), `DataLoader` of utils.data.DataLoader."""
        if not isinstance(node, ast.Call):
            return ""
        if isinstance(node.func, ast.Attribute):
            return node.func.attr
        return self.qualified(node.func).rpartition(".")[2]

    def calls(self, *names: str, inside: ast.AST | None = None) -> Iterator[ast.Call]:
        for node in self.nodes if inside is None else ast.walk(inside):
            if isinstance(node, ast.Call) and self.name(node) in names:
                yield node

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The list of statements that contains a statement."""
        for field in ("body", "orelse", "finalbody", "handlers"):
            statements = getattr(self.parents[statement], field, None)
            if isinstance(statements, list) and statement in statements:
                return statements
        return [statement]

    def alone(self, statement: ast.stmt) -> bool:
        return len(self.block(statement)) == 1

    def function_of(self, node: ast.AST) -> Function | None:
        return next((above for above in self.ancestors(node) if isinstance(above, Function)), None)

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        return next((above for above in self.ancestors(node) if isinstance(above, ast.ClassDef)), None)

    def methods(self, name: str) -> dict[str, Function]:
        return {node.name: node for node in self.classes[name].body if isinstance(node, Function)}

    def is_a(self, name: str, *bases: str) -> bool:
        """Whether a class of the script derives from one with such a last name, through classes of the script too."""
        for base in self.classes[name].bases if name in self.classes else []:
            last = self.qualified(base).rpartition(".")[2]
            if last in bases or (last != name and self.is_a(last, *bases)):
                return True
        return False

    def argument(self, call: ast.Call, keyword: str, position: int | None = None) -> ast.expr | None:
        for given in call.keywords:
            if given.arg == keyword:
                return given.value
        if position is not None and position < len(call.args):
            return call.args[position]
        return None

    def text(self, node: ast.expr | ast.stmt) -> str:
        return self.source.of(node)

    @cached_property
    def distributed(self) -> bool:
        """Whether several processes train: the script says so itself."""
        return any(True for _ in self.calls("init_process_group", "init_distributed")) or any(
            kinds & {"ddp", "fsdp", "accelerator", "engine"} for kinds in self._kinds.values()
        )

    @cached_property
    def deepspeed(self) -> bool:
        """Whether a DeepSpeed engine owns the optimizer."""
        return self.holds("engine")

    # Kinds

    @cached_property
    def _bound(self) -> dict[Function, set[str]]:
        bound: dict[Function, set[str]] = {}
        for node in self.nodes:
            function = self.function_of(node)
            if isinstance(node, ast.arg) and function is not None:
                bound.setdefault(function, set()).add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and function is not None:
                bound.setdefault(function, set()).add(node.id)
        return bound

    def key(self, node: ast.expr) -> str:
        """The name of a variable with its scope; "" if it is not a variable."""
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):
            return ""
        text = ast.unparse(node)
        if root.id == "self" and (owner := self.class_of(node)) is not None:
            return f"{owner.name}:{text}"
        for above in self.ancestors(node):
            if isinstance(above, Function) and root.id in self._bound.get(above, ()):
                return f"{above.name}@{above.lineno}:{text}"
        return text

    def holds(self, kind: str) -> bool:
        """Whether any variable is of a kind."""
        return any(kind in kinds for kinds in self._kinds.values())

    def kinds(self, node: ast.AST | None) -> Kinds:
        """What an expression may hold."""
        if isinstance(node, ast.IfExp):
            return self.kinds(node.body) | self.kinds(node.orelse)
        if isinstance(node, ast.Call):
            return self._kinds_of_call(node)
        if isinstance(node, ast.Attribute) and node.attr in ("module", "_orig_mod"):
            return self.kinds(node.value) - {"ddp", "prepared", "compiled"}
        if isinstance(node, ast.Name | ast.Attribute):
            return self._kinds.get(self.key(node), NONE)
        return NONE

    def _kinds_of_call(self, call: ast.Call) -> Kinds:
        name, dotted = self.name(call), self.qualified(call.func)
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        if name in self.classes and receiver is None:
            module = {"model", "local"} if self.is_a(name, "Module", "LightningModule", "PreTrainedModel") else set()
            trainer = {"hf_trainer"} if self.is_a(name, "Trainer") else set()
            return frozenset({f"class:{name}", *module, *trainer})
        if name in WRAPPERS and call.args and dotted != "re.compile":
            state = WRAPPERS[name]
            return self.kinds(call.args[0]) | ({state, "model"} if state in MODEL_WRAPPERS else {state})
        if name in OPTIMIZERS:
            return frozenset({"optimizer"})
        if (name.startswith("get_") and "schedule" in name) or (name.endswith("LR") and name[0].isupper()) or (
            "lr_scheduler." in dotted
        ):  # fmt: skip
            return frozenset({"scheduler"})
        if name in LOSSES:
            return frozenset({"criterion", name})
        if name in ("from_pretrained", "from_config") and receiver is not None:
            owner = self.qualified(receiver).rpartition(".")[2]
            if "Tokenizer" in owner:
                return frozenset({"tokenizer"})
            if "Model" in owner or "For" in owner:
                causal = {"causal"} if "CausalLM" in owner or "LMHead" in owner else set()
                return frozenset({"model", "hf", "pretrained" if name == "from_pretrained" else "hf", *causal})
            return NONE
        if name in BY_NAME:
            return frozenset({BY_NAME[name]})
        if name == "unwrap_model" and call.args:
            return self.kinds(call.args[0]) - {"ddp", "prepared"}
        if name in SAME_VALUE and receiver is not None:
            return self.kinds(receiver)
        if (dotted.startswith(("torch.nn.", "torchvision.models.")) and name[:1].isupper()) or ".models." in dotted:
            return frozenset({"model"})
        if (function := self.local_function(call)) is not None:
            return self._returned.get(function, NONE)
        return NONE

    def local_function(self, call: ast.Call) -> Function | None:
        """The script's own function or method that a call runs."""
        if isinstance(call.func, ast.Name):
            if call.func.id in self.classes:
                return self.methods(call.func.id).get("__init__")
            return self.functions.get(call.func.id)
        if isinstance(call.func, ast.Attribute):
            owners = [kind[6:] for kind in self.kinds(call.func.value) if kind.startswith("class:")]
            if isinstance(call.func.value, ast.Name) and call.func.value.id == "self":
                owner = self.class_of(call)
                owners = [owner.name] if owner else []
            for name in owners:
                if (method := self.methods(name).get(call.func.attr)) is not None:
                    return method
        return None

    def _follow_assignments(self) -> None:
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, node.value)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._assign(node.optional_vars, node.context_expr)
            elif isinstance(node, ast.Call):
                if self.name(node) == "fully_shard" and node.args:
                    self._add(node.args[0], frozenset({"fsdp", "model"}))
                if (function := self.local_function(node)) is not None:
                    self._bind(function, node)

    @cached_property
    def assigned(self) -> dict[str, list[ast.expr]]:
        """The expressions that are assigned to each variable, in the order of the text."""
        values: dict[str, list[ast.expr]] = {}
        for node in self.nodes:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for element, value in pairs:
                    values.setdefault(self.key(element), []).append(value)
        for expressions in values.values():
            expressions.sort(key=lambda value: (value.lineno, value.col_offset))
        return values

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for element, kinds in zip(target.elts, self._parts(value, len(target.elts)), strict=False):
                self._add(element, kinds)
        else:
            self._add(target, self.kinds(value))

    def _parts(self, value: ast.expr, count: int) -> list[Kinds]:
        """The kinds of each value that a tuple assignment unpacks."""
        if isinstance(value, ast.Tuple | ast.List):
            return [self.kinds(element) for element in value.elts]
        if isinstance(value, ast.Call):
            name = self.name(value)
            if name in ("prepare", "setup") and isinstance(value.func, ast.Attribute):
                return [self.kinds(given) | {"prepared"} for given in value.args]
            if name == "initialize" and "deepspeed" in self.qualified(value.func):
                return [frozenset({kind}) for kind in ("engine", "optimizer", "loader", "scheduler")][:count]
            function = self.local_function(value)
            for node in ast.walk(function) if function is not None else ():
                if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                    return [self.kinds(element) for element in node.value.elts]
        return []

    def _add(self, target: ast.expr, kinds: Kinds) -> None:
        if kinds and (key := self.key(target)):
            self._kinds[key] = self._kinds.get(key, NONE) | kinds

    def _bind(self, function: Function, call: ast.Call) -> None:
        """The parameters of a function take the kinds of the arguments that it is called with."""
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        given = [*zip(names, call.args, strict=False), *((word.arg, word.value) for word in call.keywords if word.arg)]
        for name, value in given:
            if name is not None and (kinds := self.kinds(value)):
                key = f"{function.name}@{function.lineno}:{name}"
                self._kinds[key] = self._kinds.get(key, NONE) | kinds
