"""Runs that train a part of a model: their checkpoints hold that part, and name the folder that holds the rest."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from bessemer.checkpoint.archive import pack, unpack
from bessemer.checkpoint.base import FrozenBase
from bessemer.checkpoint.manifest import read_manifest
from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors, compare
from bessemer.cli.main import app
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.export.hf import open_native, to_hf
from bessemer.run.directory import Run
from bessemer.session import restore
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import dump_spec
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job
from bessemer.train.trained import load_model

from .conftest import Faults, spec_data, train_until
from .test_incident import Break

transformers = pytest.importorskip("transformers")
FREEZE = ["embedding", "blocks.0-1", "blocks.2.ffn"]
Make = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    path = tmp_path_factory.mktemp("hf") / "model"
    tokenizer = Tokenizer.train([corpus.read_text()], 300)
    path.mkdir()
    tokenizer.save(path / "tokenizer.json")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=64, intermediate_size=160, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def make(folder: Path, corpus: Path, prepared: Path, tmp_path: Path) -> Make:
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / ".data").symlink_to(prepared)

    def spec(name: str = "run", **parts: Any) -> RunSpec:
        parts = {"optimizer": {"freeze": FREEZE}, "budget": {"steps": 30}} | parts
        data = spec_data(name, corpus, runs, checkpoint={"every": 10, "keep_last": 9}, **parts)
        return RunSpec.model_validate(data | {"model": {"hf": str(folder)}, "tokenizer": parts.get("tokenizer", {})})

    return spec


class Hold(Faults):
    """Hands out the job of a session, to look at its model after the end."""

    job: Job

    def attach(self, job: Job, tokenizer: Tokenizer) -> None:
        super().attach(job, tokenizer)
        self.job = job


def train(spec: RunSpec, faults: Faults | None = None) -> Any:
    return Session(spec, faults=faults).train()


def last(spec: RunSpec) -> Path:
    return CheckpointStore(run_folder(spec) / "checkpoints").committed()[-1][0]


def losses(spec: RunSpec) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in Run(run_folder(spec)).metrics()]


def base_of(checkpoint: Path) -> FrozenBase:
    base = FrozenBase.of(read_manifest(checkpoint))
    assert base is not None
    return base


def full_checkpoints(patch: pytest.MonkeyPatch) -> None:
    """Saves as earlier versions did."""
    patch.setattr(restore, "find_base", lambda engine, kind, path: None)


def change(folder: Path, name: str, by: float = 1.0) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[0] += by
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_checkpoint_is_smaller_by_the_frozen_bytes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, full = make("part"), make("full")
    hold = Hold()
    assert train(spec, hold).kind == "finished"
    with monkeypatch.context() as patch:
        full_checkpoints(patch)
        assert train(full).kind == "finished"
    model = hold.job.engine.model
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    base = base_of(last(spec))
    assert set(base.tensors) == set(frozen) and len(frozen) == 22
    assert base.path == str(spec.model.hf) and base.kind == "hf"
    frozen_bytes = sum(p.nbytes for p in frozen.values())
    saved = read_manifest(last(full)).bytes - read_manifest(last(spec)).bytes
    assert frozen_bytes <= saved < 1.25 * frozen_bytes  # torch adds a header to each tensor
    (event,) = Run(run_folder(spec)).events("frozen_base")
    assert event["fingerprint"] == base.fingerprint and "22 frozen tensors" in event["reason"]
    part, whole = SavedTensors(last(spec)), SavedTensors(last(full))
    assert set(part) == set(whole) and all(torch.equal(part[n], whole[n]) for n in whole if "guard" not in n)
    assert {n: (t.shape, t.dtype) for n, t in part.blank().items()} == {n: (t.shape, t.dtype) for n, t in part.items()}
    assert not {name for name in hold.job.snapshot_state() if name.removeprefix("model.") in frozen}
    assert losses(spec) == losses(full)


def test_a_manifest_without_a_base_is_written_as_before(make_spec: Make) -> None:
    spec = make_spec("random", optimizer={"freeze": ["embedding"]}, budget={"steps": 10})
    train(spec)
    assert '"base"' not in (last(spec) / "manifest.json").read_text()
    assert "model.embedding.weight" in SavedTensors(last(spec))._entries


@pytest.mark.slow  # a stopped one, below, reads the same files
def test_a_killed_run_resumes_with_the_same_losses(make: Make, tmp_path: Path) -> None:
    whole, broken = make("whole", budget={"steps": 60}), make("broken", budget={"steps": 60})
    train(whole)
    path = tmp_path / "broken.yaml"
    path.write_text(dump_spec(broken))
    process = subprocess.Popen([sys.executable, "-m", "bessemer", "train", str(path), "--plain"], stdout=-3, stderr=-3)
    began, saved = time.monotonic(), run_folder(broken) / "checkpoints" / "step-00000020.a1" / "manifest.json"
    while process.poll() is None and not saved.exists() and time.monotonic() - began < 100:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it ended before the kill"
    assert train(broken).kind == "finished"
    assert losses(broken) == losses(whole) and len(losses(whole)) == 60
    assert len(list(Run(run_folder(broken)).events("started"))) == 2


def test_a_stopped_run_resumes_with_the_same_losses(make: Make) -> None:
    whole, broken = make("whole"), make("broken")
    train(whole)
    assert train_until(broken, 14).kind == "interrupted"
    assert train(broken).kind == "finished"
    assert losses(broken) == losses(whole)
    assert base_of(last(broken)) == base_of(last(whole))


def test_a_run_of_an_earlier_version_goes_on_with_full_checkpoints(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, old = make("whole"), make("old")
    train(whole)
    with monkeypatch.context() as patch:
        full_checkpoints(patch)
        train_until(old, 14)
    change(folder, "model.layers.0.mlp.up_proj.weight")  # it does not need the folder's weights
    assert train(old).kind == "finished"
    assert losses(old) == losses(whole) and not read_manifest(last(old)).base


def test_a_changed_base_is_refused_with_both_fingerprints(make: Make, folder: Path) -> None:
    spec = make()
    train_until(spec, 14)
    fingerprint = base_of(last(spec)).fingerprint
    change(folder, "model.layers.2.self_attn.q_proj.weight")  # trains: not a part of the base
    assert train_until(spec, 18).kind == "interrupted"
    change(folder, "model.layers.1.mlp.up_proj.weight")
    with pytest.raises(UserError) as refusal:
        train(spec)
    message = str(refusal.value)
    assert "\n" not in message and f"{folder} (fingerprint {fingerprint})" in message
    now = message.split("now has fingerprint ")[1].split(":")[0]
    assert len(now) == len(fingerprint) == 32 and now != fingerprint and "blocks.1.ffn.up.weight" in message
    with pytest.raises(UserError, match=r"has changed in blocks.1.ffn.up.weight"):
        load_model(run_folder(spec))
    with pytest.raises(UserError, match=r"has changed in blocks.1.ffn.up.weight"):
        to_hf(open_native(run_folder(spec)), folder.parent / "out")
    shutil.move(folder / "model.safetensors", folder / "weights.safetensors")
    with pytest.raises(
        UserError, match=f"fingerprint {fingerprint}.*, which now has no fingerprint.*neither model.safetensors"
    ):
        load_model(run_folder(spec))
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=f"fingerprint {fingerprint}.*, which is gone"):
        load_model(run_folder(spec))


@pytest.mark.parametrize(
    "parts",
    [
        {},
        pytest.param(
            {"memory": {"weights": "stochastic"}, "precision": "bf16", "budget": {"steps": 4}}, marks=pytest.mark.slow
        ),
    ],
    ids=["fp32", "bf16"],
)
def test_what_is_loaded_and_exported_is_the_model_in_memory(make: Make, tmp_path: Path, parts: dict[str, Any]) -> None:
    spec, hold = make(**parts), Hold()
    assert train(spec, hold).kind == "finished"
    expected = {name: tensor.float() for name, tensor in hold.job.engine.model.state_dict().items()}
    assert (hold.job.engine.model.blocks[0].ffn.up.weight.dtype == torch.bfloat16) == bool(parts)
    model = load_model(run_folder(spec)).model
    state = model.state_dict()
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)
    to_hf(open_native(run_folder(spec)), tmp_path / "out", dtype="fp32")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    for hf_name, name in (("layers.0.mlp.up_proj", "blocks.0.ffn.up"), ("layers.2.mlp.up_proj", "blocks.2.ffn.up"),
                          ("embed_tokens", "embedding")):  # fmt: skip
        assert torch.equal(exported[f"model.{hf_name}.weight"], expected[f"{name}.weight"])


def test_another_run_starts_from_base_and_trained_part(make: Make, folder: Path) -> None:
    first, hold = make("first"), Hold()
    train(first, hold)
    parts: dict[str, Any] = {"optimizer": {"freeze": ["embedding", "blocks.0", "blocks.2"]}}
    second = make("second", budget={"steps": 20}, **parts).model_copy(update={"start_from": str(last(first))})
    after = Hold()
    assert train(second, after).kind == "finished"
    before, now = (each.job.engine.model.state_dict() for each in (hold, after))
    same = {name for name in before if torch.equal(before[name], now[name])}
    assert same == {name for name in before if not name.startswith(("blocks.1.", "norm."))}
    base = base_of(last(second))
    assert base.kind == "checkpoint" and base.path == str(last(first)) and set(base.tensors) == same
    model = load_model(run_folder(second)).model  # reads blocks.0 from the folder, and blocks.2 from the first run
    assert all(torch.equal(tensor, now[name]) for name, tensor in model.state_dict().items())
    change(folder, "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(
        UserError, match=f"first.*: its frozen weights are those of {folder} .* changed in blocks.0.ffn"
    ):
        load_model(run_folder(second))


def test_frozen_weights_that_the_base_does_not_hold_are_saved(make: Make, folder: Path) -> None:
    spec = make(tokenizer={"special": ["<|one|>", "<|two|>"]}, budget={"steps": 10})
    assert train(spec).kind == "finished"
    assert "embedding.weight" not in base_of(last(spec)).tensors
    assert "model.embedding.weight" in SavedTensors(last(spec))._entries
    rows = Tokenizer.load(folder / "tokenizer.json").vocab_size + 2
    assert load_model(run_folder(spec)).model.embedding.weight.shape[0] == rows


def test_a_packed_checkpoint_holds_everything(make: Make, folder: Path, tmp_path: Path) -> None:
    spec = make(budget={"steps": 10})
    train(spec)
    expected = {name: tensor.clone() for name, tensor in SavedTensors(last(spec)).items()}
    pack(last(spec), tmp_path / "packed", "one", codec="zlib")
    shutil.rmtree(folder)
    saved = SavedTensors(unpack(tmp_path / "packed", "one", tmp_path / "again"))
    assert len(saved) == len(expected) and {change.what for change in compare(saved, expected)} == {"same"}


def test_verify_reads_the_base_of_all_checkpoints_once(make: Make, folder: Path) -> None:
    spec = make()
    train(spec)
    arguments, base = ["checkpoints", "verify", str(run_folder(spec))], base_of(last(spec))
    saved = len(CheckpointStore(run_folder(spec) / "checkpoints").committed())

    def verify() -> tuple[int, list[str]]:
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, [line for line in result.stdout.splitlines() if " base" in line]

    status, lines = verify()
    assert status == 0 and lines == [
        f"sound    base {folder}  22 frozen tensors, fingerprint {base.fingerprint}",
        f"{saved} checkpoints, 0 damaged; 0 of 1 bases changed",
    ]
    change(folder, "model.layers.1.mlp.up_proj.weight")
    status, lines = verify()
    assert status == 1 and "1 of 1 bases changed" in lines[1]
    assert lines[0].startswith("CHANGED  base ") and "has changed in blocks.1.ffn.up.weight" in lines[0]
    moved = folder.rename(folder.with_name("moved"))
    status, lines = verify()
    assert status == 1 and "is gone" in lines[0] and f"`ln -s NEW_PLACE {folder}`" in lines[0] and len(lines) == 2
    folder.symlink_to(moved)
    change(moved, "model.layers.1.mlp.up_proj.weight", -1)
    assert verify()[0] == 0


@torch.no_grad()
def wipe(job: Job) -> None:
    job.engine.model.blocks[2].attention.out.weight.fill_(float("nan"))


@torch.no_grad()
def wipe_frozen(job: Job) -> None:
    job.engine.model.blocks[0].ffn.down.weight.fill_(float("nan"))


@pytest.mark.parametrize(
    ("copies", "fault"),
    [
        ("auto", wipe), ("off", wipe_frozen),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("off", wipe), ("auto", wipe_frozen)]),
    ],
    ids=["memory", "frozen disk", "disk", "frozen memory"],
)  # fmt: skip
def test_the_guard_rolls_back(make: Make, copies: str, fault: Callable[[Job], None]) -> None:
    guard = {"warmup": 8, "window": 32, "copy_every": "16 steps", "copies": copies, "ladder": {"careful": 4}}
    spec, whole = make("broken", budget={"steps": 60}, guard=guard), make("whole", budget={"steps": 60}, guard=guard)
    train(whole)
    assert train(spec, Break(fault, step=44)).kind == "finished"
    (back,) = Run(run_folder(spec)).events("rollback")
    assert back["origin"].startswith("memory" if (copies, fault) == ("auto", wipe) else "step-")
    after, expected = dict(losses(spec)), dict(losses(whole))
    assert all(after[step] == expected[step] for step in range(back["to_step"], 44))
    assert max(after[step] for step in range(50, 60)) < 1.2 * max(expected[step] for step in range(50, 60))
