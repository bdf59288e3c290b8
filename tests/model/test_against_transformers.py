"""The same weights in transformers' Llama and Qwen3 give the same logits, gradients and greedy text."""

import pytest
import torch

from bessemer.model.generate import Sampling, generate
from bessemer.spec.shape import Rope

pytestmark = pytest.mark.slow

NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
    "ffn.gate.weight": "mlp.gate_proj.weight",
    "ffn.up.weight": "mlp.up_proj.weight",
    "ffn.down.weight": "mlp.down_proj.weight",
}


def their_name(name):
    if name.startswith("blocks."):
        _, layer, rest = name.split(".", 2)
        return f"model.layers.{layer}.{NAMES[rest]}"
    return NAMES[name]


def their_model(shape, weights):
    transformers = pytest.importorskip("transformers")
    family = "Qwen3" if shape.qk_norm == "head" else "Llama"
    config = getattr(transformers, f"{family}Config")(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope.theta},
        tie_word_embeddings=shape.tied,
        max_position_embeddings=512,
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    state = {their_name(name): value for name, value in weights.items()}
    if shape.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


@pytest.fixture(
    params=[{}, {"tied": False, "kv_heads": 4}, {"qk_norm": "head"}, {"qk_norm": "head", "tied": False, "kv_heads": 1}],
    ids=str,
)
def pair(request, shape_of, build_random, weights_of):
    shape = shape_of(layers=3, rope=Rope(), **request.param)
    ours = build_random(shape)
    return ours, their_model(shape, {name: w.detach() for name, w in weights_of(ours).items()})


def test_logits_and_gradients(pair):
    """In float64; transformers computes its rotary angles in float32, which is the whole difference."""
    ours, theirs = pair
    tokens = torch.randint(0, 37, (2, 50), generator=torch.Generator().manual_seed(1))
    a, b = ours.logits(ours(tokens)), theirs(tokens, use_cache=False).logits
    torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
    assert (a - b).abs().mean() < 1e-6
    targets = tokens.roll(-1, dims=1).flatten()
    for logits in (a, b):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[their_name(name)].grad, rtol=1e-4, atol=1e-6)


def test_greedy_text(pair):
    ours, theirs = pair
    prompt = [3, 1, 4, 1, 5]
    expected = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)[0, 5:].tolist()
    assert list(generate(ours, prompt, 40, (), Sampling(temperature=0))) == expected
