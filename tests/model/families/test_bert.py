"""BERT is what transformers says it is: masked LM, segments, padding, packing, and its classification classes."""

import contextlib

import parity
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from bessemer.errors import UserError
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.classifier import ClassifierFamily, HeadlessFamily, classifier_family
from bessemer.model.families import registry
from bessemer.model.families.bert_t5_mamba import BERT
from bessemer.model.families.folder import HfFolder, hf_tensors, load_weights
from bessemer.model.families.llama import LLAMA
from bessemer.model.transformer import Decoder

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip


def config_of(**more):
    return transformers.BertConfig(**SIZES | more)


@pytest.fixture(autouse=True)
def bias_is_saved_once(monkeypatch):
    """An untied model of transformers has a second bias that it never reads: here it is the first, as ours writes."""
    plain = parity.randomise

    def randomise(model, seed):
        plain(model, seed)
        if hasattr(model, "cls"):
            model.cls.predictions.bias.data.copy_(model.cls.predictions.decoder.bias.data)

    monkeypatch.setattr(parity, "randomise", randomise)


@pytest.mark.parametrize("tied", [True, False])
def test_is_the_model_of_transformers(tied):
    pair = parity.Pair(config_of(tie_word_embeddings=tied), BERT)
    parity.check_config(pair)
    parity.check_logits(pair)
    parity.check_gradients(pair)
    parity.check_export(pair)
    parity.check_packing(pair)
    assert sum(p.numel() for p in pair.ours.parameters()) == pair.shape.parameters


@settings(max_examples=6, deadline=None)
@given(
    heads=st.sampled_from([1, 2, 3]), head_dim=st.sampled_from([4, 6]), layers=st.integers(1, 3), tied=st.booleans(),
    types=st.integers(1, 3), act=st.sampled_from(["gelu", "gelu_new", "relu", "silu"]),
    eps=st.sampled_from([1e-12, 1e-3]), seed=st.integers(0, 9),
)  # fmt: skip
def test_random_configurations(heads, head_dim, layers, tied, types, act, eps, seed):
    config = config_of(
        hidden_size=heads * head_dim, num_attention_heads=heads, num_hidden_layers=layers, tie_word_embeddings=tied,
        type_vocab_size=types, hidden_act=act, layer_norm_eps=eps,
    )  # fmt: skip
    pair = parity.Pair(config, BERT, seed)
    parity.check_config(pair)
    parity.check_logits(pair)
    if tied:  # the fixture is set up once for all examples
        parity.check_export(pair)
    assert sum(p.numel() for p in pair.ours.parameters()) == pair.shape.parameters


@torch.no_grad()
def test_segments_and_padding():
    pair = parity.Pair(config_of(), BERT)
    tokens, types = pair.tokens(2, 12), torch.arange(12).repeat(2, 1) // 5 % 2
    seen = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    with parity.exact():
        expected = pair.theirs_exact(tokens, attention_mask=seen, token_type_ids=types).logits
    found = pair.ours_exact.logits(pair.ours_exact(tokens, AttentionMask(seen - 1), types_BT=types))
    parity.close(found[seen.bool()], expected[seen.bool()], 1e-9)


def test_defaults_are_those_of_transformers():
    shape = BERT.shape({"model_type": "bert"})
    assert shape == BERT.shape(transformers.BertConfig().to_dict())
    assert shape.parameters == 109_514_298  # bert-base-uncased for masked LM


@pytest.mark.parametrize(
    ("key", "value"), [("is_decoder", True), ("position_embedding_type", "relative_key"), ("hidden_act", "tanh")]
)
def test_refuses_by_name(key, value):
    with pytest.raises(UserError, match=rf"{key}.*{value}"):
        BERT.shape({key: value})


def test_parts_of_the_first_training_are_left_out():
    """BertForPreTraining, which the Hub's files are, has a pooler and a next-sentence head."""
    model = transformers.BertForPreTraining(config_of())
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(parity.tempfile.TemporaryDirectory())
        model.save_pretrained(path)
        folder = HfFolder(path)
        ours = Decoder(BERT.shape(folder.config)).eval()
        load_weights(ours, folder, BERT)
        tokens = torch.arange(10)[None]
        parity.close(ours.logits(ours(tokens)), model.eval()(tokens).prediction_logits, 1e-4)


