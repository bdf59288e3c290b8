"""The parallel section: device, degrees of each kind of parallelism, and how processes communicate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bessemer.spec.quantity import AutoDegree, AutoThreads, Seconds, SpecSection, section, setting

Degree = Annotated[int, Field(ge=1, le=1_000_000)]


class ReplicasSpec(SpecSection):
    """How complete replicas reduce their gradients (`dp_replicate` alone, torch's DDP)."""

    bucket_mb: int = setting(25, "MiB of gradients per all-reduce bucket", 50, ge=1, le=4096)
    compress: Literal["none", "bf16", "powersgd"] = setting(
        "none", "compression of gradients: none, bf16 or powersgd; the last two change the losses", "bf16"
    )
    rank: int = setting(4, "rank of the PowerSGD approximation", 4, ge=1, le=1024)
    static_graph: bool = setting(False, "tell DDP that every pass uses the same layers", True)
    divide_optimizer: bool = setting(False, "shard the optimizer state over the replicas (ZeRO-1)", True)


class ShardSpec(SpecSection):
    """How sharded weights are gathered (`dp_shard`, torch's FSDP2)."""

    reshard: Literal["auto", "always", "never"] = setting(
        "auto", "whether a layer is resharded after its forward pass; never keeps it gathered until backward", "never"
    )
    layers: Degree = setting(1, "layers gathered together", 2)
    prefetch: int = setting(1, "groups of layers prefetched", 2, ge=1, le=8)
    alone: bool = setting(False, "shard also with a single process, to measure the cost of sharding", True)


class PipelineSpec(SpecSection):
    """The pipeline schedule (`pp`)."""

    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = setting(
        "1f1b", "1f1b, gpipe, interleaved or zero_bubble", "interleaved"
    )
    stages: int = setting(2, "stages per process, for interleaved and zero_bubble", 2, ge=2, le=16)


class DeepSpeedSpec(SpecSection):
    """What DeepSpeed shards and offloads (`engine: deepspeed`)."""

    zero: Literal[0, 1, 2, 3] = setting(2, "ZeRO stage 0 to 3: shard nothing, optimizer state, gradients, weights", 3)
    offload: Literal["none", "cpu", "nvme"] = setting(
        "none", "offload optimizer state (and weights, with zero 3)", "cpu"
    )
    folder: str | None = setting(None, "folder on the NVMe disk, with offload: nvme", "/local")


class ParallelSpec(SpecSection):
    """Device and parallelism. The degrees lay the model out over the processes of the launcher."""

    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", "auto, cpu, cuda or mps", "cuda")
    threads: AutoThreads = setting("auto", "CPU threads; changes the last digits of a CPU run", 8)
    engine: Literal["torch", "deepspeed"] = setting("torch", "torch or deepspeed, which then clips", "deepspeed")
    dp_replicate: AutoDegree = setting("auto", "data-parallel replicas; each processes its share of a step's rows", 2)
    dp_shard: AutoDegree = setting("auto", "processes that shard the weights, gradients and moments of a replica", 8)
    tp: Degree = setting(1, "tensor parallel: processes that share every matrix of a layer", 2)
    cp: Degree = setting(1, "context parallel: processes that share the tokens of a row", 2)
    context: Literal["ulysses", "ring"] = setting(
        "ulysses",
        "with cp: ulysses exchanges tokens for heads (all-to-all), ring passes keys and values around",
        "ring",
    )
    pp: Degree = setting(1, "pipeline parallel: stages that hold consecutive layers", 2)
    ep: Degree = setting(1, "expert parallel: processes that share the experts of a layer", 2)
    patience: Seconds = setting(
        1800.0, "timeout of collectives; then the launcher restarts all processes", "10 min", gt=0
    )
    sequence: bool = setting(True, "with tp: also shard norms and residuals along the sequence", False)
    replicas: ReplicasSpec = section(ReplicasSpec, "how replicas reduce gradients")
    shard: ShardSpec = section(ShardSpec, "how sharded weights are gathered")
    pipeline: PipelineSpec = section(PipelineSpec, "the pipeline schedule")
    deepspeed: DeepSpeedSpec = section(DeepSpeedSpec, "what DeepSpeed shards and offloads")
