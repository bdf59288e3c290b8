"""Serving: GPUs, settings and the price of a million tokens for a rate of requests and two promises of latency.

Prefill is bound by FLOPs, decode by reading the weights and the caches: a roofline with shares of the data sheet that
engines reach. Requests come at random and are batched continuously; prefills take their share of the time from decodes.

Serving as it is asked for in a few words, and the answer as a person reads it and as JSON.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bessemer.errors import UserError
from bessemer.plan.cost_model.cost import Price, PriceList, Term, load_prices
from bessemer.plan.hardware import Gpu, gpus, parse_cluster
from bessemer.plan.present.show import WIDTH
from bessemer.spec.quantity import human_bytes, human_count
from bessemer.spec.shape import ModelShape, active, cache_bytes, multiplied

Precision = Literal["bf16", "fp16", "fp8", "int4"]
WEIGHT_BYTES: dict[Precision, float] = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int4": 0.56}
# Shares of the data sheet that an engine is taken to reach, in products of long prompts and in reads while decoding:
# estimates, not measured here. Training reaches 40 to 60 % in products (plan/cost_model/step_time.py).
PREFILL_SHARE, DECODE_SHARE = 0.5, 0.65
MEMORY_SHARE = 0.9  # of a GPU that an engine takes, as vLLM's gpu_memory_utilization
ENGINE_BYTES = 2e9  # CUDA context, graphs and workspaces of a GPU
STEP_S = 2e-3  # scheduling and launching of one decode step
# One all-reduce of a small tensor among the GPUs of a node: one-shot kernels over NVLink, and over PCIe.
HOP_S, HOP_PCIE_S = 12e-6, 40e-6
BUSY = 0.85  # share of its capacity that a replica is planned for, so that bursts do not queue
MOST_SEQUENCES = 512


@dataclass(frozen=True)
class ServingDemand:
    """Requests a second, each with a prompt and an answer, and the longest waits: for the first token, and between
    tokens."""

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
        """Of one request, at its end."""
        return self.prompt + self.answer


@dataclass(frozen=True)
class Serving:
    """One way to serve: `tensor_parallel` GPUs hold a replica, `replicas` of them share the requests."""

    gpu: str
    precision: Precision
    tensor_parallel: int
    replicas: int
    sequences: int  # at once in a replica, at the planned load
    most_sequences: int  # that memory holds at full length
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
        """As vLLM names them."""
        return {
            "tensor_parallel_size": self.tensor_parallel,
            "dtype": self.precision,
            "max_model_len": 1 << math.ceil(math.log2(demand.tokens)),
            "max_num_seqs": min(self.most_sequences, max(self.sequences, 1)),
            "gpu_memory_utilization": MEMORY_SHARE,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
        }


def parse_wait(name: str, text: str | None) -> float | None:
    """`500ms` or `0.5s` -> seconds."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s)\s*", text, re.I)
    if not match or not float(match[1]):
        raise UserError(f"{name} {text}: write a time above 0 with its unit, such as 500ms or 0.5s")
    return float(match[1]) / (1000 if match[2].lower() == "ms" else 1)


def cache_per_token(shape: ModelShape, bytes_per_value: int = 2) -> int:
    """Bytes of keys and values of one token: 2 x layers x KV heads x head size x bytes; a latent waist keeps less."""
    return cache_bytes(shape, 2, bytes_per_value) - cache_bytes(shape, 1, bytes_per_value)


def weight_bytes(shape: ModelShape, precision: Precision) -> float:
    """Matrices in the precision of serving, the embedding and the head in 16 bits."""
    ends = shape.vocab * shape.width * (1 if shape.tied else 2)
    return WEIGHT_BYTES[precision] * (shape.parameters - ends) + 2.0 * ends


