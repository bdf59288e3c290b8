"""The proof that every family gives: a random tiny model of transformers and ours are the same model.

`Pair(config, family)` makes theirs, saves it, and loads ours from the folder; `check_all(pair)` runs every check, and
each can be called alone. Parity is in float64: `Exact` turns the float32 steps inside transformers (norms, softmax,
rotary angles) to float64, so that the comparison is with its mathematics and not with its rounding.
"""

import contextlib
import copy
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from bessemer.model.attention_mask import AttentionMask
from bessemer.model.families.folder import HfFolder, expected_shapes, hf_tensors, load_weights
from bessemer.model.generate import Sampling, generate
from bessemer.model.transformer import Decoder

transformers = pytest.importorskip("transformers")


class Exact(TorchFunctionMode):
    """float64 wherever float32 is asked for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def exact():
    torch.set_default_dtype(torch.float64)
    try:
        with Exact():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def randomise(model, seed):
    """Large enough for every part to matter: norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(tensor + 0.3 * noise if tensor.ndim < 2 else noise / tensor.shape[-1] ** 0.5)


class Pair:
    """Theirs (float32, and float64 as `exact`), its folder, and ours (the same two)."""

    def __init__(self, config, family, seed=0, model=Decoder):
        config._attn_implementation = config._experts_implementation = "eager"
        config.pad_token_id = config.bos_token_id = config.eos_token_id = None
        kind = getattr(transformers, family.architectures[0])
        self.family, self.seed, self.vocab = family, seed, config.vocab_size
        self.theirs = kind(config).eval()
        randomise(self.theirs, seed)
        with exact():
            self.theirs_exact = kind(config).eval()
        self.theirs_exact.load_state_dict(self.theirs.state_dict())
        self._kept = tempfile.TemporaryDirectory()
        self.path = Path(self._kept.name)
        self.theirs.save_pretrained(self.path)
        self.folder = HfFolder(self.path)
        self.shape = family.shape(self.folder.config)
        self.ours, self.ours_exact = (self._load(model, dtype) for dtype in (torch.float32, torch.float64))

    def _load(self, model, dtype):
        with torch.device("meta"):
            made = model(self.shape)
        made = made.to(dtype).to_empty(device="cpu").eval()
        load_weights(made, self.folder, self.family)
        return made

    def tokens(self, rows=2, length=24):
        return torch.randint(0, self.vocab, (rows, length), generator=torch.Generator().manual_seed(self.seed + 1))


def logits_of_ours(model, tokens, attention_mask=None):
    return model.logits(model(tokens, attention_mask))


def logits_of_theirs(model, tokens):
    with exact() if next(model.parameters()).dtype == torch.float64 else contextlib.nullcontext():
        more = {} if "use_cache" not in model.config.to_dict() else {"use_cache": False}
        return model(tokens, **more).logits


def close(a, b, tolerance):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def check_config(pair):
    """The description survives the way to their configuration and back, and transformers reads it as the same."""
    written = pair.family.config(pair.shape)
    assert pair.family.shape(written) == pair.shape
    again = type(pair.theirs.config).from_dict(written)
    assert pair.family.shape(again.to_dict()) == pair.shape
    assert written["model_type"] == pair.family.name
    assert written["architectures"] == [pair.family.architectures[0]]


@torch.no_grad()
def check_logits(pair, length=24, rounding=1e-4):
    """`rounding` is for float32: 1e-3 where logits are soft-capped."""
    tokens = pair.tokens(length=length)
    close(logits_of_ours(pair.ours_exact, tokens), logits_of_theirs(pair.theirs_exact, tokens), 1e-9)
    close(logits_of_ours(pair.ours, tokens), logits_of_theirs(pair.theirs, tokens), rounding)


def check_gradients(pair):
    """Loss, every gradient, and the model after a step of SGD."""
    ours, them = copy.deepcopy(pair.ours_exact), copy.deepcopy(pair.theirs_exact)
    tokens = pair.tokens()
    losses = []
    for logits in (logits_of_ours(ours, tokens), logits_of_theirs(them, tokens)):
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
        losses[-1].backward()
    close(*losses, 1e-9)
    gradients = their_gradients(them)
    seen = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for piece in pair.family.weight_mappings(pair.shape):
        if seen.keys().isdisjoint(piece.native_names):
            continue  # a buffer
        for name, expected in zip(
            piece.native_names, piece.to_native([gradients[name] for name in piece.hf_names]), strict=True
        ):
            found = seen.pop(name)
            assert found is not None or not expected.any(), f"{name} has no gradient"
            if found is not None:
                torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    assert not seen
    for model in (ours, them):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        close(logits_of_ours(ours, tokens), logits_of_theirs(them, tokens), 1e-8)


def their_gradients(model):
    """By the names of a file: a model whose weights are the gradients is saved, as transformers renames on the way."""
    carrier = copy.deepcopy(model)
    given = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in carrier.named_parameters():
            gradient = given[name].grad
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    with tempfile.TemporaryDirectory() as path:
        carrier.save_pretrained(path)
        return load_file(Path(path) / "model.safetensors")


def check_export(pair):
    """The tensors that came in go out, byte for byte, and a file's shapes are known without its data."""
    state = pair.ours.state_dict()
    written = dict(hf_tensors(state.__getitem__, pair.shape, pair.family))
    saved = load_file(pair.path / "model.safetensors")
    assert written.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(written[name].contiguous().view(torch.uint8), tensor.view(torch.uint8)), name
    with torch.device("meta"):
        blank = type(pair.ours)(pair.shape)
    assert expected_shapes(blank, pair.family) == {name: tuple(tensor.shape) for name, tensor in saved.items()}


def check_generation(pair, prompt=(3, 1, 4, 1, 5), length=50):
    """Greedy text with our cache and with theirs."""
    with exact():
        asked = torch.tensor([list(prompt)])
        found = pair.theirs_exact.generate(asked, max_new_tokens=length, do_sample=False, use_cache=True)
    found = found[0, len(prompt) :].tolist()
    assert len(found) == length
    assert list(generate(pair.ours_exact, list(prompt), length, (), Sampling(temperature=0))) == found


@torch.no_grad()
def check_packing(pair, lengths=(7, 11, 2, 4)):
    """Documents packed in a row are to us what each alone is to them."""
    row = pair.tokens(1, sum(lengths))
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    packed = logits_of_ours(pair.ours_exact, row, AttentionMask(documents))
    alone = [logits_of_theirs(pair.theirs_exact, part) for part in row.split(lengths, dim=1)]
    close(packed, torch.cat(alone, dim=1), 1e-9)


def check_all(pair, rounding=1e-4):
    check_config(pair)
    check_logits(pair, rounding=rounding)
    check_gradients(pair)
    check_export(pair)
    check_generation(pair)
    check_packing(pair)
