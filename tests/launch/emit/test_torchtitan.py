"""titan.toml under torchtitan's own manager; its network and rates against ours; our batches through its loader."""

import importlib
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bessemer.launch.emit import RunToEmit, emit, render, write_files
from bessemer.launch.emit.feed import open_emitted, write_initial_weights
from bessemer.model.transformer import build_model
from bessemer.spec.schema import RunSpec

Resolve = Callable[..., RunToEmit]


def titan(name: str) -> Any:
    """A module of torchtitan, which needs triton even to be imported."""
    pytest.importorskip("triton", reason="torchtitan needs triton")
    return pytest.importorskip(name, reason="torchtitan 0.2.2 is not installed")


def test_the_file_is_toml_and_says_the_run(resolved: Resolve) -> None:
    made = render("torchtitan", resolved(processes=2))
    found = tomllib.loads(made.files["titan.toml"])
    assert found["training"]["global_batch_size"] == 8
    assert found["training"]["local_batch_size"] == 2
    assert found["parallelism"]["data_parallel_replicate_degree"] == 2
    assert found["lr_scheduler"]["total_steps"] == 19
    assert "torchrun --nproc-per-node 2 -m torchtitan.train --job.config_file out/titan.toml" in made.command


def test_torchtitan_reads_the_config(resolved: Resolve, tmp_path: Path) -> None:
    config = titan("torchtitan.config")
    made = render("torchtitan", resolved(memory={"activations": "selective", "offload_optimizer": True}))
    (tmp_path / "titan.toml").write_text(made.files["titan.toml"])
    found = config.ConfigManager().parse_args(["--job.config_file", str(tmp_path / "titan.toml")])
    assert (found.training.steps, found.training.seq_len, found.training.enable_cpu_offload) == (20, 32, True)
    assert (found.optimizer.lr, found.optimizer.beta2) == (0.01, 0.95)
    assert (found.activation_checkpoint.mode, found.checkpoint.initial_load_in_hf) == ("selective", True)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_rates_are_ours(resolved: Resolve, kind: str) -> None:
    schedules, config = titan("torchtitan.components.lr_scheduler"), titan("torchtitan.config")
    run = resolved(schedule={"kind": kind})
    said = tomllib.loads(render("torchtitan", run).files["titan.toml"])["lr_scheduler"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=run.plan.peak_lr)
    built = schedules.build_lr_schedulers([optimizer], config.LRScheduler(**said), run.plan.total_steps)
    rates = []
    for _ in range(run.plan.total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        built.step()
    assert rates == pytest.approx([run.schedule.lr(step) for step in range(run.plan.total_steps)], rel=1e-9)


@pytest.mark.parametrize("qk_norm", ["none", "head"])
def test_the_registered_network_is_ours(
    tiny: Callable[..., RunSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qk_norm: str
) -> None:
    protocols = titan("torchtitan.protocols.train_spec")
    pytest.importorskip("transformers")
    folder = tmp_path / "out"
    write_files(emit("torchtitan", tiny(model={"qk_norm": qk_norm}), folder), folder)
    monkeypatch.setattr(protocols, "_extra_train_specs", {})
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("bessemer_titan", None)
    importlib.import_module("bessemer_titan")
    registered = protocols.get_train_spec("bessemer")
    sizes = registered.model_args["run"]
    network = registered.model_cls(sizes)
    from safetensors.torch import load_file

    adapter = registered.state_dict_adapter(sizes, str(folder / "model"))
    network.load_state_dict(
        adapter.from_hf(load_file(write_initial_weights(folder) / "model.safetensors")), strict=False
    )
    network.rope_cache = network._precompute_rope_cache()
    run = open_emitted(folder)
    ours = build_model(run.shape, "cpu", run.spec.seed, run.spec.model.init)
    job = SimpleNamespace(training=SimpleNamespace(local_batch_size=2))
    inputs, labels = next(iter(registered.build_dataloader_fn(dp_world_size=2, dp_rank=1, job_config=job)))
    batch = run.stream.micro_batches(0, 2, 1, 2)[0]
    assert torch.equal(inputs["input"], torch.from_numpy(batch.tokens))
    assert torch.equal(labels[labels != -100], torch.from_numpy(batch.targets[batch.weights > 0]))
    with torch.no_grad():
        found, wanted = network(inputs["input"]), ours.logits(ours(inputs["input"]))
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 1e-5
