"""A native model as a traced graph with its cache as inputs: a torch.export program (`--to pt`) or ONNX (`--to onnx`).

One graph serves the prompt and every later token. Inputs and outputs have the names that users of ONNX Runtime and
transformers.js know: input_ids, attention_mask, position_ids, past_key_values.N.key (and value), logits, present.N.key.
Legend: B batch, T new tokens, P cached ones, S = P + T, N heads, K key-value heads, D head size.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.export.gate import Mismatch
from bessemer.export.outputs import OutputComparison, ReferenceOutputs, compare, reference
from bessemer.export.source import ExportSource
from bessemer.model.attention import AttentionInputs, LayerCache
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.families.folder import _write, atomic_folder
from bessemer.model.layers import RotaryTable, alibi_slopes, attention_factor, frequencies
from bessemer.model.moe import MixtureOfExperts, choose_experts
from bessemer.model.transformer import Decoder
from bessemer.observe.progress import ProgressReport, silent
from bessemer.spec.shape import ModelShape

TOLERANCE = 1e-4  # of the largest logit, in float32
_LARGE = -1e30  # instead of -inf: a row of padding attends to nothing, and must not give NaN
Run = Callable[[Tensor, Tensor, Tensor, Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class GraphExport:
    """A written graph. `agreement` is None if it was not checked."""

    folder: Path
    file: str
    parameters: int
    agreement: OutputComparison | None


def check_graph(shape: ModelShape) -> None:
    """Raises UserError for a model that cannot be traced with its cache."""
    problems = {
        "encoder-decoders": shape.decoder_layers > 0,
        "models that transformers runs": bool(shape.wrapped),
        "state spaces": "mamba" in shape.mixers,
        "latent attention": shape.mla is not None,
        "block-sparse attention": bool(shape.blocks[0]) or shape.global_tokens > 0,
        f"{shape.positions} positions": shape.positions in ("sinusoidal", "relative"),
        f"rope scaling {shape.rope.scaling}": shape.rope.scaling in ("dynamic", "longrope"),
        "rounded ALiBi": shape.alibi_rounded,
    }
    for problem, occurs in problems.items():
        if occurs:
            raise UserError(f"--to onnx and --to pt do not trace {problem}: use --to hf")


class _Cache(LayerCache):
    """Keys and values of a layer, (B, K, P, D) at the graph's border and (B, P, K, D) inside."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys.transpose(1, 2), values.transpose(1, 2)

    def extend(self, k_BTKD: Tensor, v_BTKE: Tensor) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys, self.values = torch.cat((self.keys, k_BTKD), 1), torch.cat((self.values, v_BTKE), 1)
        return self.keys, self.values


class _PlainAttention:
    """Takes the place of context parallelism, which layers pass their queries, keys and values to: the formula in
    operations that every runtime knows, for sizes that are not known yet."""

    size = 1

    def __init__(self, shape: ModelShape, mask_BS: Tensor, past: int, positions_BT: Tensor) -> None:
        self.shape, self.mask_BS, self.past, self.positions_BT = shape, mask_BS, past, positions_BT

    def attend(
        self, q_BTND: Tensor, k_BSKD: Tensor, v_BSKE: Tensor, _: AttentionMask, window: int, scale: float, *__: Any
    ) -> Tensor:
        T, S, groups = q_BTND.shape[1], k_BSKD.shape[1], self.shape.heads // self.shape.kv_heads
        q_T1 = torch.arange(T, device=q_BTND.device)[:, None] + self.past
        k_S = torch.arange(S, device=q_BTND.device)
        visible_BTS = self.mask_BS[:, None] > 0
        if self.shape.causal:
            visible_BTS = visible_BTS & (k_S <= q_T1)
        if window:
            visible_BTS = visible_BTS & (q_T1 - k_S < window) & (k_S - q_T1 < window)
        k_BNSD, v_BNSE = (x.transpose(1, 2).repeat_interleave(groups, 1) for x in (k_BSKD, v_BSKE))
        logits_BNTS = (q_BTND.transpose(1, 2) @ k_BNSD.transpose(-1, -2)) * scale
        if self.shape.attention_cap is not None:
            logits_BNTS = self.shape.attention_cap * torch.tanh(logits_BNTS / self.shape.attention_cap)
        if self.shape.positions == "alibi":  # the distance from a query differs from the key's place by a constant
            slopes_N = alibi_slopes(self.shape.heads)
            places_BS = self.mask_BS.cumsum(-1) - 1
            logits_BNTS = logits_BNTS + slopes_N[:, None, None] * places_BS[:, None, None]
        probs_BNTS = logits_BNTS.masked_fill(~visible_BTS[:, None], _LARGE).softmax(-1)
        return (probs_BNTS @ v_BNSE).transpose(1, 2)


