"""Any causal model that transformers can load, behind the native model's interface (`model: {hf: PATH, wrap: true}`).

Its properties are tested on the module itself, since configs express them in many ways: the head must be a plain
product, attention must be causal, and packed documents must be separable. Legend: B batch, T time, W width, V
vocabulary.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.families.folder import HfFolder
from bessemer.model.transformer import Decoder
from bessemer.spec.shape import ModelShape

INNER = "inner."  # before the names of transformers
LIMITS = (
    "run by transformers: no tensor or pipeline parallelism, no attention statistics, no dropout, no balance loss for "
    "experts, no extension of positions or vocabulary"
)
SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}  # logits are multiplied by setting ** power
CLOSE = 1e-4  # relative to the largest value; over six families noise is below 4e-7 and leaks are above 0.15


class WrappedCache:
    """Generation state: transformers' own cache, or the tokens so far for a model without `past_key_values`."""

    def __init__(self, body: nn.Module) -> None:
        self.has_keys = "past_key_values" in inspect.signature(body.forward).parameters
        self.body, self.length = body, 0
        self.state: Any = None
        self.tokens_BT: Tensor | None = None

    def extend(self, tokens_BT: Tensor) -> Tensor:
        """Hidden states of the new tokens."""
        T = tokens_BT.shape[1]
        self.length += T
        if self.has_keys:
            out = self.body(tokens_BT, past_key_values=self.state, use_cache=True)
            self.state = out.past_key_values
            return out.last_hidden_state
        self.tokens_BT = tokens_BT if self.tokens_BT is None else torch.cat((self.tokens_BT, tokens_BT), dim=1)
        return self.body(self.tokens_BT, use_cache=False).last_hidden_state[:, -T:]


