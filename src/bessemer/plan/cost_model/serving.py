"""Plans serving: GPUs, engine settings and the price of a million tokens for a request rate and two latency limits.

A roofline model: prefill is bound by FLOPs, decode by reading weights and caches, at shares of the data sheet that
engines usually reach. Requests arrive at random and are batched continuously; prefills take time from decodes.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bessemer.errors import UserError
from bessemer.plan.cost_model.cost import Price, PriceList, Term, load_prices
from bessemer.plan.hardware import Gpu, find_gpu, gpu_catalogue, parse_cluster
from bessemer.plan.present import WIDTH
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.shape import ModelShape, active_parameters, cache_bytes, matmul_parameters

Precision = Literal["bf16", "fp16", "fp8", "int4"]
WEIGHT_BYTES: dict[Precision, float] = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int4": 0.56}
# Assumed shares of the data sheet: products of long prompts, and reads while decoding. Not measured here; training
# reaches 40 to 60 % in products (step_time.py).
PREFILL_SHARE, DECODE_SHARE = 0.5, 0.65
MEMORY_SHARE = 0.9  # of a GPU that the engine uses, as vLLM's gpu_memory_utilization
ENGINE_BYTES = 2e9  # CUDA context, graphs and workspaces per GPU
STEP_S = 2e-3  # scheduling and launching one decode step
# One all-reduce of a small tensor among the GPUs of a node: one-shot kernels over NVLink, and over PCIe.
HOP_S, HOP_PCIE_S = 12e-6, 40e-6
BUSY = 0.85  # planned load of a replica, so that bursts do not queue
SHOWN_OPTIONS = 8
MOST_SEQUENCES = 512


@dataclass(frozen=True)
class ServingDemand:
    """Requests per second, tokens of a prompt and an answer, and the latency limits: time to the first token and time
    per output token."""

    rps: float
    prompt: int = 1000
    answer: int = 250
    ttft_s: float = 0.5
    tpot_s: float = 0.03

    def __post_init__(self) -> None:
        for name, value in (("rps", self.rps), ("prompt", self.prompt), ("answer", self.answer),
                            ("ttft", self.ttft_s), ("tpot", self.tpot_s)):  # fmt: skip
            if not (value > 0 and math.isfinite(value)):
                raise UserError(f"{name}: {value:g} cannot be served: write a number above 0")

    @property
    def tokens(self) -> int:
        """Of one request when it ends."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class Serving:
    """A serving configuration: `tensor_parallel` GPUs per replica, `replicas` that share the requests."""

    gpu: str
    precision: Precision
    tensor_parallel: int
    replicas: int
    sequences: int  # concurrent in a replica at the planned load
    most_sequences: int  # that fit in memory at full length
    rps_per_replica: float
    ttft_s: float
    tpot_s: float
    cache_bytes_per_token: float
    price: Price | None = None
    usd_hour: float = 0.0
    usd_per_million_output: float = 0.0
    usd_per_million: float = 0.0

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * self.replicas

    def settings(self, demand: ServingDemand) -> dict[str, object]:
        """Engine settings by their vLLM names."""
        return {
            "tensor_parallel_size": self.tensor_parallel,
            "dtype": self.precision,
            "max_model_len": 1 << math.ceil(math.log2(demand.tokens)),
            "max_num_seqs": min(self.most_sequences, max(self.sequences, 1)),
            "gpu_memory_utilization": MEMORY_SHARE,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
        }


