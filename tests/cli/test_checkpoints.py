"""`bessemer checkpoints` as a user meets it: what is listed, what is refused, what is left on disk."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from bessemer.checkpoint.manifest import Manifest, verify
from bessemer.checkpoint.store import MODEL, CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors
from bessemer.model.transformer import build_model
from bessemer.run.directory import Run, RunWriter
from bessemer.spec.shape import ModelShape

from .conftest import Call

SHAPE = {"vocab": 11, "width": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 12}


def weights(seed: int) -> dict[str, Tensor]:
    model = build_model(ModelShape(**SHAPE), "cpu", seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def manifest(step: int, loss: float | None) -> Manifest:
    return Manifest(
        step=step, attempt=0, stream_fingerprint="f1", stream={"seed": 3}, spec_fingerprint=f"s{step > 20}",
        segments=[], batch_rows=[[0, 4]], progress={}, threads=1, device="cpu", versions={}, time=1000.0 + step,
        validation_loss=loss,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints at steps 10, 20, 30; the one at 20 is the best and confirmed."""
    folder = tmp_path / "runs" / "demo"
    with RunWriter(folder) as writer:
        writer.event("started", step=0, total_steps=30)
        spec = {"name": "demo", "model": "10M", "data": {"sources": {"web": "data/"}}}
        writer.write_file("spec.yaml", yaml.safe_dump(spec))
        writer.write_file("model.json", json.dumps({"shape": SHAPE, "eos": ""}))
        checkpoint_store = CheckpointStore(writer.checkpoints)
        for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5)):
            state = {MODEL + name: tensor for name, tensor in weights(step).items()}
            made = checkpoint_store.save({**state, "optimizer.step": torch.tensor(step)}, manifest(step, loss))
            if step == 20:
                checkpoint_store.confirm(made)
        writer.event("finished", step=30, reason="done")
    return folder


def names(run: Path) -> list[str]:
    return [path.name for path, _ in CheckpointStore(run / "checkpoints").committed()]


