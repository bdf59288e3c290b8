"""T5 is what transformers says it is: both versions, padding, gradients, packing and generation."""

import copy
import tempfile
from pathlib import Path

import parity
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.encoder_decoder import EncoderDecoder
from bessemer.model.families.bert_t5_mamba import T5
from bessemer.model.families.folder import HfFolder

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "d_model": 20, "d_kv": 6, "d_ff": 40, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12,
}  # fmt: skip
OLD = {"feed_forward_proj": "relu"}
NEW = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


class Pair(parity.Pair):
    """Theirs with a head of its own where it is untied: transformers 5 makes that only of a file that has one."""

    def __init__(self, seed=0, **more):
        config = transformers.T5Config(**SIZES | more)
        config._attn_implementation, config.decoder_start_token_id = "eager", 0
        config.pad_token_id, config.eos_token_id = 0, None
        untied = more.get("tie_word_embeddings") is False
        self.family, self.seed, self.vocab = T5, seed, config.vocab_size
        self.theirs = self._make(config, untied)
        parity.randomise(self.theirs, seed)
        with parity.exact():
            self.theirs_exact = self._make(config, untied).double()
        self.theirs_exact.load_state_dict(self.theirs.state_dict())
        self._kept = tempfile.TemporaryDirectory()
        self.path = Path(self._kept.name)
        self.theirs.save_pretrained(self.path)
        self.folder = HfFolder(self.path)
        if untied:  # as the files of version 1.1 say it; transformers 5 writes true even so
            self.folder.config["tie_word_embeddings"] = False
        self.shape = T5.shape(self.folder.config)
        self.ours, self.ours_exact = (self._load(EncoderDecoder, dtype) for dtype in (torch.float32, torch.float64))

    def _make(self, config, untied):
        model = transformers.T5ForConditionalGeneration(config).eval()
        if untied:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model


def both(pair, dtype=torch.float64):
    return (pair.ours_exact, pair.theirs_exact) if dtype == torch.float64 else (pair.ours, pair.theirs)


def logits_of(ours, them, encoder, decoder, lengths=None):
    """Of both, for encoder rows of these lengths."""
    seen = None if lengths is None else (torch.arange(encoder.shape[1]) < torch.tensor(lengths)[:, None]).long()
    documents = None if seen is None else seen - 1
    mine = ours.logits(ours(decoder, encoder_tokens_BS=encoder, encoder_documents_BS=documents))
    with parity.exact() if ours.norm.weight.dtype == torch.float64 else parity.contextlib.nullcontext():
        return mine, them(encoder, attention_mask=seen, decoder_input_ids=decoder, use_cache=False).logits


def texts(pair, rows=2, read=19, written=14):
    tokens = pair.tokens(rows, read + written)
    return tokens[:, :read], tokens[:, read:]


def check_logits(pair):
    with torch.no_grad():
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
            parity.close(*logits_of(*both(pair, dtype), *texts(pair)), tolerance)
            parity.close(*logits_of(*both(pair, dtype), *texts(pair), lengths=[19, 6]), tolerance)


def check_config(pair):
    written = T5.config(pair.shape)
    assert T5.shape(written) == pair.shape
    again = transformers.T5Config.from_dict(written)
    assert again.scale_decoder_outputs == (pair.shape.logit_scale != 1)
    # transformers 5 forgets that a model is untied
    assert T5.shape(again.to_dict() | {"tie_word_embeddings": pair.shape.tied}) == pair.shape


@pytest.fixture(scope="module", params=[OLD, NEW], ids=["1.0", "1.1"])
def pair(request):
    return Pair(**request.param)


def test_logits_and_file(pair):
    check_logits(pair)
    check_config(pair)
    parity.check_export(pair)
    assert sum(p.numel() for p in pair.ours.parameters()) == pair.shape.parameters


def test_gradients_and_a_step(pair):
    ours, them = copy.deepcopy(pair.ours_exact), copy.deepcopy(pair.theirs_exact)
    encoder, decoder = texts(pair)
    losses = []
    for logits in logits_of(ours, them, encoder, decoder, lengths=[11, 19]):
        losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), decoder[:, 1:].flatten()))
        losses[-1].backward()
    parity.close(*losses, 1e-10)
    gradients, seen = parity.their_gradients(them), dict(ours.named_parameters())
    for piece in T5.weight_mappings(pair.shape):
        found, expected = seen.pop(piece.native_names[0]).grad, gradients[piece.hf_names[0]]
        torch.testing.assert_close(
            found, expected, rtol=1e-7, atol=1e-10, msg=lambda m, n=piece.native_names: f"{n}: {m}"
        )
        assert expected.any(), piece
    assert not seen
    for model in (ours, them):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with torch.no_grad():
        parity.close(*logits_of(ours, them, encoder, decoder), 1e-8)


