"""A tiny trained run, and tiny Hugging Face folders with random weights."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.session.session import train
from bessemer.spec.schema import RunSpec

transformers = pytest.importorskip("transformers")

WORDS = ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge"]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128,
}  # fmt: skip


def write_run(folder: Path, **model: Any) -> Path:
    """Ten steps on words, with the tokens of chatml in the tokenizer."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(20, 120))) for _ in range(120)]
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spec = {
        "name": "tiny", "runs": str(folder / "runs"), "precision": "fp32",
        "model": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64, **model},
        "tokenizer": {"vocab": 300, "special": ["<|im_start|>", "<|im_end|>"]},
        "data": {"sources": {"words": str(folder / "words.jsonl")}, "context": 32, "validation": 0.1},
        "budget": {"steps": 10, "batch": 128}, "parallel": {"device": "cpu", "threads": 1},
        "checkpoint": {"every": 10},
    }  # fmt: skip
    assert train(RunSpec.model_validate(spec)).kind == "finished"
    return folder / "runs" / "tiny"


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder of `kind` with random weights in bf16, norms and biases too."""

    def make(kind: str = "Llama", head: str = "ForCausalLM", **keys: Any) -> Path:
        config = getattr(transformers, f"{kind}Config")(**(keys if kind in ("GPT2", "T5") else SIZES | keys))
        torch.manual_seed(0)
        model = getattr(transformers, kind + head)(config).to(torch.bfloat16)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(0.1 * torch.randn_like(tensor))
        model.save_pretrained(tmp_path / "theirs")
        return tmp_path / "theirs"

    return make