def damage(folder: Path) -> Path:
    shard = next(folder.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return shard


@pytest.mark.parametrize("verb", [
    "list", "verify", "diff", "prune", "restore", "tag", "lineage", "import", "pack", "unpack", "average"
])  # fmt: skip
def test_help_has_an_example(call: Call, verb: str) -> None:
    assert f"  {verb} " in call("checkpoints", "--help").out
    assert f"Example: bessemer checkpoints {verb} " in " ".join(call("checkpoints", verb, "--help").out.split())


@pytest.mark.parametrize("form", [("list",), ()])
def test_list_with_or_without_the_word(call: Call, run: Path, form: tuple[str, ...]) -> None:
    call("checkpoints", "tag", str(run), "best", "v1.2.0")
    said = call("checkpoints", *form, str(run))
    assert said.code == 0
    lines = [line.split() for line in said.out.splitlines()]
    assert lines[0] == ["step", "name", "age", "size", "val", "confirmed", "marks"]
    assert [line[:2] for line in lines[1:]] == [
        ["10", "step-00000010.a1"], ["20", "step-00000020.a1"], ["30", "step-00000030.a1"]
    ]  # fmt: skip
    assert lines[2][-4:] == ["2.0000", "yes", "v1.2.0", "best"] and lines[3][-3:] == ["2.5000", "-", "last"]
    found = json.loads(call("checkpoints", *form, str(run), "--json").out)
    assert [row["confirmed"] for row in found] == [False, True, False]
    size = sum(path.stat().st_size for path in (run / "checkpoints" / "step-00000010.a1").glob("[!m]*"))
    assert found[0]["bytes"] >= size > 0 and found[0]["tags"] == [] and found[1]["best"] and found[2]["last"]


def test_what_is_no_run_is_told(call: Call, tmp_path: Path) -> None:
    for arguments in (
        ("nowhere",),
        ("verify", "nowhere"),
        ("restore", "nowhere", "last"),
        ("pack", "a:b", "--to", "c"),
    ):
        said = call("checkpoints", *arguments)
        assert said.code == 2 and "not a run" in said.err and len(said.err.splitlines()) == 1
    with RunWriter(tmp_path / "new") as writer:
        writer.event("started")
    assert "no checkpoint yet" in call("checkpoints", "new").out
    assert call("checkpoints", "new", "--json").out.strip() == "[]"
    assert call("checkpoints").code == 2  # the help


def test_verify_names_the_damaged_file(call: Call, run: Path) -> None:
    said = call("checkpoints", "verify", str(run))
    assert said.code == 0 and said.out.count("sound") == 3 and "3 checkpoints, 0 damaged" in said.out
    shard = damage(run / "checkpoints" / "step-00000020.a1")
    said = call("checkpoints", "verify", str(run))
    assert said.code == 1 and "3 checkpoints, 1 damaged" in said.out and str(shard) in said.out
    assert call("checkpoints", "verify", f"{run}:last").code == 0
    assert call("checkpoints", "verify", f"{run}:best").code == 1
    (run / "checkpoints" / "step-00000030.a1" / "manifest.json").write_text("{}")
    said = call("checkpoints", "verify", str(run))
    assert said.code == 1 and "3 checkpoints, 2 damaged" in said.out


def test_diff_tells_tensors_and_settings(call: Call, run: Path) -> None:
    same = call("checkpoints", "diff", f"{run}:last", str(run / "checkpoints" / "step-00000030.a1"))
    assert same.code == 0 and same.out.startswith("0 tensors differ")
    said = call("checkpoints", "diff", f"{run}:best", f"{run}:last")
    assert "spec_fingerprint: sFalse -> sTrue" in said.out and "step: 20 -> 30" in said.out
    assert "model.embedding.weight: changed  relative 1." in said.out
    assert "model.norm.weight" not in said.out  # norms begin at one in both
    found = json.loads(call("checkpoints", "diff", f"{run}:best", f"{run}:last", "--json").out)
    change = next(row for row in found["tensors"] if row["name"] == "optimizer.step")
    assert (change["what"], change["largest"], change["relative"]) == ("changed", 10, 0.5)
    assert found["settings"]["validation_loss"] == [2.0, 2.5]


def test_prune_by_rules(call: Call, run: Path) -> None:
    before = names(run)
    said = call("checkpoints", "prune", str(run), "--keep-last", "1", "--dry-run")
    assert said.out == "would delete  step-00000010.a1\n" and names(run) == before
    call("checkpoints", "tag", str(run), "step-00000010.a1", "v0.1.0")
    assert call("checkpoints", "prune", str(run), "--keep-last", "1").out == "nothing to delete\n"
    (run / "checkpoints" / "tags.json").unlink()
    (run / "checkpoints" / "step-00000020.a1" / "confirmed").unlink()
    assert call("checkpoints", "prune", str(run), "--keep-last", "1", "--keep-best", "false").code == 0
    assert names(run) == ["step-00000030.a1"]
    assert [event["removed"] for event in Run(run).events("pruned")][-1] == ["step-00000010.a1", "step-00000020.a1"]
    said = call("checkpoints", "prune", str(run), "--keep-age", "soon")
    assert said.code == 2 and "keep_age" in said.err


def test_restore_sets_later_checkpoints_aside(call: Call, run: Path) -> None:
    call("checkpoints", "tag", str(run), "step-00000010.a1", "v0.1.0")
    said = call("checkpoints", "restore", str(run), "v0.1.0")
    assert said.code == 0 and "will continue from step-00000010.a1 (step 10)" in said.out
    assert names(run) == ["step-00000010.a1"]
    aside = run / "checkpoints" / "abandoned"
    assert [verify(path).step for path in sorted(aside.iterdir())] == [20, 30]
    (event,) = Run(run).events("restored")
    assert event["step"] == 10 and event["abandoned"] == ["step-00000020.a1", "step-00000030.a1"]


def test_answers_as_json(call: Call, run: Path, tmp_path: Path) -> None:
    answer = json.loads(call("checkpoints", "verify", str(run), "--json").out)
    assert answer["damaged"] == 0 and len(answer["checkpoints"]) == 3
    listed = names(run)
    assert json.loads(call("checkpoints", "tag", str(run), "best", "v1.0.0", "--json").out)["tag"] == "v1.0.0"
    pruned = call("checkpoints", "prune", str(run), "--keep-last", "1", "--keep-best", "false", "--dry-run", "--json")
    assert json.loads(pruned.out) == {"dry_run": True, "removed": [listed[0]]} and names(run) == listed
    average = json.loads(call("checkpoints", "average", str(run), "--last", "2", "--json").out)
    assert Path(average["checkpoint"]).is_dir() and average["averaged_of"] == listed[-2:]
    restored = json.loads(call("checkpoints", "restore", str(run), listed[0], "--json").out)
    assert restored["step"] == 10 and all(Path(place).is_dir() for place in restored["moved_to"])
    damage(run / "checkpoints" / listed[0])
    damaged = call("checkpoints", "verify", f"{run}:{listed[0]}", "--json")
    assert damaged.code == 1 and listed[0] in json.loads(damaged.out)["checkpoints"][0]["name"]


def test_restore_refuses_a_damaged_one_a_running_run_and_a_wrong_name(call: Call, run: Path) -> None:
    shard = damage(run / "checkpoints" / "step-00000020.a1")
    said = call("checkpoints", "restore", str(run), "step-00000020.a1")
    assert said.code == 1 and str(shard) in said.err
    with RunWriter(run):
        said = call("checkpoints", "restore", str(run), "step-00000010.a1")
        assert said.code == 2 and "is being written by process" in said.err
        assert call("checkpoints", "prune", str(run), "--keep-last", "1").code == 2
    said = call("checkpoints", "restore", str(run), "step-00000099.a1")
    assert said.code == 2 and "no checkpoint 'step-00000099.a1'" in said.err
    assert len(names(run)) == 3


def test_average_of_the_last_or_of_named_ones(call: Call, run: Path) -> None:
    said = call("checkpoints", "average", str(run), "--last", "2")
    assert said.code == 0
    made = run / "checkpoints" / "model-00000030.a1"
    found = SavedTensors(made, MODEL)
    for name, tensor in weights(20).items():
        assert torch.equal(found[name], ((tensor.double() + weights(30)[name].double()) / 2).float()), name
    assert set(found) == set(weights(20)) and names(run)[-1] == "step-00000030.a1"
    origin = json.loads(call("checkpoints", "lineage", str(run)).out)["made_from"]
    assert origin["model-00000030.a1"]["averaged_of"] == ["step-00000020.a1", "step-00000030.a1"]
    said = call("checkpoints", "average", str(run), "--names", "step-00000010.a1", "--names", "best", "--decay", "0.25")
    assert "model-00000020.a1" in said.out
    origin = verify(run / "checkpoints" / "model-00000020.a1").progress["made_from"]
    assert origin["shares"] == [0.25, 0.75]
    said = call("checkpoints", "restore", str(run), "model-00000030.a1")
    assert said.code == 2 and "weights only" in said.err
    assert call("checkpoints", "average", str(run), "--greedy", "--decay", "0.5").code == 2


def test_import_checks_the_model(call: Call, run: Path, tmp_path: Path) -> None:
    torch.save({f"module.{name}": tensor for name, tensor in weights(5).items()}, tmp_path / "other.pt")
    said = call("checkpoints", "import", "other.pt", "start", "--like", str(run))
    assert said.code == 0 and f"{ModelShape(**SHAPE).parameters:,} parameters" in said.out
    found = SavedTensors(tmp_path / "start" / "model-00000000.a1", MODEL)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights(5).items())
    assert call("checkpoints", "import", "other.pt", "elsewhere").code == 0  # no model to compare with
    assert "model-00000000.a1" in call("checkpoints", "import", "other.pt", str(run)).out
    torch.save({"norm.weight": torch.ones(3)}, tmp_path / "wrong.pt")
    said = call("checkpoints", "import", "wrong.pt", "start", "--like", str(run))
    assert said.code == 2 and "missing embedding.weight" in said.err and "norm.weight is (3,)" in said.err
    torch.save({"wte.weight": torch.ones(3)}, tmp_path / "gpt.pt")
    assert "not the names" in call("checkpoints", "import", "gpt.pt", "start").err


