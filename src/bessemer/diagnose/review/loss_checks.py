"""Checks of the loss: activations applied twice, shifted labels, padding, and what counts as better."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from bessemer.diagnose.review.catalogue import ScriptFault
from bessemer.diagnose.review.edits import SourceEdit
from bessemer.diagnose.review.flow import SHAPES, before, definitions, origin, shaped
from bessemer.diagnose.review.script import TrainingScript
from bessemer.diagnose.review.trace import Trace, is_model, last_part

ACTIVATIONS = {
    "softmax": "softmax", "Softmax": "softmax", "log_softmax": "log_softmax", "LogSoftmax": "log_softmax",
    "sigmoid": "sigmoid", "Sigmoid": "sigmoid",
}  # fmt: skip
LOSSES = {
    "cross_entropy": "CrossEntropyLoss", "nll_loss": "NLLLoss",
    "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
}  # fmt: skip
# (loss, last activation of its input): rule
TWICE = {
    ("CrossEntropyLoss", "softmax"): "softmax-into-cross-entropy",
    ("CrossEntropyLoss", "sigmoid"): "softmax-into-cross-entropy",
    ("CrossEntropyLoss", "log_softmax"): "log-softmax-twice",
    ("BCEWithLogitsLoss", "sigmoid"): "sigmoid-twice",
    ("NLLLoss", "softmax"): "nll-without-log-softmax",
}
TOKENS = re.compile(r"(^|_)(ids?|tok\w*|input\w*|seq\w*|idx|tokens)($|_)|input_ids")
REBUILDS = re.compile(r"encoder|vae|recon|mask|noise|corrupt|denois|pixelcnn|bidirectional")  # the input is the target


def loss_calls(script: TrainingScript) -> Iterator[tuple[ast.Call, str]]:
    """Calls of a loss with the name of its class; scores of evaluations count too."""
    for node in script.nodes:
        if isinstance(node, ast.Call) and len(node.args) + len(node.keywords) >= 2:
            name = LOSSES.get(script.name(node), "")
            kinds = script.kinds(node.func) | (
                script.kinds(node.func.value) if script.name(node) == "forward" else frozenset()  # type: ignore
            )
            name = name or next((kind for kind in kinds if kind in LOSSES.values()), "")
            if name:
                yield node, name


def activation(script: TrainingScript, node: ast.expr, depth: int = 0) -> tuple[str, ast.expr | None]:
    """The activation that an expression ends with, and where it is applied; "" if none or unknown."""
    source = origin(script, node)
    if not isinstance(source, ast.Call) or depth > 4:
        return "", None
    name = script.name(source)
    if name in ("softmax", "log_softmax", "sigmoid"):
        return name, source
    if name == "Sequential" and source.args:
        last = source.args[-1]
        return ACTIVATIONS.get(script.name(last), ""), last
    for made in [*definitions(script, source.func), *_attribute_of_class(script, source.func)]:
        made_name = script.name(made)
        if made_name in ACTIVATIONS:
            return ACTIVATIONS[made_name], source  # an nn.Softmax that is called
        if made_name == "Sequential":
            return activation(script, made, depth + 1)
    for kind in script.kinds(source.func):
        if kind.startswith("class:") and (forward := script.methods(kind[6:]).get("forward")) is not None:
            for returned in (part for part in ast.walk(forward) if isinstance(part, ast.Return) and part.value):
                assert returned.value is not None
                value = returned.value.elts[0] if isinstance(returned.value, ast.Tuple) else returned.value
                kind_of_value, place = activation(script, value, depth + 1)
                if kind_of_value:
                    return kind_of_value, place
    return "", None


def _attribute_of_class(script: TrainingScript, node: ast.expr) -> list[ast.expr]:
    """What `self.x = ...` in any method assigned to the attribute that a call uses."""
    return definitions(script, node) if isinstance(node, ast.Attribute) else []


def drop_activation(script: TrainingScript, place: ast.expr) -> tuple[SourceEdit, ...]:
    """Replace softmax(x, dim=1) and x.softmax(1) by x; remove nn.Softmax from a Sequential."""
    parent = script.parents.get(place)
    if isinstance(parent, ast.Call) and script.name(parent) == "Sequential" and place in parent.args[1:]:
        previous = parent.args[parent.args.index(place) - 1]
        start, end = script.source.span(previous)[1], script.source.span(place)[1]
        return (SourceEdit(start, end, ""),)
    if not isinstance(place, ast.Call):
        return ()
    if isinstance(place.func, ast.Attribute) and script.qualified(place.func.value).partition(".")[0] not in (
        "torch", "self"
    ):  # fmt: skip
        return (script.source.replace(place, script.text(place.func.value)),)
    return (script.source.replace(place, script.text(place.args[0])),) if place.args else ()


def check_activations(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for call, loss in loss_calls(script):
        first = script.argument(call, "input", 0)
        if first is None:
            continue
        applied, place = activation(script, first)
        rule = TWICE.get((loss, applied))
        if rule is None or place is None:
            continue
        edits = drop_activation(script, place)
        if rule == "nll-without-log-softmax" and isinstance(place, ast.Call):
            func = script.text(place.func)
            edits = (script.source.replace(place.func, func.replace("softmax", "log_softmax").replace(
                "Softmax", "LogSoftmax")),)  # fmt: skip
        yield ScriptFault(rule, place.lineno, f"{applied} is applied to what {loss} takes as logits", edits)


def check_shift(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    for forward in trace.of("forward"):
        call = forward.node
        labels = script.argument(call, "labels")
        ids = script.argument(call, "input_ids", 0)
        if labels is None or ids is None or "causal" not in script.kinds(call.func):
            continue
        shifted, base = _slice(script, labels), _slice(script, ids)
        if shifted[0] == "1:" and base[0] == ":-1" and shifted[1] == base[1] and shifted[2] and base[2]:
            edits = (script.source.replace(shifted[2], shifted[1]), script.source.replace(base[2], base[1]))
            yield ScriptFault(
                "labels-shifted-twice", labels.lineno, "labels are shifted before a model that shifts them", edits
            )
    for value, ids, shift in shifted_copies(script):
        edit = script.source.replace(value, f"{script.text(ids)}.copy()")
        place = shift.lineno
        yield ScriptFault("labels-shifted-twice", place, "labels are shifted for a model that shifts them", (edit,))
    for call, loss in loss_calls(script):
        if loss == "CrossEntropyLoss" and len(call.args) >= 2:
            yield from _unshifted(script, call)


def shifted_copies(script: TrainingScript) -> Iterator[tuple[ast.expr, ast.expr, ast.expr]]:
    """Labels made as `ids[1:] + [-100]` for a causal model of transformers: the value, the ids, the shift."""
    if not script.holds("causal") or any(True for _ in loss_calls(script)):
        return
    for node in script.nodes:
        values: list[ast.expr] = []
        assigns = isinstance(node, ast.Assign) and "label" in ast.unparse(node.targets[0])
        if isinstance(node, ast.Assign | ast.keyword) and (assigns or getattr(node, "arg", "") == "labels"):
            values = [node.value]
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            values = [value for key, value in pairs if isinstance(key, ast.Constant) and key.value == "labels"]
        for value in values:
            shift = value.elt if isinstance(value, ast.ListComp) else value
            if not _adds_one_to_shifted(shift):
                continue
            assert isinstance(shift, ast.BinOp) and isinstance(shift.left, ast.Subscript)
            ids = shift.left.value
            if isinstance(value, ast.ListComp):
                part = value.generators[0]
                if len(value.generators) > 1 or part.ifs or ast.unparse(part.target) != ast.unparse(ids):
                    continue
                ids = part.iter
            yield value, ids, shift


def _adds_one_to_shifted(node: ast.expr) -> bool:
    """ids[1:] + [one]."""
    return (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.left, ast.Subscript)
        and ast.unparse(node.left.slice) == "1:" and isinstance(node.right, ast.List) and len(node.right.elts) == 1
    )  # fmt: skip


def _slice(script: TrainingScript, node: ast.expr) -> tuple[str, str, ast.expr | None]:
    """`1:` or `:-1`, the sliced expression and the node of x[:, 1:]."""
    node = origin(script, node)
    if isinstance(node, ast.Subscript):
        cut = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
        if isinstance(cut, ast.Slice):
            return ast.unparse(cut), ast.unparse(node.value), node
    return "", "", None


def _base(script: TrainingScript, node: ast.expr) -> ast.expr:
    node = shaped(node)
    while isinstance(node, ast.Attribute) and node.attr == "logits":
        node = node.value
    return node


def _unshifted(script: TrainingScript, call: ast.Call) -> Iterator[ScriptFault]:
    logits, target = _uncut(_base(script, call.args[0])), shaped(call.args[1])
    source = _uncut(origin(script, logits))
    while isinstance(source, ast.Attribute | ast.Subscript) and not isinstance(
        getattr(source, "slice", None), ast.Tuple
    ):
        if isinstance(source, ast.Subscript) and not isinstance(source.slice, ast.Constant):
            return
        source = origin(script, source.value)
    if not isinstance(source, ast.Call) or not is_model(script, source.func):
        return
    ids = script.argument(source, "input_ids", 0)
    aim = origin(script, target)
    if ids is None:
        return
    if not TOKENS.search(last_part(ids) or ast.unparse(ids)) and REBUILDS.search(script.source.text.lower()):
        return
    if ast.unparse(origin(script, ids)) != ast.unparse(aim) or "[:" in ast.unparse(aim):
        return
    if not isinstance(call.args[0], ast.Call) or isinstance(aim, ast.Call):
        return  # only a flattened sequence is surely one
    edits: list[SourceEdit] = []
    for argument, cut in ((call.args[0], "[:, :-1]"), (call.args[1], "[:, 1:]")):
        inner = _innermost(argument)
        edits.append(script.source.replace(inner, script.text(_uncut(inner)) + cut))
        for part in ast.walk(argument):
            if isinstance(part, ast.Attribute) and part.attr == "view":
                end = script.source.span(part)[1]
                edits.append(SourceEdit(end - 4, end, "reshape"))
    yield ScriptFault("labels-not-shifted", call.lineno, "logits are compared with their own input", tuple(edits))


def _uncut(node: ast.expr) -> ast.expr:
    """x of x[:, :]."""
    while isinstance(node, ast.Subscript):
        cuts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not all(ast.unparse(cut) in (":", "...", "Ellipsis") for cut in cuts):
            break
        node = node.value
    return node


def _innermost(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHAPES:
        node = node.func.value
    return node


def pads(script: TrainingScript) -> bool:
    """Whether the script pads token rows itself."""
    for call in (node for node in script.nodes if isinstance(node, ast.Call)):
        value = script.argument(call, "padding")
        if value is not None and not (isinstance(value, ast.Constant) and value.value in (False, None)):
            return True
    return False


def _ids_of(value: ast.expr) -> tuple[ast.expr | None, str]:
    """The expression of the ids that labels are copied from, and how: clone, copy or same."""
    how = "same"
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in ("clone", "copy"):
        how, value = value.func.attr, value.func.value
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant) and value.slice.value == "input_ids":
        return value, how
    return (value, how) if isinstance(value, ast.Attribute) and value.attr == "input_ids" else (None, how)


def mask_of(ids: ast.expr) -> str:
    return ast.unparse(ids).replace("input_ids", "attention_mask").replace("'", '"')


def label_copies(script: TrainingScript) -> Iterator[tuple[ast.expr, ast.expr, str, ast.Assign | None]]:
    """Where labels are copied from input_ids: the value, the ids, how, and the assignment if it is one."""
    for node in script.nodes:
        if isinstance(node, ast.Assign) and "label" in ast.unparse(node.targets[0]):
            ids, how = _ids_of(node.value)
            if ids is not None:
                yield node.value, ids, how, node
        elif isinstance(node, ast.keyword) and node.arg == "labels":
            ids, how = _ids_of(node.value)
            if ids is not None:
                yield node.value, ids, how, None
    for value, ids, _ in shifted_copies(script):
        if _ids_of(ids)[0] is not None:
            yield value, ids, "copy", None


def check_padding(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    text = script.source.text
    masks = any(
        isinstance(node, ast.UnaryOp) and ast.unparse(node) == "-100"
        and not any(isinstance(above, ast.expr) and _adds_one_to_shifted(above) for above in script.ancestors(node))
        for node in script.nodes
    )  # fmt: skip
    own_collator = any("DataCollator" in name for name in script.imports) or "ignore_index" in text
    for value, ids, how, assign in label_copies(script):
        if masks or own_collator or not pads(script):
            break
        yield ScriptFault(
            "pad-in-loss", value.lineno, "labels are a copy of padded input ids",
            _mask_labels(script, value, ids, how, assign),
        )  # fmt: skip
    for forward in trace.of("forward"):
        call = forward.node
        given_ids = script.argument(call, "input_ids", 0)
        pretrained = "hf" in script.kinds(call.func)
        if given_ids is None or not pretrained or not pads(script) or _ids_of(given_ids)[0] is None:
            continue
        given = {word.arg for word in call.keywords}
        if not given & {"attention_mask", None} and len(call.args) < 2:
            end = script.source.span(call)[1] - 1
            edit = SourceEdit(end, end, f", attention_mask={mask_of(given_ids)}")
            yield ScriptFault("attention-mask-missing", call.lineno, "padded ids without attention_mask", (edit,))


def _mask_labels(
    script: TrainingScript, value: ast.expr, ids: ast.expr, how: str, assign: ast.Assign | None
) -> tuple[SourceEdit, ...]:
    tensors = how == "clone" or (how == "same" and (assign is None or "return_tensors" in script.source.text))
    if not tensors:
        batched = any(script.argument(call, "batched") is not None for call in script.calls("map"))
        rows = "[-100 if m == 0 else t for t, m in zip({}, {})]"
        one = rows.format(ast.unparse(ids).replace("'", '"'), mask_of(ids))
        many = f"[{rows.format('row', 'mask')} for row, mask in zip({script.text(ids)}, {mask_of(ids)})]"
        return (script.source.replace(value, many if batched else one),)
    if assign is not None and how == "clone":
        return (script.source.after(assign, f"{script.text(assign.targets[0])}[{mask_of(ids)} == 0] = -100"),)
    return (script.source.replace(value, f"{script.text(ids)}.masked_fill({mask_of(ids)} == 0, -100)"),)


def check_pad_token(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    """pad_token = eos_token, where padding is masked by its id."""
    shared = [
        node for node in script.nodes if isinstance(node, ast.Assign)
        and last_part(node.targets[0]) in ("pad_token", "pad_token_id")
        and last_part(node.value).startswith("eos_token")
    ]  # fmt: skip
    if not shared:
        return
    for node in script.nodes:
        if isinstance(node, ast.Compare) and any(last_part(side) == "pad_token_id" for side in node.comparators):
            masked = script.parents[node]
            if isinstance(script.statement(node), ast.If) or not isinstance(masked, ast.Subscript | ast.Call):
                continue
            source = before(definitions(script, node.left), node)
            ids = _ids_of(source)[0] if source is not None else None
            edits: tuple[SourceEdit, ...] = ()
            if ids is not None:
                edits = (script.source.replace(node, f"{mask_of(ids)} == 0"),)
            yield ScriptFault("pad-is-eos", node.lineno, "masking padding by its id masks the end of text", edits)
            return
    if any(True for _ in script.calls("DataCollatorForLanguageModeling")):
        assign = shared[0]
        tokenizer = script.text(assign.targets[0]).rpartition(".")[0]
        models = [
            node for node in script.nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
            and "hf" in script.kinds(node.value) and isinstance(node.targets[0], ast.Name)
        ]  # fmt: skip
        edits = ()
        if models:
            model = models[0]
            resize = f"{script.text(model.targets[0])}.resize_token_embeddings(len({tokenizer}))"
            place = assign if assign.lineno > model.lineno else model
            added = f'{tokenizer}.add_special_tokens({{"pad_token": "<|pad|>"}})'
            edits = (
                (script.source.replace(assign, added), script.source.after(place, resize)) if place is not assign
                else (script.source.replace(assign, f"{added}\n{script.source.indent_of(assign)}{resize}"),)
            )  # fmt: skip
        yield ScriptFault("pad-is-eos", assign.lineno, "the collator masks every pad id, the end of text too", edits)


def check_best(script: TrainingScript, trace: Trace) -> Iterator[ScriptFault]:
    """`if val_loss > best_loss:` before a save, and greater_is_better with a loss."""
    for node in script.nodes:
        if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare) or len(node.test.ops) != 1:
            continue
        left, right, sign = node.test.left, node.test.comparators[0], node.test.ops[0]
        left_loss, right_loss = _is_loss(script, left), _is_loss(script, right)
        worse = isinstance(sign, ast.Gt | ast.GtE) and left_loss and "best" in last_part(right).lower()
        worse = worse or (isinstance(sign, ast.Lt | ast.LtE) and right_loss and "best" in last_part(left).lower())
        updates = any(
            isinstance(s, ast.Assign) and any("best" in ast.unparse(t).lower() for t in s.targets) for s in node.body
        )
        if not worse or not updates or "best" in last_part(left if worse and left_loss else right).lower():
            continue
        best = right if left_loss and "best" in last_part(right).lower() else left
        swap = {">": "<", "<": ">"}
        text = script.text(node.test)
        edits = [script.source.replace(node.test, "".join(swap.get(letter, letter) for letter in text))]
        edits += [
            script.source.replace(value, 'float("inf")') for value in definitions(script, best)
            if isinstance(value, ast.Constant | ast.UnaryOp) or ast.unparse(value) in ("float('-inf')", "-math.inf")
        ]  # fmt: skip
        yield ScriptFault("best-keeps-worst", node.lineno, "the highest loss counts as best", tuple(edits))
    for call in script.calls("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig"):
        metric, greater = script.argument(call, "metric_for_best_model"), script.argument(call, "greater_is_better")
        named = metric.value if isinstance(metric, ast.Constant) else "loss" if metric is None else ""
        if greater is not None and isinstance(greater, ast.Constant) and greater.value is True and "loss" in str(named):
            edit = script.source.replace(greater, "False")
            yield ScriptFault("best-keeps-worst", greater.lineno, "greater_is_better with a loss", (edit,))


def _is_loss(script: TrainingScript, node: ast.expr) -> bool:
    """Whether a value is a loss, by its name or by each expression that it is computed by."""
    name = last_part(node).lower()
    if "best" in name or not name:
        return False
    values = definitions(script, node)
    computed = [part for part, _ in loss_calls(script)]
    return "loss" in name or "ppl" in name or "perplexity" in name or (bool(values) and all(
        any(part in computed for part in ast.walk(value))
        and not any(isinstance(part, ast.USub | ast.Sub | ast.Div | ast.Compare) for part in ast.walk(value))
        for value in values
    ))  # fmt: skip


CHECKS = (check_activations, check_shift, check_padding, check_pad_token, check_best)
