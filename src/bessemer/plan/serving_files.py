"""Launch files of inference engines from a serving plan: vLLM, TensorRT-LLM and SGLang, each setting with its reason.

The arithmetic is that of cost_model/serving.py. Options are those of the engines' documentation in 2026; nothing here
was run with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bessemer.errors import UserError
from bessemer.plan.cost_model.serving import MEMORY_SHARE, ReplicaTiming, Serving, ServingDemand, timing, weight_bytes
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.shape import ModelShape
from bessemer.storage import write_atomic

SMALLEST_CHUNK, LARGEST_CHUNK = 512, 16_384  # tokens that one step may read


@dataclass(frozen=True)
class EngineSetting:
    key: str
    value: object
    reason: str

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"# {self.reason}\n{self.key}: {value}"


@dataclass(frozen=True)
class LaunchPlan:
    """The settings that all engines have, under different names."""

    model: str
    shape: ModelShape
    demand: ServingDemand
    option: Serving
    chunk: int
    timing: ReplicaTiming

    @property
    def length(self) -> int:
        return 1 << math.ceil(math.log2(self.demand.tokens))

    @property
    def sequences(self) -> int:
        """Twice the planned number, so that a burst does not wait, as far as memory holds them."""
        return max(1, min(self.option.most_sequences, 2 * self.option.sequences))

    def reasons(self) -> dict[str, str]:
        demand, option, shape = self.demand, self.option, self.shape
        weights = weight_bytes(shape, option.precision)
        parallel, chunk_ms = option.tensor_parallel, 1000 * self.timing.chunk_s(self.chunk)
        return {
            "tensor": f"the fewest of 1, 2, 4, 8 GPUs for {human_bytes(weights)} of weights, the cache and both limits"
            + (f"; a token then takes {1000 * option.tpot_s:.1f} ms" if parallel > 1 else ""),
            "precision": f"{option.precision} weights: the plan's choice for {option.gpu}",
            "length": f"prompt {demand.prompt:,} + answer {demand.answer:,}, rounded up",
            "memory": "the share of each GPU that weights and cache may fill: "
            f"{human_bytes(option.cache_bytes_per_token)} of cache a token, {option.most_sequences} complete requests",
            "prefix": "requests that begin alike (a system prompt) share their cache; costs nothing otherwise",
            "chunked": "a long prompt is read in pieces beside the tokens of other requests, which do not wait for it",
            "batched": f"tokens of a step: so many take {chunk_ms:.0f} of the {1000 * demand.tpot_s:.0f} ms a token "
            "may take; more shorten the wait for the first token and lengthen that for the others",
            "sequences": f"{option.sequences} are in flight at the planned load; twice that if memory holds them",
        }

    def header(self, command: str) -> list[str]:
        demand, option = self.demand, self.option
        return [
            f"{human_count(self.shape.parameters)} parameters on {option.gpus} x {option.gpu}: {option.replicas} such "
            f"servers, each for {option.rps_per_replica:.3g} requests/s",
            f"load: {demand.rps:g} requests/s of {demand.prompt:,} + {demand.answer:,} tokens",
            f"expected: {1000 * option.ttft_s:.0f} ms to the first token (limit {1000 * demand.ttft_s:.0f}), "
            f"{1000 * option.tpot_s:.1f} ms a token (limit {1000 * demand.tpot_s:.0f})",
            "an estimate from data sheets, not a measurement: check it with `bessemer bench serve`",
            f"start: {command}",
        ]


def launch_plan(model: str, shape: ModelShape, demand: ServingDemand, option: Serving) -> LaunchPlan:
    """With the largest chunk whose step keeps the time per token."""
    times = timing(shape, demand, option)
    chunk = SMALLEST_CHUNK
    while chunk < LARGEST_CHUNK and times.chunk_s(2 * chunk) <= demand.tpot_s:
        chunk *= 2
    return LaunchPlan(model, shape, demand, option, chunk, times)


def _vllm(plan: LaunchPlan) -> tuple[str, list[EngineSetting]]:
    why, option = plan.reasons(), plan.option
    settings = [
        EngineSetting("model", plan.model, "the exported folder"),
        EngineSetting("tensor-parallel-size", option.tensor_parallel, why["tensor"]),
        EngineSetting("dtype", {"fp16": "float16"}.get(option.precision, "bfloat16"), "activations and embeddings"),
        EngineSetting("max-model-len", plan.length, why["length"]),
        EngineSetting("gpu-memory-utilization", MEMORY_SHARE, why["memory"]),
        EngineSetting("enable-prefix-caching", True, why["prefix"]),
        EngineSetting("enable-chunked-prefill", True, why["chunked"]),
        EngineSetting("max-num-batched-tokens", max(plan.chunk, plan.sequences), why["batched"]),
        EngineSetting("max-num-seqs", plan.sequences, why["sequences"]),
    ]
    if option.precision in ("fp8", "int4"):
        name = {"fp8": "fp8", "int4": "compressed-tensors"}[option.precision]
        settings.insert(3, EngineSetting("quantization", name, why["precision"]))
    return "vllm serve --config FILE", settings


def _tensorrt(plan: LaunchPlan) -> tuple[str, list[EngineSetting]]:
    why, option = plan.reasons(), plan.option
    weights = weight_bytes(plan.shape, option.precision) / option.tensor_parallel
    cache = f"{{free_gpu_memory_fraction: {MEMORY_SHARE}, enable_block_reuse: true}}"
    free = f"of what {human_bytes(weights)} of weights on a GPU leave free; blocks that begin alike are shared"
    settings = [
        EngineSetting("tensor_parallel_size", option.tensor_parallel, why["tensor"]),
        EngineSetting("dtype", {"fp16": "float16"}.get(option.precision, "bfloat16"), "activations and embeddings"),
        EngineSetting("max_seq_len", plan.length, why["length"]),
        EngineSetting("kv_cache_config", cache, free),
        EngineSetting("enable_chunked_prefill", True, why["chunked"]),
        EngineSetting("max_num_tokens", max(plan.chunk, plan.sequences), why["batched"]),
        EngineSetting("max_batch_size", plan.sequences, why["sequences"]),
    ]
    if option.precision == "fp8":
        settings.insert(2, EngineSetting("quant_config", "{quant_algo: FP8}", why["precision"]))
    return f"trtllm-serve {plan.model} --extra_llm_api_options FILE", settings


def _sglang(plan: LaunchPlan) -> tuple[str, list[EngineSetting]]:
    why, option = plan.reasons(), plan.option
    settings = [
        EngineSetting("model-path", plan.model, "the exported folder"),
        EngineSetting("tensor-parallel-size", option.tensor_parallel, why["tensor"]),
        EngineSetting("dtype", {"fp16": "float16"}.get(option.precision, "bfloat16"), "activations and embeddings"),
        EngineSetting("context-length", plan.length, why["length"]),
        EngineSetting("mem-fraction-static", MEMORY_SHARE, why["memory"]),
        EngineSetting("chunked-prefill-size", plan.chunk, why["batched"]),
        EngineSetting("max-running-requests", plan.sequences, why["sequences"]),
    ]
    if option.precision == "fp8":
        settings.insert(3, EngineSetting("quantization", "fp8", why["precision"]))
    return "python -m sglang.launch_server --config FILE", settings


ENGINES: dict[str, Callable[[LaunchPlan], tuple[str, list[EngineSetting]]]] = {
    "vllm": _vllm,
    "tensorrt-llm": _tensorrt,
    "sglang": _sglang,
}


def launch_text(engine: str, plan: LaunchPlan, file: str) -> str:
    """The YAML file of an engine."""
    if engine not in ENGINES:
        raise UserError(f"--emit {engine}: write {', '.join(ENGINES)}")
    command, settings = ENGINES[engine](plan)
    lines = [f"# {line}" for line in plan.header(command.replace("FILE", file))]
    return "\n".join([*lines, "", *map(str, settings)]) + "\n"


def write_launch_file(engine: str, plan: LaunchPlan, path: Path) -> Path:
    write_atomic(path, launch_text(engine, plan, path.name), parents=True)
    return path
