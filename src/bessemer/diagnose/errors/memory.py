"""CUDA out of memory: what fills the memory, from the numbers of the message and the place it was raised at.

The forms: before torch 2.1 `(GPU 0; 8.00 GiB total capacity; 6.1 GiB already allocated; ...)`, since then sentences.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from bessemer.diagnose.errors.log_text import LogText
from bessemer.diagnose.errors.rule import place_evidence
from bessemer.run.finding import Cause, Finding

_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|B|KiB|MiB|GiB|TiB)"
_GIB = {"bytes": 2**-30, "B": 2**-30, "KiB": 2**-20, "MiB": 2**-10, "GiB": 1.0, "TiB": 2.0**10}
_START = re.compile(
    rf"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate "
    rf"{_SIZE}[^\n]*(?:\n(?!\s*File|Traceback)[^\n]*){{0,3}}"
)
_FIELDS = {
    "total": (rf"total capac(?:i)?ty of {_SIZE}", rf"; {_SIZE} total capacity"),
    "free": (rf"of which {_SIZE} is free", rf"; {_SIZE} free;"),
    "process": (rf"this process has {_SIZE} memory in use",),
    "allocated": (rf"Of the allocated memory {_SIZE} is allocated", rf"; {_SIZE} already allocated"),
    "unallocated": (rf"and {_SIZE} is reserved by PyTorch but unallocated",),
    "reserved": (rf"; {_SIZE} reserved in total",),
    "allowed": (rf"{_SIZE} allowed",),
}
_OTHER = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_NOT_PYTORCH_GIB = 2.0  # of NCCL buffers, CUDA graphs and libraries, above which they are worth naming
_OWN_ROUNDING = 0.15  # the share by which a process may exceed what its PyTorch holds: the CUDA context, NCCL


@dataclass(frozen=True)
class MemoryMessage:
    """The sizes of a message in GiB; a size that it does not give is None. `others` are those of foreign processes."""

    asked: float
    sizes: dict[str, float | None]
    others: list[float] = field(default_factory=list)

    def size(self, name: str) -> float:
        return self.sizes.get(name) or 0.0

    @staticmethod
    def parse(text: str) -> MemoryMessage:
        start = _START.match(text)
        assert start is not None
        sizes: dict[str, float | None] = {}
        for name, patterns in _FIELDS.items():
            match = next((match for pattern in patterns if (match := re.search(pattern, text))), None)
            sizes[name] = float(match[1]) * _GIB[match[2]] if match else None
        if sizes["unallocated"] is None and sizes["reserved"] is not None:
            sizes["unallocated"] = sizes["reserved"] - (sizes["allocated"] or 0.0)
        others = [float(match[1]) * _GIB[match[2]] for match in _OTHER.finditer(text)]
        held = (sizes["allocated"] or 0.0) + (sizes["unallocated"] or 0.0)
        if others and sizes["process"] is None:
            # In a container the process does not recognise its own number: the one that fits is this process.
            own = min(others, key=lambda size: abs(size - held))
            if held <= own * 1.01 and own - held <= _OWN_ROUNDING * own:
                sizes["process"] = own
                others.remove(own)
        return MemoryMessage(float(start[1]) * _GIB[start[2]], sizes, others)


# Where it was raised, the first match of the innermost frames decides: (pattern, cause, what to do).
_PLACES: tuple[tuple[str, Cause], ...] = (
    (
        r"evaluation_loop|prediction_step|nested_concat|gather_for_metrics|pad_across_processes|in "
        "(?:evaluate|validate)\b|validation_step|compute_metrics",
        Cause("evaluation_logits", "Evaluation keeps the logits of all batches on the GPU, or runs without "
              "no_grad.", 0.8,
              "Does training alone run? The kept logits grow with the number of evaluation rows.",
              "`prediction_loss_only=True`, or `eval_accumulation_steps=1` and `preprocess_logits_for_metrics`; "
              "`per_device_eval_batch_size=1`."),
    ),
    (
        r"optimizer\.step|/optim/|_init_group|exp_avg|initialize_optimizer_states|in multi_tensor",
        Cause("optimizer_states", "The first optimizer step allocates the moments: AdamW needs 8 bytes a parameter, in "
              "fp32 with master weights 12.", 0.8, "Parameters x 16 bytes (weights, gradients, moments) beside the "
              "GPU's memory: `bessemer plan --model NAME --gpus 1xGPU`.",
              "Shard them (FSDP, ZeRO), `optim='adamw_8bit'` or `paged_adamw_8bit`, or train an adapter."),
    ),
    (
        r"from_pretrained|load_checkpoint_in_model|_load_state_dict|load_state_dict|in cuda\b|in "
        r"_apply\b|\.to\(|device_map",
        Cause("weights", "The weights alone do not fit, or another copy of them is loaded.", 0.75,
              "Parameters x 2 bytes (bf16) or x 4 (fp32) beside the GPU's memory; `dtype` of the load.",
              "`dtype=torch.bfloat16`; shard the load (FSDP, ZeRO-3), or 4 bits (`load_in_4bit`) with an adapter; load "
              "checkpoints with `map_location='cpu'`."),
    ),
    (
        r"cross_entropy|nll_loss|log_softmax|lm_head|logits\.float|loss_function|ForCausalLMLoss|logits = ",
        Cause("logits", "The logits of a step: batch x length x vocabulary, in fp32 twice or three times.", 0.8,
              "A = B x T x V x 4 bytes is the size that was asked for.",
              "A fused loss that never holds them (`use_liger_kernel=True`, cut cross-entropy), or a smaller "
              "micro-batch."),
    ),
    (
        r"baddbmm|attn_weights|attention_scores|softmax\(scores|torch\.matmul\(q|query.*key.*transpose|eager_attention",
        Cause("attention_scores", "Unfused attention holds a matrix of length x length for each head.", 0.75,
              "Doubling the length quadruples it. Is `attn_implementation` 'eager'?",
              "`attn_implementation='sdpa'` or 'flash_attention_2'."),
    ),
    (
        r"in generate\b|_sample\b|past_key_value|cache_utils|DynamicCache|kv_cache",
        Cause("kv_cache", "Generation keeps keys and values for every token and sample.", 0.7,
              "Samples x length x layers x KV heads x head size x 4 bytes (bf16).",
              "Fewer samples at once, shorter answers; with vLLM in the same process a lower "
              "`gpu_memory_utilization`."),
    ),
)  # fmt: skip


def judge_memory(log: LogText) -> list[Finding]:
    """One finding for the first out-of-memory error of a log; further ones are counted."""
    matches = list(_START.finditer(log.text))
    if not matches:
        return []
    first = matches[0]
    message = MemoryMessage.parse(first[0])
    place = log.error_before(first.start())
    step = log.step_before(first.start())
    causes = [*_memory_causes(message), *_place_causes(place, message), *_late_causes(step, place)]
    gib = {f"{name}_gib": round(value, 3) for name, value in message.sizes.items() if value is not None}
    evidence = place_evidence(log, first.start()) | {"asked_gib": round(message.asked, 3)} | gib
    if message.others:
        evidence["other_processes_gib"] = [round(size, 3) for size in message.others]
    if len(matches) > 1:
        evidence["times"] = len(matches)
    device = re.search(r"\bGPU (\d+)", first[0])
    where = f" of GPU {device[1]}" if device else ""
    total = f" of {message.size('total'):.1f} GiB" if message.size("total") else ""
    symptom = f"out of memory{where}: {_size(message.asked)} asked, {_size(message.size('free'))} free{total}"
    unknown = "" if place else "The log has no traceback: which tensor was allocated is unknown."
    return [
        Finding.of_causes(symptom, _once(causes), evidence=evidence, severity="critical", step=step, unknown=unknown)
    ]


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.0f} MiB"


def _once(causes: list[Cause]) -> list[Cause]:
    best: dict[str, Cause] = {}
    for cause in causes:
        if cause.name not in best or cause.confidence > best[cause.name].confidence:
            best[cause.name] = cause
    return list(best.values())


def _memory_causes(message: MemoryMessage) -> list[Cause]:
    """What the numbers show by themselves."""
    causes = []
    total, unallocated, others = message.size("total"), message.size("unallocated"), sum(message.others)
    if total and others > 0.05 * total:
        causes.append(
            Cause("other_process", f"Other processes hold {_size(others)} of this GPU.", 0.9,
                  "`nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv`; a former run may still be "
                  "alive.",
                  "End them (`kill PID`), or choose a free GPU: `CUDA_VISIBLE_DEVICES=1`.")
        )  # fmt: skip
    if allowed := message.sizes.get("allowed"):
        causes.append(
            Cause("memory_cap", f"This process may use {_size(allowed)} only.", 0.9,
                  "Search for `set_per_process_memory_fraction` (or `gpu_memory_utilization`).", "Raise that limit.")
        )  # fmt: skip
    if unallocated > message.asked and unallocated > 0.04 * max(total, 1.0):
        causes.append(
            Cause("fragmentation", f"{_size(unallocated)} are reserved but unallocated, more than the "
                  f"{_size(message.asked)} asked: free memory is in pieces.", 0.85, "Do lengths change from batch to "
                  "batch?",
                  "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
        )  # fmt: skip
    outside = message.size("process") - message.size("allocated") - unallocated
    if message.size("process") and outside > _NOT_PYTORCH_GIB:
        causes.append(
            Cause("not_pytorch", f"{_size(outside)} of this process are outside of PyTorch's allocator: NCCL buffers, "
                  f"CUDA graphs, another library.", 0.55, "`NCCL_BUFFSIZE`, the number of process groups, vLLM in "
                  "this process.",
                  "Fewer process groups; `NCCL_NVLS_ENABLE=0`, `NCCL_CUMEM_ENABLE=0`; fewer captured graphs.")
        )  # fmt: skip
    return causes


def _place_causes(place: str, message: MemoryMessage) -> list[Cause]:
    """What the traceback shows: frames are searched from the innermost outwards."""
    frames = re.split(r'(?=^\s*File ")', place, flags=re.MULTILINE)[::-1]
    evaluation = next((cause for pattern, cause in _PLACES[:1] if re.search(pattern, place)), None)
    causes = [evaluation] if evaluation else []
    for frame in frames[:8]:
        match = next((cause for pattern, cause in _PLACES[1:] if re.search(pattern, frame)), None)
        if match:
            causes.append(Cause(match.name, match.text, 0.5, match.check, match.fix) if evaluation else match)
            break
    confidence = 0.3 if causes else 0.6
    where = "backward pass: activations and gradients" if "backward" in place else "activations of a micro-batch"
    causes.append(
        Cause("activations", f"The {where} do not fit beside the weights and states.", confidence,
              "Does it run with a micro-batch of 1, or with half of the length?",
              "`per_device_train_batch_size=1` with more `gradient_accumulation_steps` (the same batch), and "
              "`gradient_checkpointing=True`.")
    )  # fmt: skip
    return causes


def _late_causes(step: int | None, place: str) -> list[Cause]:
    if step is None or step < 100 or re.search(_PLACES[0][0], place):
        return []
    return [
        Cause("longest_row_or_leak", f"{step:,} steps fitted before: a longer row than any before, or memory that "
              f"grows.", 0.5,
              "Log `torch.cuda.max_memory_allocated()` for each step: growth from step to step is a leak (a loss kept "
              "without `.item()`), a jump is a long row.",
              "Cap the length (`max_length`), batch by tokens, or `losses.append(loss.item())`.")
    ]  # fmt: skip
