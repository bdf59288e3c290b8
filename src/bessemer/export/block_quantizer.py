"""Quantizes a model block by block. One block's weights are in memory; hidden states are in files that are mapped.

The rows of text are divided: calibration rows give the statistics of GPTQ and AWQ, choice rows decide between them,
test rows pass through the original and the quantized model and give the quality. A block's inputs are the outputs of
the quantized blocks before it, so that its weights make up for their errors.
Legend: R rows, B rows of a batch, T time, W width, I inputs of a linear layer, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.export.gptq import awq, gptq, output_error, round_to_nearest
from bessemer.export.input_groups import InputGroup, input_groups
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.families.compressed_tensors import FP8_MAX, QuantizedWeight, WeightFormat
from bessemer.model.transformer import Decoder

BATCH_TOKENS = 8192  # of a forward pass
SAMPLE_TOKENS = 96  # whose logits another program's are compared with
TensorReader = Callable[[str], Tensor]


@dataclass(frozen=True)
class LayerChoice:
    """How the layers of a block that share an input were quantized. `errors` are the squared output errors on the
    choice rows by method, relative to the outputs; empty where nothing had to be chosen."""

    name: str
    method: str
    errors: dict[str, float]


@dataclass(frozen=True)
class CompressionQuality:
    """Quality of the quantized model on the test rows, against the original. KL in nats per token."""

    tokens: int
    perplexity_before: float
    perplexity: float
    kl: float
    top1_agreement: float

    @property
    def increase(self) -> float:
        return self.perplexity / self.perplexity_before - 1


@dataclass
class BlockQuantizer:
    """`tensor` and `quantized` advance to the block of the name; ask for blocks in order. `model` is on the meta device
    and `read` gives its weights. `dtype` is that of all that is not quantized, scales included."""

    model: Decoder
    read: TensorReader
    form: WeightFormat
    method: str  # rtn, gptq, awq or auto
    dtype: torch.dtype
    tokens_RT: Tensor
    device: torch.device
    scratch: Path
    choices: list[LayerChoice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block = -1
        self._results: dict[str, Tensor | QuantizedWeight] = {}
        self._mask = AttentionMask()
        self._mask.configure(self.model.shape)
        rows = range(len(self.tokens_RT))
        self.test_rows = [row for row in rows if row % 4 == 3]
        learned = [row for row in rows if row % 4 != 3]
        self.choice_rows, self.calibration_rows = learned[::4], [row for i, row in enumerate(learned) if i % 4]
        self._full, self._hidden = self._embed("full", self.test_rows, False), self._embed("quantized", rows, True)
        self.sample_logits: Tensor | None = None

    def tensor(self, name: str) -> Tensor:
        """A tensor that is not quantized, in the stored dtype."""
        if not name.startswith("blocks."):
            return self.read(name).to(self.dtype)
        tensor = self._result(name)
        assert isinstance(tensor, Tensor)
        return tensor

    def quantized(self, name: str) -> QuantizedWeight:
        weight = self._result(name)
        assert isinstance(weight, QuantizedWeight)
        return weight

    def _result(self, name: str) -> Tensor | QuantizedWeight:
        block = int(name.split(".")[1])
        assert block >= self.block, f"{name} is asked for after block {self.block}"
        while self.block < block:
            self._advance()
        return self._results[name]

    @torch.no_grad()
    def _advance(self) -> None:
        self.block += 1
        block, prefix = self.model.blocks[self.block], f"blocks.{self.block}."
        with _loaded({prefix: block}, self.read, self.device):
            self._run(block, self._full, range(len(self._full)))
            groups = input_groups(block)  # type: ignore[arg-type]
            plain = self.method == "rtn"
            hessians = [] if plain else self._hessians(block, groups, self.calibration_rows)
            judges = [] if plain else self._hessians(block, groups, self.choice_rows)
            self._results = {}
            for i, group in enumerate(groups):
                self._quantize(group, prefix, *(() if plain else (hessians[i], judges[i])))
            for name, tensor in block.state_dict().items():
                if prefix + name not in self._results:
                    tensor.copy_(tensor.to(self.dtype))
                    self._results[prefix + name] = tensor.to("cpu", self.dtype)
            with self._quantized_inputs(groups):
                self._run(block, self._hidden, range(len(self._hidden)))

    def _quantize(
        self, group: InputGroup, prefix: str, hessian_II: Tensor | None = None, judge_II: Tensor | None = None
    ) -> None:
        weight_OI, errors = group.weight, dict[str, float]()
        if hessian_II is None or judge_II is None:
            candidates: dict[str, tuple[QuantizedWeight, Tensor | None]]
            candidates = {"rtn": (round_to_nearest(weight_OI, self.form, self.dtype), None)}
            method = "rtn"
        else:
            candidates = self._candidates(group, weight_OI, hessian_II)
            scale = output_error(weight_OI, torch.zeros_like(weight_OI), judge_II) or 1.0
            for name, (quantized, factor_I) in candidates.items():
                dense_OI = quantized.dense() if factor_I is None else quantized.dense() / factor_I
                errors[name] = output_error(weight_OI, dense_OI, judge_II) / scale
            method = min(errors, key=lambda name: errors[name])
        self.choices.append(LayerChoice(f"{prefix}{group.name}", method, errors))
        chosen, factor_I = candidates[method]
        if factor_I is not None:
            group.divide_source(factor_I)
        at, dense_OI = 0, chosen.dense()
        for name, layer in group.layers.items():
            rows = slice(at, at := at + layer.weight.shape[0])
            layer.weight.copy_(dense_OI[rows])
            part = QuantizedWeight(self.form, chosen.codes_OI[rows].cpu(), chosen.scale_OG[rows].cpu())
            self._results[f"{prefix}{name}.weight"] = part

    def _candidates(
        self, group: InputGroup, weight_OI: Tensor, hessian_II: Tensor
    ) -> dict[str, tuple[QuantizedWeight, Tensor | None]]:
        """AWQ needs a layer before; without one, its search for scales alone is left."""
        candidates: dict[str, tuple[QuantizedWeight, Tensor | None]] = {}
        if self.method in ("gptq", "auto"):
            candidates["gptq"] = gptq(weight_OI, hessian_II, self.form, self.dtype), None
        if self.method in ("awq", "auto") and group.source is not None:
            candidates["awq"] = awq(weight_OI, hessian_II, self.form, self.dtype, group.tie)
        if not candidates:
            clipped = round_to_nearest(weight_OI, self.form, self.dtype, hessian_II.diagonal())
            candidates["scales"] = clipped, None
        return candidates

    def _hessians(self, block: nn.Module, groups: Sequence[InputGroup], rows: Sequence[int]) -> list[Tensor]:
        """X^T X of each group's inputs."""
        sums: dict[int, Tensor] = {}

        def add(i: int) -> Callable[..., None]:
            def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                x_NI = inputs[0].flatten(0, -2)
                sums[i] = x_NI.T @ x_NI if i not in sums else sums[i].addmm_(x_NI.T, x_NI)

            return hook

        first = [next(iter(group.layers.values())) for group in groups]
        handles = [layer.register_forward_pre_hook(add(i)) for i, layer in enumerate(first)]
        self._run(block, self._hidden, rows, store=False)
        for handle in handles:
            handle.remove()
        return [sums[i] for i in range(len(groups))]

    @contextmanager
    def _quantized_inputs(self, groups: Sequence[InputGroup]) -> Iterator[None]:
        """Within it, the inputs of the layers are rounded to fp8 with a scale per token, as servers do."""
        handles = []
        if self.form.is_float:
            layers = [layer for group in groups for layer in group.layers.values()]
            handles = [layer.register_forward_pre_hook(_fp8_input) for layer in layers]
        yield
        for handle in handles:
            handle.remove()

    def _run(self, block: nn.Module, hidden_RTW: Tensor, rows: Sequence[int], store: bool = True) -> None:
        """The block over some rows of the hidden states, in place."""
        size = max(1, BATCH_TOKENS // hidden_RTW.shape[1])
        inputs = None
        for start in range(0, len(rows), size):
            batch = list(rows[start : start + size])
            x_BTW = hidden_RTW[batch].to(self.device)
            if inputs is None:
                inputs = self.model.attention_inputs(x_BTW, self._mask)
            y_BTW = block(x_BTW, inputs)
            if store:
                hidden_RTW[batch] = y_BTW.to(hidden_RTW.device)

    @torch.no_grad()
    def _embed(self, name: str, rows: Sequence[int], rounded: bool) -> Tensor:
        """The hidden states before the first block, in a mapped file."""
        modules = dict(self.model.named_children())
        names = [n for n in ("embedding", "position", "types", "embedding_norm") if n in modules]
        T, W = self.tokens_RT.shape[1], self.model.shape.width
        file = str(self.scratch / f"{name}.hidden")
        hidden_RTW = torch.from_file(file, shared=True, size=len(rows) * T * W, dtype=torch.float32).view(-1, T, W)
        with _loaded({f"{n}.": modules[n] for n in names}, self._reader(rounded), self.device):
            for i, row in enumerate(rows):
                tokens_1T = self.tokens_RT[row : row + 1].to(self.device)
                hidden_RTW[i] = self.model.embed(tokens_1T, self._mask)[0].to("cpu")
        return hidden_RTW

    def _reader(self, rounded: bool) -> TensorReader:
        return (lambda name: self.read(name).to(self.dtype)) if rounded else self.read

    @torch.no_grad()
    def quality(self) -> CompressionQuality:
        """Measured on the test rows, after the last block."""
        while self.block < self.model.shape.layers - 1:
            self._advance()
        sums, ends = torch.zeros(4, dtype=torch.float64), [self._ends(rounded) for rounded in (False, True)]
        for row, hidden in enumerate(zip(self._full, self._hidden[self.test_rows], strict=True)):
            before_TV, after_TV = map(self._log_probabilities, hidden, ends)
            targets_T = self.tokens_RT[self.test_rows[row], 1:].to(self.device)
            losses = [F.nll_loss(x_TV[:-1], targets_T, reduction="sum") for x_TV in (before_TV, after_TV)]
            divergence = F.kl_div(after_TV, before_TV, reduction="sum", log_target=True)
            agreeing = (before_TV.argmax(-1) == after_TV.argmax(-1)).sum()
            sums += torch.stack([*losses, divergence, agreeing]).double().cpu()
            if row == 0:
                self.sample_logits = after_TV[:SAMPLE_TOKENS].cpu()
        rows, T = len(self.test_rows), self.tokens_RT.shape[1]
        before, after = (math.exp(min(float(total) / (rows * (T - 1)), 700.0)) for total in sums[:2])
        return CompressionQuality(
            rows * (T - 1), before, after, float(sums[2]) / (rows * T), float(sums[3]) / (rows * T)
        )

    def _ends(self, rounded: bool) -> dict[str, nn.Module | nn.Parameter]:
        """The final norm and the head of the original model, or of the quantized one."""
        read, ends = self._reader(rounded), dict[str, nn.Module | nn.Parameter]()
        for name in ("norm", "embedding" if self.model.shape.tied else "head"):
            module = deepcopy(getattr(self.model, name))
            _fill(module, f"{name}.", read, self.device)
            ends[name] = module
        if self.model.head_bias is not None:
            ends["head_bias"] = nn.Parameter(read("head_bias").float().to(self.device), requires_grad=False)
        return ends

    def _log_probabilities(self, x_TW: Tensor, ends: dict[str, nn.Module | nn.Parameter]) -> Tensor:
        for name, part in ends.items():
            setattr(self.model, name, part)
        hidden_1TW = self.model.norm(x_TW[None].to(self.device))
        return self.model.logits(hidden_1TW)[0].float().log_softmax(-1)


def _fp8_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    scale = (inputs[0].abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
    return ((inputs[0] / scale).to(torch.float8_e4m3fn).to(inputs[0].dtype) * scale,)


def _fill(module: nn.Module, prefix: str, read: TensorReader, device: torch.device) -> None:
    module.to_empty(device=device)
    for name, tensor in module.state_dict().items():
        tensor.copy_(read(prefix + name))


@contextmanager
def _loaded(modules: dict[str, nn.Module], read: TensorReader, device: torch.device) -> Iterator[None]:
    """Modules by name prefix, which have memory and weights inside the block."""
    for prefix, module in modules.items():
        _fill(module, prefix, read, device)
    yield
    for module in modules.values():
        module.to("meta")
