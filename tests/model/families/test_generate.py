"""Greedy text of every family through the generator: 16 ragged prompts at once, against transformers one by one.

A token is the greedy one if transformers' logits after the same prefix are largest there, so one forward pass of prompt
and answer checks all of them, with their log-probabilities; transformers' own `generate` gives the same tokens."""

import random

import parity
import pytest
import test_bloom
import test_deepseek
import test_falcon
import test_gemma
import test_gpt2
import test_gpt_neox
import test_llama
import test_mamba2
import test_mixtral
import test_olmo2
import test_phi3
import test_qwen3_moe
import test_t5
import torch

from bessemer.model.encoder_decoder import EncoderDecoder
from bessemer.model.families.registry import FAMILIES
from bessemer.model.generate import Generator, Request, Sampling

transformers = pytest.importorskip("transformers")
LONG = {"max_position_embeddings": 512}


def llama(family, **more):
    return lambda: parity.Pair(test_llama.config_of(family, **LONG | more), family)


def gemma(name):
    family, config = test_gemma.FAMILIES[name]
    return lambda: parity.Pair(config(**test_gemma.SMALL), family)


def deepseek(family):
    return lambda: parity.Pair(test_deepseek.config_of(family, **LONG), family)


PAIRS = {
    "llama": llama(test_llama.LLAMA),
    "mistral": llama(test_llama.MISTRAL, sliding_window=20),
    "qwen2": llama(test_llama.QWEN2, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen3": llama(test_llama.QWEN3, head_dim=8),
    "gemma2": gemma("gemma2"),
    "gemma3": gemma("gemma3_text"),
    "gpt2": lambda: parity.Pair(transformers.GPT2Config(**test_gpt2.SMALL | {"n_positions": 512}), test_gpt2.GPT2),
    "gpt_neox": lambda: parity.Pair(transformers.GPTNeoXConfig(**test_gpt_neox.SMALL), test_gpt_neox.GPT_NEOX),
    "bloom": lambda: test_bloom.pair_of(transformers.BloomConfig(vocab_size=53, hidden_size=24, n_head=4)),
    "falcon": lambda: test_falcon.pair_of(transformers.FalconConfig(**test_falcon.SMALL | test_falcon.NEW)),
    "falcon, ALiBi": lambda: test_falcon.pair_of(transformers.FalconConfig(**test_falcon.SMALL | test_falcon.RW)),
    "phi3": lambda: parity.Pair(test_phi3.config_of(**LONG, original_max_position_embeddings=512), test_phi3.PHI3),
    "olmo2": lambda: parity.Pair(test_olmo2.config_of(**LONG), test_olmo2.OLMO2),
    "mixtral": lambda: parity.Pair(test_mixtral.config_of(**LONG), test_mixtral.MIXTRAL),
    "qwen3_moe": lambda: parity.Pair(test_qwen3_moe.config_of(**LONG), test_qwen3_moe.QWEN3_MOE),
    "deepseek_v2": deepseek(test_deepseek.DEEPSEEK_V2),
    "deepseek_v3": deepseek(test_deepseek.DEEPSEEK_V3),
    "mamba2": lambda: parity.Pair(test_mamba2.config_of(), test_mamba2.MAMBA2),
    "t5": lambda: test_t5.Pair(**test_t5.NEW),
}


def test_every_family_that_writes_text_is_compared():
    assert {name.split(",")[0].replace("gemma3", "gemma3_text") for name in PAIRS} == set(FAMILIES) - {"bert"}


def their_answer(pair, prompt, length):
    """Greedy tokens of transformers' own `generate`, with its cache."""
    ids = torch.tensor([prompt])
    with parity.exact(), torch.no_grad():
        out = pair.theirs_exact.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, pad_token_id=0
        )
    return out[0, -length:].tolist()


def compare(pair, count, longest, length, slots):
    draw = random.Random(1)
    lengths = [1, longest, *(draw.randint(1, longest) for _ in range(count - 2))]
    prompts = [[draw.randrange(1, pair.vocab) for _ in range(n)] for n in lengths]
    generator = Generator(pair.ours_exact, slots=slots, max_length=longest + length)
    requests = [Request(prompt, length, Sampling(temperature=0), top_logprobs=0) for prompt in prompts]
    encodes = isinstance(pair.ours_exact, EncoderDecoder)
    with torch.no_grad():
        results = generator.run(requests)
    for prompt, (completion,) in zip(prompts, results, strict=True):
        assert len(completion.tokens) == length
        inputs = {"input_ids": torch.tensor([[*prompt, *completion.tokens[:-1]]])}
        if encodes:
            inputs = {
                "input_ids": torch.tensor([prompt]),
                "decoder_input_ids": torch.tensor([[0, *completion.tokens[:-1]]]),
            }
        with parity.exact(), torch.no_grad():
            logits = pair.theirs_exact(**inputs, use_cache=False).logits[0, -length:]
        assert completion.tokens == logits.argmax(-1).tolist()
        if not encodes:  # T5's is compared in test_t5
            assert completion.tokens == their_answer(pair, prompt, length)
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), logprobs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2", "t5"])
def test_short_prompts(name):
    compare(PAIRS[name](), count=4, longest=20, length=12, slots=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_sixteen_prompts_of_up_to_300_tokens(name):
    compare(PAIRS[name](), count=16, longest=300, length=64, slots=16)