def parse_latency(name: str, text: str | None) -> float | None:
    """`500ms` or `0.5s` -> seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s)\s*", text, re.I)
    if not match or not float(match[1]):
        raise UserError(f"{name} {text}: write a time above 0 with its unit, such as 500ms or 0.5s")
    return float(match[1]) / (1000 if match[2].lower() == "ms" else 1)


def cache_per_token(shape: ModelShape, bytes_per_value: int = 2) -> int:
    """KV-cache bytes per token: 2 x layers x KV heads x head size x bytes; less with latent attention (MLA)."""
    return cache_bytes(shape, 2, bytes_per_value) - cache_bytes(shape, 1, bytes_per_value)


def weight_bytes(shape: ModelShape, precision: Precision) -> float:
    """Matrices in the serving precision, embedding and head in 16 bits."""
    ends = shape.vocab * shape.width * (1 if shape.tied else 2)
    return WEIGHT_BYTES[precision] * (shape.parameters - ends) + 2.0 * ends


class _Replica:
    """ReplicaTiming of one replica."""

    def __init__(self, shape: ModelShape, gpu: Gpu, precision: Precision, split: int, demand: ServingDemand) -> None:
        self.demand, self.split = demand, split
        compute = "fp8" if precision == "fp8" else "bf16" if "bf16" in gpu.peaks else "fp16"
        self.flops = gpu.peak(compute) * split * PREFILL_SHARE
        self.bandwidth = gpu.memory_bandwidth * split * DECODE_SHARE
        self.weights = weight_bytes(shape, precision)
        # A batch reads all experts; a single sequence only those that it is routed to.
        self.read_one = self.weights * active_parameters(shape) / shape.parameters
        self.per_token = 2.0 * matmul_parameters(shape)  # FLOPs
        self.scores = 2.0 * shape.layers * shape.attention_width  # FLOPs of attention for a token and a key
        self.cache = cache_bytes(shape, demand.tokens)
        self.mean_cache = cache_bytes(shape, demand.prompt + demand.answer // 2)
        hop = HOP_PCIE_S if "PCIe" in gpu.link_name else HOP_S
        self.hops_s = 2 * shape.layers * hop if split > 1 else 0.0
        moved = 4.0 * shape.layers * shape.width * 2 * (split - 1) / split  # bytes of two all-reduces for a token
        self.moved_s = moved / gpu.link_bandwidth if split > 1 else 0.0
        # GPUs share the cache up to the number of KV heads; beyond that, heads are duplicated.
        copies = max(1.0, split / max(1, shape.kv_heads))
        room = split * (gpu.memory_bytes * MEMORY_SHARE - ENGINE_BYTES) - self.weights
        self.most = int(room / (self.cache * copies)) if room > 0 else 0

    @property
    def prefill_s(self) -> float:
        prompt = self.demand.prompt
        flops = self.per_token * prompt + self.scores * prompt * prompt
        return max(flops / self.flops, self.weights / self.bandwidth) + self.moved_s * prompt + self.hops_s + STEP_S

    def step_s(self, sequences: float) -> float:
        """Seconds of a decode step: one token for each sequence."""
        read = self.weights if sequences > 1 else self.read_one
        bytes_s = (read + sequences * self.mean_cache) / self.bandwidth
        flops_s = sequences * self.per_token / self.flops
        return max(bytes_s, flops_s) + self.hops_s + sequences * self.moved_s + STEP_S

    def at(self, rps: float) -> tuple[float, float, float] | None:
        """(time to first token, time per output token, concurrent sequences) at this load; None if it is too high."""
        busy = rps * self.prefill_s  # share of the time for prefills
        if busy >= 1:
            return None
        # Little's law: rps x answer x time per token sequences are decoding. That time is the larger of two linear
        # functions of their number, so the number is the larger of two solutions.
        rate, fixed = rps * self.demand.answer, self.hops_s + STEP_S
        lines = (
            (self.weights / self.bandwidth + fixed, self.mean_cache / self.bandwidth + self.moved_s),
            (fixed, self.per_token / self.flops + self.moved_s),
        )
        sequences = 1.0
        for start, slope in lines:
            left = 1 - busy - rate * slope
            if left <= 0:
                return None
            sequences = max(sequences, rate * start / left)
        between = self.step_s(sequences) / (1 - busy)
        queue = busy * self.prefill_s / (2 * (1 - busy))  # M/D/1
        return self.prefill_s + queue + self.step_s(sequences), between, sequences

    def fits(self, rps: float) -> bool:
        latency = self.at(rps)
        if latency is None:
            return False
        first, between, sequences = latency
        demand = self.demand
        return first <= demand.ttft_s and between <= demand.tpot_s and sequences <= min(self.most, MOST_SEQUENCES)

    def capacity(self) -> float:
        """Most requests per second within the latency limits; 0 if a single request exceeds them."""
        if not self.most or not self.fits(1e-6):
            return 0.0
        low, high = 1e-6, 1.0
        while self.fits(high) and high < 1e5:
            low, high = high, 2 * high
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low


@dataclass(frozen=True)
class ReplicaTiming:
    """A replica's step at the planned load: fixed seconds, and those of each prompt token that it reads beside."""

    step_s: float
    token_s: float

    def chunk_s(self, tokens: int) -> float:
        return self.step_s + tokens * self.token_s


