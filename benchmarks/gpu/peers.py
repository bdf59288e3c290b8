"""The other side: torchtitan's own trainer, the Hugging Face Trainer with Liger or torch.compile, a short native loop.

None of them is changed: torchtitan gets a flavour and a loader of random tokens through its `register_train_spec`.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from models import Case, Clock

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def measure(case: Case, started_s: float) -> dict[str, Any]:
    clock = Clock(case, started_s)
    ways = {"torchtitan": torchtitan, "liger": hugging_face, "hf": hugging_face, "native": native}
    ways[case.system](case, clock)
    return clock.result()


def torchtitan(case: Case, clock: Clock) -> None:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    model = case.model
    if model.tied or case.precision not in ("bf16", "fp8"):
        raise ValueError("torchtitan is measured in bf16 and fp8, and has no tied embeddings; compare with native")

    class RandomTokens(BaseDataLoader):
        def __iter__(self) -> Any:
            while True:
                tokens = torch.randint(model.vocab, (model.rows, model.context + 1))
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    spec = get_train_spec()
    flavour = TransformerModelArgs(
        dim=model.width, n_layers=model.layers, n_heads=model.heads, n_kv_heads=model.kv_heads, vocab_size=model.vocab,
        # Its feed-forward size is 8/3 of the width, times a factor, rounded up.
        ffn_dim_multiplier=(model.ffn - 0.5) / int(8 * model.width / 3), multiple_of=64, rope_theta=500_000,
    )  # fmt: skip
    spec.model_args, spec.build_tokenizer_fn, spec.state_dict_adapter = {"bench": flavour}, None, None
    spec.build_dataloader_fn = lambda **_: RandomTokens()
    register_train_spec("bench", spec)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as its launch script has it
    options = [
        "--model.name=bench", "--model.flavor=bench", f"--job.dump_folder={case.folder}/torchtitan",
        f"--training.local_batch_size={model.rows}", f"--training.seq_len={model.context}",
        f"--training.steps={case.warmup + case.steps}", "--training.max_norm=1.0", "--compile.enable",
        "--activation_checkpoint.mode=none", "--optimizer.lr=3e-4", "--lr_scheduler.warmup_steps=2",
        *(f"--{setting}" for setting in case.settings if not setting.startswith("precision=")),
    ]  # fmt: skip
    if case.precision == "fp8":  # its recipe: one scale a tensor, the head in bf16
        options += ["--model.converters=quantize.linear.float8", "--quantize.linear.float8.filter_fqns=output"]
    init_logger()

    class Timed(Trainer):
        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            clock.step()

    trainer = Timed(ConfigManager().parse_args(options))
    built = sum(p.numel() for p in trainer.model_parts[0].parameters())
    assert built == model.parameters, f"torchtitan built {built:,} parameters instead of {model.parameters:,}"
    trainer.train()


def llama(case: Case) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = case.model
    config = LlamaConfig(
        vocab_size=model.vocab, hidden_size=model.width, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, intermediate_size=model.ffn,
        tie_word_embeddings=model.tied, max_position_embeddings=model.context, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(DEVICE):
        network = LlamaForCausalLM(config)
    assert sum(p.numel() for p in network.parameters()) == model.parameters
    return network


def hugging_face(case: Case, clock: Clock) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    if case.system == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    model, steps = case.model, case.warmup + case.steps

    class Watch(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.step()

    arguments = TrainingArguments(
        output_dir=f"{case.folder}/{case.system}", per_device_train_batch_size=model.rows, max_steps=steps,
        learning_rate=3e-4, max_grad_norm=1.0, optim="adamw_torch_fused", bf16=case.precision == "bf16",
        use_cpu=DEVICE == "cpu", torch_compile=case.system == "hf", report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=10,
    )  # fmt: skip
    rows = torch.randint(model.vocab, (steps * model.rows, model.context))
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model=llama(case), args=arguments, train_dataset=data, callbacks=[Watch()]).train()


def native(case: Case, clock: Clock) -> None:
    """What one writes in an afternoon: Llama's blocks compiled one by one, a loss in chunks, fused AdamW."""
    network, model, compute = llama(case), case.model, {"bf16": torch.bfloat16}.get(case.precision, torch.float32)
    parameters, blocks = list(network.parameters()), [torch.compile(b, dynamic=False) for b in network.model.layers]
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    places = torch.arange(model.context, device=DEVICE)[None]
    for _ in range(case.warmup + case.steps):
        tokens = torch.randint(model.vocab, (model.rows, model.context + 1)).to(DEVICE)
        with torch.autocast(DEVICE, compute, enabled=compute != torch.float32):
            x = network.model.embed_tokens(tokens[:, :-1]).to(compute)
            turns = network.model.rotary_emb(x, places)
            for block in blocks:
                x = block(x, attention_mask=None, position_embeddings=turns)
            x = network.model.norm(x).flatten(0, 1).to(compute)
        Loss.apply(x, network.lm_head.weight, tokens[:, 1:].flatten(), 8).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step()


class Loss(torch.autograd.Function):
    """Cross-entropy in chunks of rows, gradients made at once, so that no more logits than a chunk's exist."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, targets: Any, chunks: int) -> Any:
        w, grad_x, grad_w = weight.to(x.dtype), torch.empty_like(x), torch.zeros_like(weight)
        loss = torch.zeros((), device=x.device)
        for part, goal, out in zip(x.chunk(chunks), targets.chunk(chunks), grad_x.chunk(chunks), strict=True):
            nll, grad = logit_gradient(part @ w.T, goal, len(x))
            loss += nll
            torch.mm(grad, w, out=out)
            grad_w += grad.T @ part
        ctx.save_for_backward(grad_x, grad_w)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *ctx.saved_tensors, None, None  # the loss is the end: its gradient is 1


@torch.compile
def logit_gradient(logits: Any, targets: Any, count: int) -> Any:
    logp = torch.log_softmax(logits.float(), -1)
    hot = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return -(logp * hot).sum() / count, ((logp.exp() - hot.float()) / count).to(logits.dtype)
