"""A tiny random model with a byte tokenizer in a Hugging Face folder, and servers on a free port of this machine."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def write_folder(path: Path, config: dict, tensors: dict[str, torch.Tensor], template: str | None = "chatml") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    byte_tokenizer().save(str(path / "tokenizer.json"))
    about = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        about["chat_template"] = CHATML if template == "chatml" else template
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    return path


NORMS = ("input_layernorm", "post_attention_layernorm")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def llama_folder(path: Path, seed: int = 0, layers: int = 2, width: int = 32, scale: float = 1.0, **more) -> Path:
    """A random Llama whose greedy text is varied enough to tell two seeds apart."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 259, "hidden_size": width,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4,
        "intermediate_size": 2 * width, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "eos_token_id": 258, "hidden_act": "silu", "rope_theta": 10000.0, **more,
    }  # fmt: skip
    draw = torch.Generator().manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw) * scale / size[-1] ** 0.5

    kv = config["num_key_value_heads"] * config["head_dim"]
    tensors = {"model.embed_tokens.weight": random(259, width) * width**0.5, "lm_head.weight": 3 * random(259, width),
               "model.norm.weight": torch.ones(width)}  # fmt: skip
    for layer in range(layers):
        at = f"model.layers.{layer}"
        sizes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
                 "self_attn.o_proj": (width, width), "mlp.gate_proj": (2 * width, width),
                 "mlp.up_proj": (2 * width, width), "mlp.down_proj": (width, 2 * width)}  # fmt: skip
        tensors |= {f"{at}.{name}.weight": 2 * random(*size) for name, size in sizes.items()}
        tensors |= {
            f"{at}.{name}.weight": torch.ones(width) for name in ("input_layernorm", "post_attention_layernorm")
        }
    return write_folder(path, config, tensors)


@contextlib.contextmanager
def running(models, limits=None, access=None, watcher=None) -> Iterator[SimpleNamespace]:
    """A server of these models in a thread; `url`, `scheduler` and `registry`."""
    import uvicorn

    from bessemer.serve.app import Access, make_app
    from bessemer.serve.metrics import ServerMetrics
    from bessemer.serve.models import ModelRegistry
    from bessemer.serve.scheduler import QueueLimits, Scheduler
    from bessemer.serve.server import listen

    scheduler = Scheduler(limits or QueueLimits(), ServerMetrics())
    registry = ModelRegistry(models)
    app = make_app(registry, scheduler, access or Access(), watcher and watcher(registry))
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield SimpleNamespace(url=url, scheduler=scheduler, registry=registry, app=app, server=server)
    finally:
        server.should_exit = True
        thread.join()


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_folder(tmp_path_factory.mktemp("serve") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[SimpleNamespace]:
    from bessemer.serve.models import ModelOptions, load_served

    with running([load_served("tiny", folder, ModelOptions(device="cpu", slots=8))]) as running_server:
        yield running_server