def timing(shape: ModelShape, demand: ServingDemand, option: Serving) -> ReplicaTiming:
    replica = _Replica(shape, find_gpu(option.gpu), option.precision, option.tensor_parallel, demand)
    return ReplicaTiming(replica.step_s(option.sequences), replica.per_token / replica.flops + replica.moved_s)


def serve(
    shape: ModelShape, demand: ServingDemand, gpu: Gpu, precisions: tuple[Precision, ...] = ("bf16",)
) -> list[Serving]:
    """Configurations on one GPU type, fewest GPUs first. Refused with the arithmetic if there are none."""
    options = []
    for precision in precisions:
        if precision == "fp8" and "fp8" not in gpu.peaks:
            continue
        for split in (1, 2, 4, 8):
            if split > gpu.node or shape.heads % split:
                continue
            replica = _Replica(shape, gpu, precision, split, demand)
            capacity = replica.capacity() * BUSY
            if not capacity:
                continue
            replicas = max(1, math.ceil(demand.rps / capacity))
            at = replica.at(demand.rps / replicas)
            assert at is not None, "within its capacity a replica keeps up"
            options.append(
                Serving(
                    gpu.name, precision, split, replicas, math.ceil(at[2]), replica.most, capacity, at[0], at[1],
                    cache_per_token(shape),
                )
            )  # fmt: skip
    if not options:
        smallest: Precision = "fp8" if "fp8" in precisions and "fp8" in gpu.peaks else precisions[0]
        raise UserError(_explain_impossible(shape, demand, gpu, smallest))
    return sorted(options, key=lambda option: (option.gpus, option.tensor_parallel))


def rank_serving(
    shape: ModelShape, demand: ServingDemand, gpus: list[Gpu], prices: PriceList, term: Term = "on_demand",
    precisions: tuple[Precision, ...] = ("bf16", "fp8"),
) -> list[Serving]:  # fmt: skip
    """The cheapest configuration for each GPU type, provider and region, by the price of machines that always run."""
    options, refusal = [], ""
    for gpu in gpus:
        try:
            configurations = serve(shape, demand, gpu, precisions)
        except UserError as error:
            refusal = refusal or str(error)
            continue
        for price in prices.find(gpu=gpu.name, term=term):
            fitting = [c for c in configurations if price.most is None or c.tensor_parallel <= price.most]
            if fitting:
                options.append(_add_price(fitting[0], price, demand))
    if not options:
        raise UserError(refusal or f"no {term} price for {', '.join(gpu.name for gpu in gpus)}: add one to your prices")
    return sorted(options, key=lambda option: (option.usd_hour, option.tpot_s))


def _add_price(option: Serving, price: Price, demand: ServingDemand) -> Serving:
    usd = option.gpus * price.usd_hour
    requests = demand.rps * 3600 / 1e6  # millions per hour
    return replace(
        option, price=price, usd_hour=usd, usd_per_million_output=usd / (requests * demand.answer),
        usd_per_million=usd / (requests * demand.tokens),
    )  # fmt: skip


