"""The emitted script under a real `accelerate launch`, against our own loop; the config under accelerate's loader."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bessemer.errors import UserError
from bessemer.launch.emit import RunToEmit, emit, render, write_files
from bessemer.launch.emit.feed import load_model, open_emitted, write_initial_weights
from bessemer.model.transformer import build_model
from bessemer.run.directory import Run
from bessemer.session.session import train
from bessemer.spec.schema import RunSpec
from bessemer.train.objective import Pretrain

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
TOLERANCE = 5e-5  # of losses from 5.7 down to 2.8, in fp32; 1e-5 was seen: sums are taken in another order


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(420)
def test_two_processes_have_the_losses_of_one_bessemer(
    tiny: Callable[..., RunSpec], place: Path, tmp_path: Path
) -> None:
    spec = tiny(name="equal", data={"packing": "best_fit"})
    assert train(spec).kind == "finished"
    ours = [record["loss"] for record in Run.existing(place / "runs" / "equal").metrics()]
    made = emit("accelerate", spec, tmp_path / "out", processes=2)
    write_files(made, tmp_path / "out")
    assert made.command.startswith(f"python -m bessemer.launch.emit.feed {tmp_path / 'out'} && accelerate launch")
    launch = made.command.replace("python ", f"{sys.executable} ", 1).replace(
        "accelerate launch", f"{sys.executable} -m accelerate.commands.accelerate_cli launch"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(launch, shell=True, capture_output=True, text=True, env=environment, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = [json.loads(line)["loss"] for line in (tmp_path / "out" / "losses.jsonl").read_text().splitlines()]
    assert len(ours) == len(theirs) == 20
    assert ours[-1] < ours[0] - 0.3
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < TOLERANCE
    assert (tmp_path / "out" / "trained" / "config.json").exists()


@pytest.mark.slow
def test_a_stopped_script_goes_on_with_the_same_losses(tiny: Callable[..., RunSpec], tmp_path: Path) -> None:
    """In this process, on one rank: stopped in the twelfth step, it goes on from the state after the tenth."""
    folder = tmp_path / "out"
    write_files(emit("accelerate", tiny(name="again", checkpoint={"every": 5}), folder), folder)
    write_initial_weights(folder)
    main = runpy.run_path(str(folder / "train.py"))["main"]

    def stopping(place: Path) -> RunToEmit:
        run = open_emitted(place)
        count = run.count
        run.count = lambda step: count(step) if step < 12 else float(sys.exit("stopped"))  # type: ignore[method-assign]
        return run

    main.__globals__["open_emitted"] = stopping
    with pytest.raises(SystemExit, match="stopped"):
        main()
    main.__globals__["open_emitted"] = open_emitted
    main()
    records = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [*range(12), *range(10, 20)]
    assert records[10:12] == records[12:14]
    assert sorted(path.name for path in (folder / "states").iterdir()) == ["00000015", "00000020"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_accelerate_reads_the_config(resolved: Callable[..., RunToEmit], tmp_path: Path, device: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    parallel = {"device": device, "dp_replicate": 2, "dp_shard": 4}
    made = render("accelerate", resolved(parallel=parallel, precision="bf16"))
    (tmp_path / "accelerate.yaml").write_text(made.files["accelerate.yaml"])
    found = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (found.num_processes, found.mixed_precision, found.use_cpu) == (8, "bf16", device == "cpu")
    assert found.distributed_type == ("MULTI_GPU" if device == "cpu" else "FSDP")
    if device == "cuda":
        assert found.fsdp_config["fsdp_version"] == 2
        assert found.parallelism_config["parallelism_config_dp_replicate_size"] == 2
    else:
        assert any(note.startswith("parallel.dp_shard:") for note in made.notes)


@pytest.mark.parametrize("model", [pytest.param({"qk_norm": "head",
    "windows": [8, 0]}, marks=pytest.mark.slow), pytest.param({"windows": [8]}, marks=pytest.mark.slow),
    {"positions": "learned", "norm": "layer", "gated": False, "activation": "gelu_tanh", "qkv_bias": True,
    "out_bias": True, "ffn_bias": True, "kv_heads": 4}], ids=["qwen3", "mistral", "gpt2"])  # fmt: skip
def test_other_families_have_our_loss_too(
    tiny: Callable[..., RunSpec], tmp_path: Path, model: dict[str, object]
) -> None:
    """Windows and learned positions reach transformers, and documents stay apart."""
    folder = tmp_path / "out"
    write_files(emit("accelerate", tiny(model=model, data={"context": 64}), folder), folder)
    write_initial_weights(folder)
    run, theirs = open_emitted(folder), load_model(folder, gradient_checkpointing=False)
    ours, objective = build_model(run.shape, "cpu", run.spec.seed, run.spec.model.init), Pretrain(cross_documents=False)
    batches = run.stream.micro_batches(0, run.plan.micro_rows)
    assert not all(batch.single_document for batch in batches)
    with torch.no_grad():
        for batch, micro in zip(batches, run.micro_batches(0, 0, 1, "cpu"), strict=True):
            wanted = objective.loss(ours, objective.feed(batch, torch.device("cpu")), run.count(0)).nll
            found = micro.loss(theirs(**micro.inputs).logits) / run.count(0)
            assert float(found) == pytest.approx(float(wanted), rel=1e-5)


def test_weights_of_another_spec_are_not_trained_on(tiny: Callable[..., RunSpec], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_files(emit("accelerate", tiny(), folder), folder)
    (folder / "model").mkdir()
    write_files(emit("accelerate", tiny(), folder), folder)
    with pytest.raises(UserError, match="holds the initial weights of another spec"):
        write_files(emit("accelerate", tiny(seed=5), folder), folder)


def test_an_unknown_framework_is_told(tiny: Callable[..., RunSpec]) -> None:
    with pytest.raises(UserError, match="--emit jax: write one of accelerate, deepspeed, megatron, torchtitan"):
        emit("jax", tiny())