def test_pack_and_unpack(call: Call, run: Path, tmp_path: Path) -> None:
    said = call("checkpoints", "pack", f"{run}:best", "--to", "packed")
    assert said.code == 0 and "demo.step-00000020.a1" in said.out
    assert "read back  model: every bit the same" in said.out
    said = call("checkpoints", "pack", str(run), "--to", "packed", "--delta-from", "demo.step-00000020.a1", "--json")
    found = json.loads(said.out)
    assert found["name"] == "demo.step-00000030.a1" and found["already_there"] == 3  # the norms
    said = call("checkpoints", "unpack", "packed", "demo.step-00000030.a1", "back/checkpoints")
    assert said.code == 0
    back = SavedTensors(tmp_path / "back" / "checkpoints" / "step-00000030.a1", MODEL)
    assert all(torch.equal(back[name], tensor) for name, tensor in weights(30).items())
    said = call("checkpoints", "pack", f"{run}:best", "--to", "small", "--dtype", "bf16")
    assert "model: largest error" in said.out and "optimizer: every bit the same" in said.out
    assert "validation loss  not measured: " in said.out
    delta = ("--delta-from", "demo.step-00000020.a1", "--threshold", "0.5")
    said = call("checkpoints", "pack", str(run), "--to", "packed", "--name", "sparse", "--dtype", "int8", *delta)
    assert said.code == 0 and "changed beyond 0.5: " in said.out
    assert call("checkpoints", "pack", str(run), "--to", "x", "--threshold", "0.5").code == 2
    assert call("checkpoints", "pack", str(run), "--to", "x", "--compress", "lzma").code == 2
    said = call("checkpoints", "unpack", "packed", "nothing", "back")
    assert said.code == 2 and "there is demo.step-00000020.a1, demo.step-00000030.a1" in said.err
    damage(run / "checkpoints" / "step-00000010.a1")
    assert call("checkpoints", "pack", f"{run}:step-00000010.a1", "--to", "packed").code == 1


