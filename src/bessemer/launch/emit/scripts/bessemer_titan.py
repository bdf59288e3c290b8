"""Registers the run in this folder with torchtitan: model sizes, and batches in Bessemer's order.

torchtitan imports it through `experimental.custom_import`. A checkpoint holds only the step, which defines the batch.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.models.qwen3 import Qwen3ModelArgs, get_train_spec
from torchtitan.protocols.train_spec import register_train_spec

from bessemer.launch.emit.feed import open_emitted

HERE = Path(__file__).resolve().parent
IGNORED = -100


class Batches(BaseDataLoader):
    """Yields the micro-batches of one step after another."""

    def __init__(self, dp_world_size: int, dp_rank: int, job_config: Any, **_: Any) -> None:
        self.run, self.rank, self.ranks = open_emitted(HERE), dp_rank, dp_world_size
        self.rows, self.step = job_config.training.local_batch_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            batches = self.run.micro_batches(self.step, self.rank, self.ranks, "cpu", self.rows)
            self.step += 1  # torchtitan saves between steps
            for micro in batches:
                labels = micro.targets_BT.masked_fill(micro.weights_BT == 0, IGNORED)
                yield {"input": micro.inputs["input_ids"]}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict.get("step", 0)


def register() -> None:
    sizes = Qwen3ModelArgs(**json.loads((HERE / "titan.json").read_text()))
    spec = dataclasses.replace(
        get_train_spec(), model_args={"run": sizes}, build_dataloader_fn=Batches, build_validator_fn=None
    )
    register_train_spec("bessemer", spec)


register()