class WrappedModel(Decoder):
    """Parameters are float32, under transformers' names after `inner.`."""

    def __init__(self, shape: ModelShape) -> None:
        nn.Module.__init__(self)
        self.shape, self.dropout = shape, 0.0
        self.inner = _build_module(json.loads(shape.wrapped))
        self._packing_method: str | None = None

    def to_empty(self, *, device: Any, recurse: bool = True) -> WrappedModel:
        super().to_empty(device=device, recurse=recurse)
        self.fill_buffers()
        return self

    def fill_buffers(self) -> None:
        """The values of buffers, such as rotary frequencies. No folder or checkpoint holds those that are not
        persistent, and memory that is only allocated holds anything."""
        _import_transformers()
        from accelerate import init_empty_weights

        with init_empty_weights(include_buffers=False):
            module = _build_module(json.loads(self.shape.wrapped))
        values = dict(module.named_buffers())
        for name, buffer in self.inner.named_buffers():
            if name in values:  # not those of adapters
                buffer.copy_(values[name])

    @property
    def body(self) -> nn.Module:
        return _body(self.inner)

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]
        lists = [module for module in self.inner.modules() if isinstance(module, nn.ModuleList)]
        return next((layers for layers in lists if len(layers) == self.shape.layers), nn.ModuleList())

    @property
    def head_weight(self) -> Tensor:
        return self.inner.get_output_embeddings().weight

    @property
    def head_bias(self) -> Tensor | None:  # type: ignore[override]
        return self.inner.get_output_embeddings().bias

    def new_caches(self) -> list[Any]:
        return [WrappedCache(self.body)]

    def forward(
        self, tokens_BT: Tensor, attention_mask: AttentionMask | None = None, caches: list[Any] | None = None,
        types_BT: Any = None,
    ) -> Tensor:  # fmt: skip
        if caches:
            return caches[0].extend(tokens_BT)
        if attention_mask is not None and attention_mask.prefix_BT is not None:
            raise UserError("model.wrap: this model is causal only; remove the prefix task or use a native model")
        if attention_mask is None or attention_mask.documents_BT is None:
            return self.body(tokens_BT, use_cache=False).last_hidden_state
        self._packing_method = self._packing_method or self._find_packing_method()
        return self._packed(tokens_BT, attention_mask, self._packing_method)

    def _packed(self, tokens_BT: Tensor, attention_mask: AttentionMask, method: str) -> Tensor:
        T, device = tokens_BT.shape[1], tokens_BT.device
        inputs: dict[str, Any] = {"use_cache": False}
        if "position_ids" in inspect.signature(self.body.forward).parameters:
            inputs["position_ids"] = attention_mask.positions(0, T, device)
        if method == "mask":  # T x T numbers per row; positions, if they suffice, cost nothing
            mask_B1TT = attention_mask.mask(0, T, T, device)
            assert mask_B1TT is not None
            dtype = self.head_weight.dtype
            zeros_B1TT = torch.zeros_like(mask_B1TT, dtype=dtype)
            inputs["attention_mask"] = zeros_B1TT.masked_fill_(~mask_B1TT, torch.finfo(dtype).min)
        return self.body(tokens_BT, **inputs).last_hidden_state

    def _find_packing_method(self) -> str:
        """ "positions" that restart at each document, from which transformers derives masks, or an explicit "mask"."""
        config = self.inner.config.get_text_config()
        # An explicit mask replaces that of every layer, including sliding windows.
        windowed = getattr(config, "sliding_window", None) or len(set(getattr(config, "layer_types", None) or ())) > 1
        methods: tuple[str, ...] = ("positions",) if windowed else ("positions", "mask")
        if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
            methods = ()  # Llama 4 counts chunks from the row's start, wherever documents start
        for method in methods:
            if self._separates_documents(method):
                return method
        raise UserError(
            f"model.wrap: {config.model_type} cannot separate packed documents: write packing: pad under data, "
            "or cross_documents: true to let them attend to each other"
        )

    def _separates_documents(self, method: str) -> bool:
        """Compares two short documents in one row with each alone."""
        tokens_1T = self._probe_tokens(12)
        documents_1T = torch.tensor([[0] * 5 + [1] * 7], device=tokens_1T.device)
        with _reproducible(self, tokens_1T.device):
            try:
                together = self._packed(tokens_1T, AttentionMask(documents_1T), method)
            except (TypeError, ValueError, IndexError, RuntimeError):  # it does not accept the input
                return False
            alone = [self.body(part, use_cache=False).last_hidden_state for part in tokens_1T.split((5, 7), dim=1)]
        return _close(together, torch.cat(alone, dim=1))

    def verify(self) -> None:
        """Raises UserError unless the head is a plain product and attention is causal."""
        tokens_1T = self._probe_tokens(8)
        changed_1T = tokens_1T.clone()
        changed_1T[:, -1] = tokens_1T[:, 0]
        kind = self.inner.config.model_type
        with _reproducible(self, tokens_1T.device):
            hidden, changed = self(tokens_1T), self(changed_1T)
            ours, theirs = self.logits(hidden), self.inner(tokens_1T, use_cache=False).logits
        if not _close(hidden[:, :-1], changed[:, :-1]):
            raise UserError(f"model.wrap: {kind} attends to later tokens, so next-token prediction is meaningless")
        if ours.shape != theirs.shape or not _close(ours, theirs):
            raise UserError(f"model.wrap: {kind} computes its logits in an unsupported way and cannot be trained")

    def _probe_tokens(self, count: int) -> Tensor:
        return (torch.arange(count, device=self.head_weight.device) * 7 % self.shape.vocab)[None]


@contextmanager
def _reproducible(model: nn.Module, device: torch.device) -> Iterator[None]:
    """No gradients, no dropout, no autocast."""
    training = model.training
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            model.eval()
            yield
    finally:
        model.train(training)


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= CLOSE * b.abs().max())


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UserError("model.wrap needs transformers: pip install transformers") from None
    return transformers


def _build_module(config: dict[str, Any]) -> Any:
    """The module of a config with its own random weights, without dropout, which a replay could not reproduce."""
    transformers = _import_transformers()
    config = {key: 0.0 if "drop" in key and isinstance(value, float) else value for key, value in config.items()}
    parsed = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    return transformers.AutoModelForCausalLM.from_config(parsed, dtype=torch.float32, trust_remote_code=False)