class _Replica:
    """The times of one replica: a model over some GPUs of one kind."""

    def __init__(self, shape: ModelShape, gpu: Gpu, precision: Precision, split: int, demand: ServingDemand) -> None:
        self.demand, self.split = demand, split
        compute = "fp8" if precision == "fp8" else "bf16" if "bf16" in gpu.peaks else "fp16"
        self.flops = gpu.peak(compute) * split * PREFILL_SHARE
        self.bandwidth = gpu.memory_bandwidth * split * DECODE_SHARE
        self.weights = weight_bytes(shape, precision)
        # A batch of any size soon meets all experts; one sequence reads its own alone.
        self.read_one = self.weights * active(shape) / shape.parameters
        self.per_token = 2.0 * multiplied(shape)  # FLOPs
        self.scores = 2.0 * shape.layers * shape.attention_width  # FLOPs of attention for a token and a key
        self.cache = cache_bytes(shape, demand.tokens)
        self.mean_cache = cache_bytes(shape, demand.prompt + demand.answer // 2)
        hop = HOP_PCIE_S if "PCIe" in gpu.link_name else HOP_S
        self.hops_s = 2 * shape.layers * hop if split > 1 else 0.0
        moved = 4.0 * shape.layers * shape.width * 2 * (split - 1) / split  # bytes of two all-reduces for a token
        self.moved_s = moved / gpu.link_bandwidth if split > 1 else 0.0
        # A replica shares its cache among GPUs up to the number of KV heads; beyond it heads are kept twice.
        copies = max(1.0, split / max(1, shape.kv_heads))
        room = split * (gpu.memory_bytes * MEMORY_SHARE - ENGINE_BYTES) - self.weights
        self.most = int(room / (self.cache * copies)) if room > 0 else 0

    @property
    def prefill_s(self) -> float:
        prompt = self.demand.prompt
        flops = self.per_token * prompt + self.scores * prompt * prompt
        return max(flops / self.flops, self.weights / self.bandwidth) + self.moved_s * prompt + self.hops_s + STEP_S

    def step_s(self, sequences: float) -> float:
        """One token for each sequence."""
        read = self.weights if sequences > 1 else self.read_one
        bytes_s = (read + sequences * self.mean_cache) / self.bandwidth
        flops_s = sequences * self.per_token / self.flops
        return max(bytes_s, flops_s) + self.hops_s + sequences * self.moved_s + STEP_S

    def at(self, rps: float) -> tuple[float, float, float] | None:
        """(time to first token, time between tokens, sequences at once) under a load; None where it cannot keep up."""
        busy = rps * self.prefill_s  # share of the time that prefills take
        if busy >= 1:
            return None
        # Little's law: rps x answer x time between tokens sequences are decoding. That time is the longer of two lines
        # in their number, so that the number is the larger of two solutions.
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
        found = self.at(rps)
        if found is None:
            return False
        first, between, sequences = found
        demand = self.demand
        return first <= demand.ttft_s and between <= demand.tpot_s and sequences <= min(self.most, MOST_SEQUENCES)

    def capacity(self) -> float:
        """Most requests a second within the promises; 0 where even a single one breaks them."""
        if not self.most or not self.fits(1e-6):
            return 0.0
        low, high = 1e-6, 1.0
        while self.fits(high) and high < 1e5:
            low, high = high, 2 * high
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low


def serve(
    shape: ModelShape, demand: ServingDemand, gpu: Gpu, precisions: tuple[Precision, ...] = ("bf16",)
) -> list[Serving]:
    """Ways to serve on one kind of GPU, fewest GPUs first. Refused with the arithmetic where there is none."""
    found = []
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
            found.append(
                Serving(
                    gpu.name,
                    precision,
                    split,
                    replicas,
                    math.ceil(at[2]),
                    replica.most,
                    capacity,
                    at[0],
                    at[1],
                    cache_per_token(shape),
                )
            )
    if not found:
        raise UserError(
            _why_not(shape, demand, gpu, "fp8" if "fp8" in precisions and "fp8" in gpu.peaks else precisions[0])
        )
    return sorted(found, key=lambda way: (way.gpus, way.tensor_parallel))


def rank_serving(
    shape: ModelShape,
    demand: ServingDemand,
    gpus: list[Gpu],
    prices: PriceList,
    term: Term = "on_demand",
    precisions: tuple[Precision, ...] = ("bf16", "fp8"),
) -> list[Serving]:
    """Ways over GPU types, providers and regions by the price of a million tokens; the machines run all the time."""
    found, refused = [], ""
    for gpu in gpus:
        try:
            ways = serve(shape, demand, gpu, precisions)
        except UserError as fault:
            refused = refused or str(fault)
            continue
        for price in prices.find(gpu=gpu.name, term=term):
            fitting = [way for way in ways if price.most is None or way.tensor_parallel <= price.most]
            if fitting:
                found.append(_priced(fitting[0], price, demand))
    if not found:
        raise UserError(refused or f"no {term} price for {', '.join(gpu.name for gpu in gpus)}: add one to your prices")
    return sorted(found, key=lambda way: (way.usd_hour, way.tpot_s))


def _priced(way: Serving, price: Price, demand: ServingDemand) -> Serving:
    usd = way.gpus * price.usd_hour
    answered = demand.rps * 3600 / 1e6  # millions of requests an hour
    return Serving(
        way.gpu, way.precision, way.tensor_parallel, way.replicas, way.sequences, way.most_sequences,
        way.rps_per_replica, way.ttft_s, way.tpot_s, way.cache_bytes_per_token, price, usd,
        usd / (answered * demand.answer), usd / (answered * demand.tokens),
    )  # fmt: skip


def _why_not(shape: ModelShape, demand: ServingDemand, gpu: Gpu, precision: Precision) -> str:
    """The bound that a single request already breaks on eight GPUs."""
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
            "more, "
            "or take fp8 weights or a smaller model"
        )
    return (
        f"serving: a prompt of {demand.prompt:,} tokens takes at least {1000 * first:.0f} ms on {name} "
        f"({replica.per_token * demand.prompt:.2g} FLOPs): write --ttft {math.ceil(1000 * first * 1.2)}ms or more, or "
        "shorter prompts"
    )


