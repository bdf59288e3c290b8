"""Several processes of one run, forked from this one, which has imported everything: two ranks take under a second."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bessemer.spec.schema import RunSpec

CONTEXT = multiprocessing.get_context("fork")


def _run(rank: int, size: int, place: str, work: Callable[..., Any], arguments: tuple[Any, ...], answers: Any) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{place}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        answers.put((rank, work(*arguments), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    answers.close()
    answers.join_thread()
    sys.stdout.flush()
    os._exit(0)


def on_ranks(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work` gives on each rank; the first fault is raised here."""
    answers = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder) / "meet")
        ranks = [
            CONTEXT.Process(target=_run, args=(rank, size, place, work, arguments, answers)) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        try:
            while len(found) < size:
                rank, answer, fault = answers.get(timeout=900)
                if fault:
                    raise AssertionError(f"rank {rank} of {size}:\n{fault}")
                found[rank] = answer
        finally:
            for process in ranks:
                process.join(2 if len(found) == size else 0)
                process.kill()
    return [found[rank] for rank in range(size)]


@pytest.fixture(scope="module", autouse=True)
def measured_once(one_probe: None) -> None:
    """See `one_probe`."""


@pytest.fixture(scope="session")
def ranks() -> Callable[..., list[Any]]:
    return on_ranks


@pytest.fixture
def tiny_spec(tmp_path: Path) -> Callable[..., RunSpec]:
    """A spec of a run that takes some milliseconds a step; its sections are replaced by keyword."""
    corpus = tmp_path / "words.jsonl"
    draw, words = random.Random(0), ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould"]
    lines = (json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(20, 120)))}) for _ in range(120))
    corpus.write_text("\n".join(lines) + "\n")

    def make(name: str, **more: Any) -> RunSpec:
        data: dict[str, Any] = {
            "name": name, "runs": str(tmp_path / "runs"), "precision": "fp32", "tokenizer": {"vocab": 300},
            "model": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64},
            "data": {"sources": {"words": {"path": [str(corpus)]}}, "context": 32, "validation": 0.1},
            "budget": {"steps": 24, "batch": 256, "micro_batch": 2}, "optimizer": {"lr": 0.01},
            "schedule": {"kind": "constant", "warmup": 2}, "evaluate": {"every": "1000 steps"},
            "checkpoint": {"every": "8 steps"}, "parallel": {"device": "cpu", "threads": 1},
        }  # fmt: skip
        return RunSpec.model_validate(data | more)

    return make


@pytest.fixture(scope="session")
def worker() -> Any:
    """The module `lineage_worker.py` beside this one, which is also a script for torchrun."""
    found = importlib.util.spec_from_file_location("lineage_worker", Path(__file__).with_name("lineage_worker.py"))
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules["lineage_worker"] = module  # what it defines can be pickled
    found.loader.exec_module(module)
    return module
