"""What TRL's SFTTrainer computes of one step: the tokens and labels of the rows, the loss, and every gradient.

Offline, on the CPU, in fp32. Imports TRL only where it is called: other tests are collected beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.model.families.adapter import ADAPTER_CONFIG, read_adapter
from bessemer.model.families.folder import HfFolder, load_weights
from bessemer.model.families.registry import read_shape
from bessemer.model.transformer import build_model

IGNORED = -100
Labelled = tuple[list[int], list[int]]  # the ids of a document, and its labels

# A turn of the assistant up to its end is learned; the line break after it is the template's.
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>"
    "{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The same without marks, and with the line break before a turn: a completion ends with the end of its turn.
UNMARKED = (
    "{{ bos_token }}{% for message in messages %}\n<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}"
)
# With tools and their calls.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
) + MARKED.replace(
    "{% generation %}",
    "{% generation %}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}",
)


@dataclass
class ReferenceStep:
    """Tokens, labels, loss, and the gradients under Bessemer's names."""

    rows: int  # after packing
    documents: list[Labelled]
    loss: float
    gradients: dict[str, Tensor]

    @property
    def grad_norm(self) -> float:
        return float(torch.stack([gradient.square().sum() for gradient in self.gradients.values()]).sum().sqrt())


def write_folder(
    folder: Path, texts: Sequence[str], template: str = MARKED, bos: bool = False, bos_token: str = "<s>",
    metaspace: bool = False, tied: bool = False,
) -> Path:  # fmt: skip
    """A tiny Llama with a tokenizer trained on the texts. With `bos` the tokenizer begins texts with it."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    inner = Tokenizer(models.BPE(byte_fallback=metaspace))
    parts = pre_tokenizers.Metaspace() if metaspace else pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer, inner.decoder = parts, decoders.Metaspace() if metaspace else decoders.ByteLevel()
    alphabet = [] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256) if metaspace)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=pieces, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(texts, trainer)
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    names = {"bos_token": bos_token, "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1, tie_word_embeddings=tied,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_adapter(folder: Path, model: Path, kind: str) -> Path:
    """An adapter of PEFT as after some training."""
    import peft
    import transformers

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(
        r=4, lora_alpha=6, use_dora=kind == "dora", use_rslora=kind == "rslora", target_modules=names,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    adapted = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(model), config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return folder


def reference_step(
    folder: Path, rows: Sequence[dict[str, Any]], work: Path, accumulation: int = 1, adapter: Path | None = None,
    **settings: Any,
) -> ReferenceStep:  # fmt: skip
    """One step of TRL over all rows, without clipping; with an adapter's folder, of that adapter."""
    import datasets
    import transformers
    import trl

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    if adapter is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    gradients: dict[str, Tensor] = {}
    losses: list[float] = []

    class Recording(trl.SFTTrainer):  # type: ignore[misc]
        def training_step(self, *arguments: Any, **named: Any) -> Tensor:
            loss: Tensor = super().training_step(*arguments, **named)
            losses.append(float(loss))
            return loss

    class Gradients(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
            gradients.update({name: parameter.grad.clone() for name, parameter in trained})

    size = len(rows) if not settings.get("packing") else 1
    config = trl.SFTConfig(
        output_dir=str(work), max_steps=1, per_device_train_batch_size=size // accumulation, max_grad_norm=0.0,
        gradient_accumulation_steps=accumulation, gradient_checkpointing=False, learning_rate=0.0, bf16=False,
        use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, logging_strategy="no",
        dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    trainer = Recording(
        model=model, args=config, train_dataset=datasets.Dataset.from_list(list(rows)), processing_class=tokenizer,
        callbacks=[Gradients()],
    )  # fmt: skip
    prepared = list(trainer.train_dataset)
    if settings.get("packing"):  # one step over all packed rows
        trainer.args.per_device_train_batch_size = trainer._train_batch_size = len(prepared)
    trainer.train()
    documents = [part for row in prepared for part in split_documents(row)]
    native = native_gradients(folder, model, gradients, work / "gradients")
    return ReferenceStep(len(prepared), documents, sum(losses), native)


def split_documents(row: dict[str, Any]) -> list[Labelled]:
    """The documents of a row, packed or not; the first token of a document is no target."""
    documents, start = [], 0
    for length in row.get("seq_lengths") or [len(row["input_ids"])]:
        ids, labels = (row[name][start : start + length] for name in ("input_ids", "labels"))
        documents.append(learned_part(ids, [IGNORED, *labels[1:]]))
        start += length
    return documents


def learned_part(ids: Sequence[int], labels: Sequence[int]) -> Labelled:
    """A document up to its last label: nothing after it has an influence."""
    end = max(i for i, label in enumerate(labels) if label != IGNORED) + 1
    return list(ids[:end]), list(labels[:end])


def native_gradients(folder: Path, model: Any, gradients: dict[str, Tensor], work: Path) -> dict[str, Tensor]:
    """Gradients under Bessemer's names: saved as if they were weights, and loaded as such."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter.copy_(gradients[name])
    model.save_pretrained(work)
    family, shape = read_shape(json.loads((folder / "config.json").read_text()))
    if (work / ADAPTER_CONFIG).is_file():
        return {name: part for name, part in read_adapter(work, shape).items() if not name.endswith("lora_scale")}
    native = build_model(shape, "cpu", 0)
    load_weights(native, HfFolder(work), family)
    return {name: parameter.detach().clone() for name, parameter in native.named_parameters()}