def classes_of(config, family, kind_of_theirs, path):
    """Theirs in float64 as saved, and ours loaded from there."""
    config._attn_implementation, config.num_labels = "eager", 5
    model = kind_of_theirs(config).eval()
    parity.randomise(model, 3)
    with parity.exact():
        exact = kind_of_theirs(config).eval()
    exact.load_state_dict(model.state_dict())
    model.save_pretrained(path)
    folder = HfFolder(path)
    read = classifier_family(folder.config)
    assert (read, read.labels) == (ClassifierFamily(family, read.kind, 5), 5)
    assert read.shape(read.config(read.shape(folder.config))) == read.shape(folder.config)
    assert classifier_family(read.config(read.shape(folder.config))) == read
    ours = Decoder(read.shape(folder.config)).double().eval()
    load_weights(ours, folder, read)
    return exact, ours, folder, read


@pytest.mark.parametrize("family", [BERT, LLAMA], ids=lambda family: family.name)
@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_classes(family, kind, tmp_path, monkeypatch):
    """Logits with padding, gradients, packed texts, and the file that goes out, against transformers."""
    monkeypatch.setitem(registry.FAMILIES, "bert", "bert_t5_mamba.BERT")
    named = "Bert" if family is BERT else "Llama"
    config = getattr(transformers, f"{named}Config")(**SIZES, pad_token_id=0)
    model_class = getattr(transformers, f"{named}For{kind}Classification")
    exact, ours, folder, read = classes_of(config, family, model_class, tmp_path)
    lengths = torch.tensor([12, 7, 1])
    seen = (torch.arange(12) < lengths[:, None]).long()
    tokens = torch.randint(1, 61, (3, 12), generator=torch.Generator().manual_seed(5)) * seen
    with parity.exact():
        expected = exact(tokens, attention_mask=seen).logits
    every = ours.logits(ours(tokens, AttentionMask(seen - 1)))
    found = every if kind == "Token" else every[torch.arange(3), lengths - 1 if family is LLAMA else 0]
    real = seen.bool() if kind == "Token" else slice(None)
    parity.close(found[real], expected[real], 1e-9)

    labels = torch.randint(0, 5, found[real].shape[:-1], generator=torch.Generator().manual_seed(6))
    for logits in (found, expected):
        F.cross_entropy(logits[real].flatten(0, -2), labels.flatten()).backward()
    gradients, mine = parity.their_gradients(exact), dict(ours.named_parameters())
    for piece in read.weight_mappings(read.shape(folder.config)):
        for name, gradient in zip(
            piece.native_names, piece.to_native([gradients[name] for name in piece.hf_names]), strict=True
        ):
            if name != "embedding.weight":  # transformers gives none to the padding token
                parity.close(mine.pop(name).grad, gradient, 1e-9)
    assert mine.keys() == {"embedding.weight"}

    packed = torch.cat([row[:length] for row, length in zip(tokens, lengths, strict=True)])[None]
    documents = torch.repeat_interleave(torch.arange(3), lengths)[None]
    together, ends = ours.logits(ours(packed, AttentionMask(documents)))[0], lengths.cumsum(0)
    picked = slice(None) if kind == "Token" else ends - 1 if family is LLAMA else ends - lengths
    parity.close(together[picked], found[real] if kind == "Token" else found, 1e-9)

    saved, state = load_file(tmp_path / "model.safetensors"), ours.float().state_dict()
    written = dict(hf_tensors(state.__getitem__, ours.shape, read))
    assert written.keys() == saved.keys() and all(torch.equal(written[name], saved[name]) for name in saved)


@pytest.mark.parametrize("family", [BERT, LLAMA], ids=lambda family: family.name)
def test_classes_begin_on_a_language_model(family):
    """Only the body is taken: a head of words, tied or not, stays behind."""
    if family is BERT:
        pair = parity.Pair(config_of(tie_word_embeddings=False), BERT)
    else:
        pair = parity.Pair(transformers.LlamaConfig(**SIZES, tie_word_embeddings=False), LLAMA)
    body = Decoder(HeadlessFamily(family).shape(pair.folder.config)).eval()
    load_weights(body, pair.folder, HeadlessFamily(family))
    tokens = pair.tokens()
    part = pair.theirs.bert if family is BERT else pair.theirs.model
    parity.close(body(tokens), part(tokens).last_hidden_state, 1e-4)


def test_a_language_model_is_no_classifier():
    with pytest.raises(UserError, match="architectures: 'LlamaForCausalLM' is neither"):
        classifier_family({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