def _body(module: Any) -> Any:
    """The part before the head; the module itself if there is none. Llama 4's `base_model` misses it."""
    body = module.base_model
    return getattr(module, "model", module) if body is module else body


def read_wrapped(path: str | Path) -> ModelShape:
    """The shape of a folder's model, as far as its config tells; parameters are counted. Reads no weights."""
    folder, transformers = HfFolder(path), _import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            module = _build_module(config.to_dict())
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: transformers cannot build this model: {str(error).splitlines()[0][:200]}") from None
    head, sizes = module.get_output_embeddings(), config.get_text_config()
    if "quantization_config" in folder.config or not isinstance(head, nn.Linear) or _body(module) is module:
        raise UserError(f"{path}: {config.model_type}: only unquantized models with a linear head can be wrapped")
    scale = 1.0
    for key, power in SCALES.items():
        scale *= (getattr(sizes, key, None) or 1.0) ** power
    heads, width = getattr(sizes, "num_attention_heads", 1), sizes.hidden_size
    return ModelShape(
        vocab=head.out_features, width=width, layers=sizes.num_hidden_layers, heads=heads,
        kv_heads=getattr(sizes, "num_key_value_heads", None) or heads,
        head_dim=getattr(sizes, "head_dim", None) or width // heads,
        ffn=getattr(sizes, "intermediate_size", None) or 4 * width,
        tied=head.weight is module.get_input_embeddings().weight,
        max_positions=getattr(sizes, "max_position_embeddings", None) or 0, positions="none",
        logit_scale=scale, logit_cap=getattr(sizes, "final_logit_softcapping", None),
        wrapped=json.dumps(config.to_dict()), wrapped_parameters=sum(p.numel() for p in module.parameters()),
    )  # fmt: skip


def load_folder(path: str | Path) -> Any:
    """The module that transformers loads from a folder's safetensors."""
    HfFolder(path).tensors  # noqa: B018, raises for a pickled or damaged folder
    transformers = _import_transformers()
    try:
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False, local_files_only=True, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
    except (ValueError, KeyError, OSError, RuntimeError) as error:
        raise UserError(f"{path}: transformers cannot load it: {str(error).splitlines()[0][:200]}") from None
    if info["missing_keys"] or info["mismatched_keys"]:
        names = sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])])
        raise UserError(f"{path}: {names[0]!r} is missing or has another shape ({len(names)} in all); download again")
    return loaded


class WrappedWeights(Mapping[str, Tensor]):
    """The parameters of a folder by their names in a wrapped model. Holds the folder's model while it exists."""

    def __init__(self, path: str | Path) -> None:
        self._tensors = {f"{INNER}{name}": tensor for name, tensor in load_folder(path).state_dict().items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def load_wrapped(model: WrappedModel, path: str | Path) -> None:
    """Load the folder's safetensors into the model and verify it. Needs memory for the weights twice."""
    from bessemer.model.adapters import adapters_off, is_part

    loaded = load_folder(path)
    state = model.inner.state_dict()
    for name, tensor in loaded.state_dict().items():
        state.pop(name).copy_(tensor)
    assert all(map(is_part, state)), f"no tensor of the folder fills {sorted(state)}"
    with adapters_off(model):
        model.verify()


def wrap(path: str | Path, device: torch.device | str) -> WrappedModel:
    """The folder's model on a device, ready to train."""
    with torch.device(device):
        model = WrappedModel(read_wrapped(path))
    load_wrapped(model, path)
    return model


def check_wrapped(shape: ModelShape, vocab: int, context: int) -> None:
    """Refuses a vocabulary or context that a wrapped model cannot extend to."""
    if vocab > shape.vocab:
        fix = "remove tokenizer.special, or use a native family"
        raise UserError(f"model.wrap: {vocab} tokens exceed the model's vocabulary of {shape.vocab}: {fix}")
    if shape.max_positions and context > shape.max_positions:
        raise UserError(f"data.context: {context} exceeds the model's {shape.max_positions} positions: lower it")