@torch.no_grad()
def test_packed_texts_are_texts_alone(pair):
    """Three pairs of texts in one row, each seen by its own decoder alone."""
    encoder, decoder = texts(pair, rows=1)
    read, written = (5, 10, 4), (6, 1, 7)
    numbers = [torch.repeat_interleave(torch.tensor([4, 2, 9]), torch.tensor(sizes))[None] for sizes in (read, written)]
    hidden = pair.ours_exact(
        decoder, AttentionMask(numbers[1]), encoder_tokens_BS=encoder, encoder_documents_BS=numbers[0]
    )  # fmt: skip
    parts = zip(encoder.split(read, dim=1), decoder.split(written, dim=1), strict=True)
    alone = [logits_of(*both(pair), *part)[1] for part in parts]
    parity.close(pair.ours_exact.logits(hidden), torch.cat(alone, dim=1), 1e-9)


@torch.inference_mode()
def test_greedy_text(pair):
    """50 tokens from a batch with padding; transformers stops at no end here."""
    encoder, _ = texts(pair)
    seen = (torch.arange(19) < torch.tensor([[19], [8]])).long()
    with parity.exact():
        expected = pair.theirs_exact.generate(encoder, attention_mask=seen, max_new_tokens=50, do_sample=False)
    model = pair.ours_exact
    caches, tokens = model.new_caches(encoder, seen - 1), torch.zeros(2, 1, dtype=torch.int64)
    found = [tokens]
    for _ in range(50):
        tokens = model.logits(model(tokens, caches=caches)[:, -1:]).argmax(-1)
        found.append(tokens)
    assert expected.shape == (2, 51)
    assert torch.equal(torch.cat(found, dim=1), expected)


@settings(max_examples=6, deadline=None)
@given(
    heads=st.integers(1, 3), kv=st.sampled_from([3, 8]), layers=st.integers(1, 2), decoder=st.integers(1, 2),
    act=st.sampled_from(["relu", "gated-gelu", "gated-silu", "gelu", "gelu_new", "gated-relu", "gated-gelu_python"]),
    tied=st.booleans(), buckets=st.sampled_from([4, 10, 32]), distance=st.sampled_from([20, 128]),
    eps=st.sampled_from([1e-6, 1e-2]), seed=st.integers(0, 9),
)  # fmt: skip
def test_random_configurations(heads, kv, layers, decoder, act, tied, buckets, distance, eps, seed):
    more = {} if tied else {"tie_word_embeddings": False}
    pair = Pair(
        seed, num_heads=heads, d_kv=kv, num_layers=layers, num_decoder_layers=decoder, feed_forward_proj=act,
        relative_attention_num_buckets=buckets, relative_attention_max_distance=distance, layer_norm_epsilon=eps,
        **more,
    )  # fmt: skip
    check_config(pair)
    check_logits(pair)
    parity.check_export(pair)
    assert sum(p.numel() for p in pair.ours.parameters()) == pair.shape.parameters


def test_defaults_are_those_of_transformers():
    shape = T5.shape({"model_type": "t5"})
    assert shape == T5.shape(transformers.T5Config().to_dict())
    assert shape.parameters == 60_506_624  # t5-small
    flan = {
        "d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }  # fmt: skip
    base = T5.shape(flan)
    assert (base.parameters, base.activation, base.logit_scale) == (247_577_856, "gelu_tanh", 1.0)  # flan-t5-base


def test_a_tie_and_the_scale_are_two_things():
    """transformers 5 writes both keys; older files have only the tie."""
    for tied in (True, False):
        assert (T5.shape({"tie_word_embeddings": tied}).logit_scale == 1) == (not tied)
        for scaled in (True, False):
            shape = T5.shape({"tie_word_embeddings": tied, "scale_decoder_outputs": scaled})
            assert (shape.tied, shape.logit_scale != 1) == (tied, scaled)
            assert T5.shape(T5.config(shape)) == shape


@pytest.mark.parametrize(
    ("key", "value"),
    [("feed_forward_proj", "swish-gelu"), ("feed_forward_proj", "tanh"), ("is_encoder_decoder", False)],
)
def test_refuses_by_name(key, value):
    with pytest.raises(UserError, match=rf"{key}.*{value}"):
        T5.shape({key: value})
