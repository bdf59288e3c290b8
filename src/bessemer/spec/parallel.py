"""Where a run's model lies: devices, the degrees of each kind of parallelism, and how their parts talk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bessemer.spec.quantity import AutoDegree, AutoThreads, Seconds, SpecSection

Degree = Annotated[int, Field(ge=1, le=1_000_000)]


class ReplicasSpec(SpecSection):
    """How whole replicas add up their gradients (`dp_replicate` alone, torch's DDP)."""

    bucket_mb: int = Field(25, ge=1, le=4096, description="MiB of gradients that are sent together", examples=[50])
    compress: Literal["none", "bf16", "powersgd"] = Field(
        "none", description="how gradients travel: none, bf16 or powersgd; the last two change the losses",
        examples=["bf16"],
    )  # fmt: skip
    rank: int = Field(4, ge=1, le=1024, description="rank of PowerSGD's approximation", examples=[4])
    static_graph: bool = Field(
        False, description="the same layers take part in every pass, which DDP may then rely on", examples=[True]
    )
    divide_optimizer: bool = Field(
        False, description="each replica keeps and steps its share of the moments (ZeRO-1)", examples=[True]
    )


class ShardSpec(SpecSection):
    """How a divided replica is gathered for computing (`dp_shard`, torch's FSDP2)."""

    reshard: Literal["auto", "always", "never"] = Field(
        "auto",
        description="whether a layer is divided again after its forward pass; never keeps it whole until backward",
        examples=["never"],
    )
    layers: Degree = Field(1, description="layers that are gathered together", examples=[2])
    prefetch: int = Field(1, ge=1, le=8, description="groups of layers that are gathered ahead", examples=[2])
    alone: bool = Field(
        False, description="divide the weights of a single process too: shows what dividing costs", examples=[True]
    )


class PipelineSpec(SpecSection):
    """How micro-batches flow through the stages (`pp`)."""

    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = Field(
        "1f1b", description="1f1b, gpipe, interleaved or zero_bubble", examples=["interleaved"]
    )
    stages: int = Field(
        2, ge=2, le=16, description="stages in each process, of interleaved and zero_bubble", examples=[2]
    )


class DeepSpeedSpec(SpecSection):
    """What DeepSpeed divides and where that lies (`engine: deepspeed`)."""

    zero: Literal[0, 1, 2, 3] = Field(2, description="0 to 3: nothing, moments, gradients, weights", examples=[3])
    offload: Literal["none", "cpu", "nvme"] = Field(
        "none", description="where moments (and weights, with zero 3) lie between uses", examples=["cpu"]
    )
    folder: str | None = Field(None, description="folder on the fast disk, with offload: nvme", examples=["/local"])


class ParallelSpec(SpecSection):
    """Where it runs. The degrees say how a model lies over the processes that a launcher started."""

    device: Literal["auto", "cpu", "cuda", "mps"] = Field(
        "auto", description="auto, cpu, cuda or mps", examples=["cuda"]
    )
    threads: AutoThreads = Field("auto", description="CPU threads; changes the last digits of a CPU run", examples=[8])
    engine: Literal["torch", "deepspeed"] = Field(
        "torch", description="torch or deepspeed, whose step owns clipping", examples=["deepspeed"]
    )
    dp_replicate: AutoDegree = Field(
        "auto", description="replicas, each of which reads its share of a step's rows", examples=[2]
    )
    dp_shard: AutoDegree = Field(
        "auto", description="processes among which a replica's weights, gradients and moments are divided", examples=[8]
    )
    tp: Degree = Field(1, description="processes that share every matrix of a layer (tensor parallel)", examples=[2])
    cp: Degree = Field(1, description="processes that share the tokens of a row (context parallel)", examples=[2])
    context: Literal["ulysses", "ring"] = Field(
        "ulysses",
        description="with cp: ulysses exchanges columns for heads, ring sends keys and values round the processes",
        examples=["ring"],
    )
    pp: Degree = Field(1, description="stages that hold the layers in turn (pipeline parallel)", examples=[2])
    ep: Degree = Field(1, description="processes that share the experts of a layer (expert parallel)", examples=[2])
    patience: Seconds = Field(
        1800.0,
        gt=0,
        description="how long a process waits for the others before it ends, for the launcher to start all again",
        examples=["10 min"],
    )
    sequence: bool = Field(
        True, description="with tp: what lies between matrices is divided along the row too", examples=[False]
    )
    replicas: ReplicasSpec = Field(default_factory=ReplicasSpec, description="how replicas add up gradients")
    shard: ShardSpec = Field(default_factory=ShardSpec, description="how divided replicas are gathered")
    pipeline: PipelineSpec = Field(default_factory=PipelineSpec, description="how stages take turns")
    deepspeed: DeepSpeedSpec = Field(default_factory=DeepSpeedSpec, description="how DeepSpeed divides")