class _Positions(AttentionMask):
    """The positions that the caller gives."""

    def positions(self, start: int, T: int, device: torch.device) -> Tensor:
        assert isinstance(self.exchange, _PlainAttention)
        return self.exchange.positions_BT


class _DenseExperts(nn.Module):
    """All experts on every token, weighted by the router: the same sum without sizes that depend on the data."""

    def __init__(self, experts: MixtureOfExperts) -> None:
        super().__init__()
        self.inner = experts

    def forward(self, x_BTW: Tensor, _: Tensor | None = None) -> Tensor:
        inner, moe = self.inner, self.inner.moe
        x_NW = x_BTW.flatten(0, -2)
        logits_NE = inner.router(x_NW)
        scores_NE = logits_NE.softmax(-1) if moe.score == "softmax" else logits_NE.sigmoid()
        choice_NK = choose_experts(scores_NE, moe, inner.choice_bias)
        weights_NE = torch.zeros_like(scores_NE).scatter(1, choice_NK, scores_NE.gather(1, choice_NK))
        if moe.normalise:
            weights_NE = weights_NE / (weights_NE.sum(-1, keepdim=True) + 1e-20)
        up_ENF = x_NW @ inner.up.transpose(1, 2)
        gated_ENF = inner.activate(up_ENF) if inner.gate is None else inner.activate(x_NW @ inner.gate.mT) * up_ENF
        out_NW = ((gated_ENF @ inner.down.mT) * (moe.scale * weights_NE).T[..., None]).sum(0)
        shared = 0 if inner.shared is None else inner.shared(x_NW)
        return (out_NW + shared).view_as(x_BTW)


class TracedModel(nn.Module):
    """The model as a function of tensors alone. Without a causal mask there is no cache."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model.eval()
        for block in model.blocks:
            if isinstance(getattr(block, "ffn", None), MixtureOfExperts):
                block.ffn = _DenseExperts(block.ffn)  # type: ignore[arg-type, assignment]

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: Sequence[Tensor]
    ) -> list[Tensor]:
        model = self.model
        past = past_key_values[0].shape[2] if past_key_values else 0
        plain = _PlainAttention(model.shape, attention_mask, past, position_ids)
        mask = _Positions(causal=model.shape.causal, exchange=plain)  # type: ignore[arg-type]
        x_BTW = model.embed(input_ids, mask)
        inputs = AttentionInputs(mask, *(self._rotary(table, position_ids) for table in _tables(model)))  # type: ignore[arg-type]
        caches = [_Cache(*past_key_values[i : i + 2]) for i in range(0, len(past_key_values), 2)]
        for i, block in enumerate(model.blocks):
            x_BTW = block(x_BTW, inputs, caches[i] if caches else None)
        if model.shape.norm_place != "post":
            x_BTW = model.norm(x_BTW)
        logits_BTV = model.logits(x_BTW if model.transform is None else model.transform(x_BTW))
        present = [x.transpose(1, 2) for cache in caches for x in (cache.keys, cache.values) if x is not None]
        return [logits_BTV, *present]

    def _rotary(self, table: RotaryTable | None, positions_BT: Tensor) -> tuple[Tensor, Tensor] | None:
        if table is None:
            return None
        angles = positions_BT[..., None].float() * frequencies(table.size, table.rope, 0)
        angles, factor = torch.cat((angles, angles), -1), attention_factor(table.rope)
        return angles.cos() * factor, angles.sin() * factor


def _tables(model: Decoder) -> tuple[RotaryTable | None, RotaryTable | None]:
    return model.rotary, model.local_rotary


def cache_names(shape: ModelShape, prefix: str) -> list[str]:
    if not shape.causal or shape.labels:
        return []
    return [f"{prefix}.{layer}.{part}" for layer in range(shape.layers) for part in ("key", "value")]


def _example(shape: ModelShape, batch: int, tokens: int, past: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    caches = [torch.zeros(batch, shape.kv_heads, past, shape.head_dim) for _ in cache_names(shape, "past")]
    mask = torch.ones(batch, tokens + (past if caches else 0), dtype=torch.long)
    return ids, mask, ids + torch.arange(tokens), caches


def trace(model: Decoder) -> torch.export.ExportedProgram:
    """The graph with a dynamic batch and dynamic numbers of new and cached tokens. The example's sizes differ and are
    above 1, since torch.export freezes 0, 1 and dimensions that are equal."""
    auto = torch.export.Dim.DYNAMIC
    arguments = _example(model.shape, 2, 5, 3)
    shapes = ({0: auto, 1: auto}, {0: auto, 1: auto}, {0: auto, 1: auto}, [{0: auto, 2: auto} for _ in arguments[3]])
    with torch.no_grad(), _quiet():
        return torch.export.export(TracedModel(model), arguments, dynamic_shapes=shapes)


@contextmanager
def _quiet() -> Any:
    """Hides the exporters' progress and warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def to_graph(
    source: ExportSource, out: Path, kind: str, check: bool = True, overwrite: bool = False,
    report: ProgressReport = silent,
) -> GraphExport:  # fmt: skip
    """Write a folder with model.onnx or model.pt2, the tokenizer and config.json."""
    model = source.model
    check_graph(model.shape)
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if kind == "onnx" and missing:
        raise UserError(f"--to onnx needs the package {missing[0]}: pip install 'bessemer[onnx]'")
    rows_RT, _ = source.tokens()
    ours = reference(model, rows_RT) if check else None
    parameters = model.shape.parameters
    report("tracing the model")
    program = trace(model)
    file = "model.onnx" if kind == "onnx" else "model.pt2"
    agreement = None
    with atomic_folder(out, overwrite) as folder:
        folder.mkdir(parents=True)
        report("writing the graph")
        (write_onnx if kind == "onnx" else write_program)(program, model.shape, folder / file)
        for name, content in source.files().items():
            _write(folder / name, content)
        if ours is not None:
            consumer, opener = ("ONNX Runtime", _open_onnx) if kind == "onnx" else ("torch.export", _open_program)
            report(f"opening it with {consumer}")
            agreement = check_outputs(ours, model.shape, opener(folder / file), consumer)
    return GraphExport(out, file, parameters, agreement)