def _explain_impossible(shape: ModelShape, demand: ServingDemand, gpu: Gpu, precision: Precision) -> str:
    """The limit that a single request exceeds on the largest tensor-parallel group."""
    split = max(size for size in (1, 2, 4, 8) if size <= gpu.node and shape.heads % size == 0)
    replica = _Replica(shape, gpu, precision, split, demand)
    name = f"{split} x {gpu.name}"
    if not replica.most:
        held = split * (gpu.memory_bytes * MEMORY_SHARE - ENGINE_BYTES)
        return (
            f"serving: weights of {human_bytes(replica.weights)} in {precision} and a cache of "
            f"{human_bytes(replica.cache)} for one request do not fit into {human_bytes(held)} of {name}: take larger "
            "GPUs, fp8 weights or shorter requests"
        )
    step, first = replica.step_s(1), replica.prefill_s
    if step > demand.tpot_s:
        return (
            f"serving: a token takes at least {1000 * step:.1f} ms on {name}, of which reading "
            f"{human_bytes(replica.read_one)} of weights at {human_bytes(replica.bandwidth)}/s takes "
            f"{1000 * replica.read_one / replica.bandwidth:.1f}: write --tpot {math.ceil(1000 * step * 1.2)}ms or "
            "more, or use fp8 weights or a smaller model"
        )
    return (
        f"serving: a prompt of {demand.prompt:,} tokens takes at least {1000 * first:.0f} ms on {name} "
        f"({replica.per_token * demand.prompt:.2g} FLOPs): write --ttft {math.ceil(1000 * first * 1.2)}ms or more, or "
        "shorter prompts"
    )


def parse_demand(rps: float, prompt: int, answer: int, ttft: str | None, tpot: str | None) -> ServingDemand:
    """With latencies as text, such as 500ms."""
    usual = ServingDemand(1)
    first, between = parse_latency("--ttft", ttft), parse_latency("--tpot", tpot)
    return ServingDemand(rps, prompt, answer, first or usual.ttft_s, between or usual.tpot_s)


def find_serving(shape: ModelShape, demand: ServingDemand, gpu_type: str | None) -> list[Serving]:
    """On the named GPU type, or on all that are rented on demand; cheapest first."""
    prices = load_prices()
    rented = {price.gpu for price in prices.prices if price.term == "on_demand"}
    # Fastest first: an impossible demand is explained for the fastest GPU.
    fastest = sorted(gpu_catalogue().values(), key=lambda gpu: -gpu.memory_bandwidth)
    types = [parse_cluster(gpu_type).gpu] if gpu_type else [gpu for gpu in fastest if gpu.name in rented]
    return rank_serving(shape, demand, types, prices)


def serving_lines(shape: ModelShape, demand: ServingDemand, options: list[Serving]) -> list[str]:
    best = options[0]
    lines = [
        f"{human_count(shape.parameters)} parameters, {demand.rps:g} requests/s of {demand.prompt:,} tokens and "
        f"{demand.answer:,} answered; first token within {1000 * demand.ttft_s:.0f} ms, then "
        f"{1000 * demand.tpot_s:.0f} ms a token",
        "",
        f"  take     {best.gpus} x {best.gpu} in {best.precision}: {best.replicas} replica"
        f"{'s' * (best.replicas > 1)} of {best.tensor_parallel}, each for {best.rps_per_replica:.3g} requests/s",
        f"  waits    {1000 * best.ttft_s:.0f} ms to the first token, {1000 * best.tpot_s:.1f} ms a token, "
        f"{best.sequences} requests at once in a replica (memory holds {best.most_sequences})",
        f"  cache    {human_bytes(best.cache_bytes_per_token)} a token",
    ]
    lines += [f"  setting  {key}: {str(value).lower()}" for key, value in best.settings(demand).items()]
    lines.append("  basis    a roofline at shares of the data sheet that engines usually reach; not measured here")
    seen: set[tuple[str, str]] = set()
    for option in options:
        if option.price is None or (option.gpu, option.precision) in seen or len(seen) == SHOWN_OPTIONS:
            continue
        seen.add((option.gpu, option.precision))
        price = option.price
        lines.append(
            f"  cost     ${option.usd_per_million:.3f} a million tokens (${option.usd_per_million_output:.2f} of "
            f"output), ${option.usd_hour:,.2f} an hour: {option.gpus} x {option.gpu} {option.precision}, "
            f"{price.provider} {price.region} (prices of {price.date})"[:WIDTH]
        )
    return lines


def serving_json(shape: ModelShape, demand: ServingDemand, options: list[Serving]) -> dict[str, Any]:
    rows = [{**asdict(option), "gpus": option.gpus, "settings": option.settings(demand)} for option in options]
    return {"parameters": shape.parameters, "demand": asdict(demand), "best": rows[0], "ways": rows}