SHOWN = 8


def demand_of(rps: float, prompt: int, answer: int, ttft: str | None, tpot: str | None) -> ServingDemand:
    """With waits as people write them, such as 500ms."""
    usual = ServingDemand(1)
    first, between = parse_wait("--ttft", ttft), parse_wait("--tpot", tpot)
    return ServingDemand(rps, prompt, answer, first or usual.ttft_s, between or usual.tpot_s)


def ways_to_serve(shape: ModelShape, demand: ServingDemand, where: str | None) -> list[Serving]:
    """On the GPU type that is named, or on all that are rented on demand; the cheapest first."""
    prices = load_prices()
    rented = {price.gpu for price in prices.prices if price.term == "on_demand"}
    # The fastest first: what even that cannot do is told of it.
    fastest = sorted(gpus().values(), key=lambda gpu: -gpu.memory_bandwidth)
    types = [parse_cluster(where).gpu] if where else [gpu for gpu in fastest if gpu.name in rented]
    return rank_serving(shape, demand, types, prices)


def serving_lines(shape: ModelShape, demand: ServingDemand, ways: list[Serving]) -> list[str]:
    best = ways[0]
    shown = [
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
    shown += [f"  setting  {key}: {str(value).lower()}" for key, value in best.settings(demand).items()]
    shown.append("  basis    a roofline at shares of the data sheet that engines usually reach; not measured here")
    seen: set[tuple[str, str]] = set()
    for way in ways:
        if way.price is None or (way.gpu, way.precision) in seen or len(seen) == SHOWN:
            continue
        seen.add((way.gpu, way.precision))
        shown.append(
            f"  cost     ${way.usd_per_million:.3f} a million tokens (${way.usd_per_million_output:.2f} of output), "
            f"${way.usd_hour:,.2f} an hour: {way.gpus} x {way.gpu} {way.precision}, {way.price.provider} "
            f"{way.price.region} (prices of {way.price.date})"[:WIDTH]
        )
    return shown


def serving_json(shape: ModelShape, demand: ServingDemand, ways: list[Serving]) -> dict[str, Any]:
    told = [{**asdict(way), "gpus": way.gpus, "settings": way.settings(demand)} for way in ways]
    return {"parameters": shape.parameters, "demand": asdict(demand), "best": told[0], "ways": told}
