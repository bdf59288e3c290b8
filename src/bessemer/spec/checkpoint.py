"""The checkpoint section: when the run is saved, how, where to, and what is kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from bessemer.spec.part import Part
from bessemer.spec.quantity import AutoInterval, Bytes, Seconds, StepCount


class CheckpointSpec(Part):
    """When the run is saved and what is kept. A checkpoint stays if any of the keep rules asks for it."""

    every: AutoInterval = Field(
        "auto",
        description="interval of saves; auto weighs what a save costs against what a failure would",
        examples=["500 steps"],
    )
    asynchronous: bool | Literal["auto"] = Field(
        "auto",
        description="train on while a copy of the state is written; auto does so where it shortens the stall",
        examples=[True],
    )
    keep_last: int = Field(2, ge=1, le=1_000_000, description="newest checkpoints kept", examples=[2])
    keep_best: bool = Field(
        True,
        description="also keep the one with the best validation loss; each evaluation that is a new best saves, beside "
        "`every`",
        examples=[True],
    )
    keep_every: StepCount | None = Field(
        None, description="also keep the first one of every so many steps", examples=[10000]
    )
    keep_age: Seconds | None = Field(None, gt=0, description="also keep those younger than this", examples=["24h"])
    keep_bytes: Bytes | None = Field(
        None,
        description="room for them all: beyond it the oldest go first, but never the newest, confirmed, best or tagged",
        examples=["500GB"],
    )
    archive_model_only: bool = Field(
        False, description="what keep_every keeps is a copy of the weights alone, a third of the size", examples=[True]
    )
    remote: str | None = Field(
        None,
        description="an fsspec URL that checkpoints are copied to in the background, under the run's name; "
        "credentials come from the environment",
        examples=["s3://bucket/checkpoints"],
    )
    remote_keep_last: int | None = Field(
        None, ge=1, le=1_000_000, description="newest checkpoints kept there (default: keep_last)", examples=[5]
    )

    @field_validator("remote")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        scheme, mark, rest = (value or "").partition("://")
        if value is not None and not (scheme and mark and rest.strip("/")):
            raise ValueError("a URL such as s3://bucket/checkpoints or file:///mnt/durable/checkpoints")
        if "@" in rest.partition("/")[0]:
            raise ValueError("the address holds a password; set it in the environment")
        return value