def test_a_tag_is_a_version(call: Call, run: Path) -> None:
    assert call("checkpoints", "tag", str(run), "last", "v2").code == 2
    assert call("checkpoints", "tag", str(run), "last", "v2.0.0").code == 0
    assert call("checkpoints", "verify", f"{run}:v2.0.0").out.startswith("sound    step-00000030.a1")
    assert call("checkpoints", "tag", str(run), "best", "v2.0.0").code == 2
    assert call("checkpoints", "tag", str(run), "best", "v2.0.0", "--move").code == 0


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Path]:
    """A run that was really trained, 30 steps."""

    def make() -> Path:
        from bessemer.session.session import train
        from bessemer.spec.schema import RunSpec

        words = ["steel", "iron", "blast", "flame", "ore", "coke", "slag"]
        draw = random.Random(0)
        lines = [{"text": " ".join(draw.choices(words, k=draw.randint(20, 80)))} for _ in range(80)]
        (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, lines)))
        spec: dict[str, Any] = {
            "name": "run", "runs": str(tmp_path / "runs"), "tokenizer": {"vocab": 300},
            "model": {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32},
            "data": {"sources": {"words": {"path": [str(tmp_path / "words.jsonl")]}}, "context": 32, "validation": 0.1},
            "budget": {"steps": 30, "batch": 128}, "optimizer": {"lr": 0.01}, "precision": "fp32",
            "parallel": {"device": "cpu", "threads": 1}, "checkpoint": {"every": 10, "keep_last": 3},
            "evaluate": {"every": 10, "tokens": 512}, "guard": {"enabled": False},
        }  # fmt: skip
        train(RunSpec.model_validate(spec))
        return tmp_path / "runs" / "run"

    return make


def test_a_trained_run_end_to_end(call: Call, trained: Callable[..., Path]) -> None:
    """The greedy soup is chosen by the run's own validation; a restored run trains again from there."""
    run = trained()
    said = call("checkpoints", "average", str(run), "--greedy")
    assert said.code == 0, said.err
    rows = json.loads(call("checkpoints", str(run), "--json").out)
    soup = next(row for row in rows if row["content"] == "model")
    alone = [float(line.split()[3]) for line in said.out.splitlines() if "  validation loss " in line]
    assert soup["validation_loss"] <= min(alone) + 1e-4
    best = min(record["loss"] for record in Run(run).validations())
    assert min(alone) == pytest.approx(best, abs=1e-4)  # the same sequences as in training
    assert call("checkpoints", "restore", str(run), "step-00000010.a1").code == 0
    trained()
    steps = [record["step"] for record in Run(run).metrics()]
    assert steps == list(range(30))
    (cut,) = Run(run).events("metrics_cut")
    assert cut["from_step"] == 10