def write_program(program: torch.export.ExportedProgram, _: ModelShape, file: Path) -> None:
    with _quiet():
        torch.export.save(program, file)


def write_onnx(program: torch.export.ExportedProgram, shape: ModelShape, file: Path) -> None:
    names = ["input_ids", "attention_mask", "position_ids", *cache_names(shape, "past_key_values")]
    outputs = ["logits", *cache_names(shape, "present")]
    with _quiet():
        torch.onnx.export(program, (), file, input_names=names, output_names=outputs, dynamo=True, verbose=False)


def _open_onnx(file: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(ids: Tensor, mask: Tensor, positions: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        feeds = dict(zip(["input_ids", "attention_mask", "position_ids"], (ids, mask, positions), strict=True))
        feeds |= dict(zip([name for name in names if name.startswith("past")], past, strict=True))
        outputs = session.run(None, {name: feeds[name].numpy() for name in names})
        return [torch.from_numpy(x) for x in outputs]

    return run


def _open_program(file: Path) -> Run:
    with _quiet():
        module = torch.export.load(file).module()

    def run(ids: Tensor, mask: Tensor, positions: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            outputs: list[Tensor] = module(ids, mask, positions, list(past))
        return outputs

    return run


def check_outputs(ours: ReferenceOutputs, shape: ModelShape, run: Run, consumer: str) -> OutputComparison:
    """The rows in one batch without a cache; then the prompt, and the greedy continuation token by token."""
    try:
        logits_RTV = run(*_inputs(shape, ours.rows_RT, 0, []))[0]
        if not cache_names(shape, ""):
            return compare(ours, logits_RTV, ours.steps_SV, consumer, TOLERANCE)
        logits, *past = run(*_inputs(shape, torch.tensor([ours.prompt]), 0, []))
        steps = [logits[0, -1]]
        for i, token in enumerate(ours.steps):
            logits, *past = run(*_inputs(shape, torch.tensor([[token]]), len(ours.prompt) + i, past))
            steps.append(logits[0, -1])
    except Exception as error:  # runtimes have exceptions of their own
        raise Mismatch(f"{consumer} does not run the graph: {str(error).splitlines()[0]}") from error
    return compare(ours, logits_RTV, torch.stack(steps), consumer, TOLERANCE)


def _inputs(
    shape: ModelShape, ids: Tensor, past: int, caches: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]:
    _, mask, positions, empty = _example(shape, len(ids), ids.shape[1], past)
    return ids, mask, positions + past, caches or empty
