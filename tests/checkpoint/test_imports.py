"""Weights from other programs' files come in equal and by native names; pickles that ask for more never run."""

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

from bessemer.checkpoint.import_weights import import_weights, require_native_names, select_weights
from bessemer.checkpoint.manifest import verify
from bessemer.checkpoint.store import MODEL, CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors, save_model
from bessemer.errors import UserError


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding.weight": (7, 4), "blocks.0.ffn.up.weight": (6, 4), "norm.weight": (4,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


class Touch:
    """A pickle that runs code when it is loaded: it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("wrap", [
    lambda found: found,
    lambda found: {"model": found, "optimizer": {"state": {0: {"step": 3}}}, "epoch": 2},
    lambda found: {"state_dict": {f"module._orig_mod.{name}": tensor for name, tensor in found.items()}},
    lambda found: {f"model.{name}": tensor for name, tensor in found.items()},
])  # fmt: skip
@pytest.mark.parametrize("name", ["a.pt", "pytorch_model.bin"])
def test_torch_files_however_they_were_saved(tmp_path: Path, wrap: Callable[[Any], Any], name: str) -> None:
    torch.save(wrap(weights()), tmp_path / name)
    assert_same(import_weights(tmp_path / name), weights())


def test_the_format_before_zip_files(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert_same(import_weights(tmp_path / "old.pt"), weights())


def test_safetensors_in_one_file_or_in_shards(tmp_path: Path) -> None:
    names = list(weights())
    save_file({names[0]: weights()[names[0]]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: weights()[name] for name in names[1:]}, tmp_path / "model-00002-of-00002.safetensors")
    assert_same(import_weights(tmp_path), weights())
    assert_same(import_weights(tmp_path / "model-00001-of-00002.safetensors"), {names[0]: weights()[names[0]]})


def test_what_a_trainer_writes_beside_the_weights_is_left_alone(tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "pytorch_model.bin")
    torch.save(Touch(tmp_path / "ran"), tmp_path / "training_args.bin")
    assert_same(import_weights(tmp_path), weights())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("old_format", [False, True])
def test_a_malicious_pickle_is_refused_by_name_and_does_not_run(tmp_path: Path, old_format: bool) -> None:
    trap = tmp_path / "ran"
    torch.save({**weights(), "x": Touch(trap)}, tmp_path / "bad.pt", _use_new_zipfile_serialization=not old_format)
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(Touch(trap)))
    for name in ("bad.pt", "plain.bin"):
        with pytest.raises(UserError) as refusal:
            import_weights(tmp_path / name)
        assert name in str(refusal.value) and "\n" not in str(refusal.value)
        assert "mkdir" in str(refusal.value) or name == "plain.bin"
    assert not trap.exists()


def test_trust_loads_what_was_refused(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    torch.save({"model": weights(), "x": Touch(trap)}, tmp_path / "mine.pt")
    assert_same(import_weights(tmp_path / "mine.pt", trusted=True), weights())
    assert trap.exists()  # it did run: that is what trust means


@pytest.mark.parametrize(("name", "content", "word"), [
    ("a.pt", b"not a checkpoint", "a.pt"),
    ("a.pt", b"", "a.pt"),
    ("a.safetensors", b"\x10\0\0\0\0\0\0\0{}", "a.safetensors"),
])  # fmt: skip
def test_files_that_are_something_else(tmp_path: Path, name: str, content: bytes, word: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=word):
        import_weights(tmp_path / name)


@pytest.mark.parametrize("old_format", [False, True])
def test_a_damaged_file_is_refused_in_one_line_or_read(tmp_path: Path, old_format: bool) -> None:
    """A flipped byte may hit a number, which no .pt file can tell; whatever else it hits is a UserError."""
    path, draw = tmp_path / "a.pt", random.Random(0)
    torch.save(weights(), path, _use_new_zipfile_serialization=not old_format)
    sound, refused = path.read_bytes(), []
    for _ in range(150):
        bad = bytearray(sound)
        for _ in range(draw.choice([1, 5])):
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad[: draw.choice([len(bad), draw.randrange(len(bad))])])
        try:
            import_weights(path)
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 50 and all(str(path) in line and "\n" not in line for line in refused)


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    torch.save({"step": 3}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="no state dict found \\(keys step\\)"):
        import_weights(tmp_path / "a.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no importable checkpoint"):
        import_weights(tmp_path / "empty")
    with pytest.raises(UserError, match="no such file"):
        import_weights(tmp_path / "nowhere")
    torch.save({"model.norm.weight": torch.ones(1), "norm.weight": torch.ones(1)}, tmp_path / "two.pt")
    with pytest.raises(UserError, match=r"two tensors map to 'norm\.weight'"):
        import_weights(tmp_path / "two.pt")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Linear(5, 7, bias=False), nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.embedding(x))


def _fsdp_rank(rank: int, world: int, folder: Path) -> None:
    """One process of an FSDP2 training that saves model, optimizer and an object with DCP."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = Net()
    if rank == 0:
        torch.save(model.state_dict(), folder / "before.pt")
    fully_shard(model.norm)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 5) + rank).pow(3).sum().backward()
    optimizer.step()
    whole = {name: parameter.full_tensor() for name, parameter in model.state_dict().items()}
    if rank == 0:
        torch.save(whole, folder / "after.pt")
    state, moments = get_state_dict(model, optimizer)
    dcp.save(
        {"model": state, "optimizer": moments, "train_state": {"step": 3, "loader": {"a", "b"}}},
        checkpoint_id=folder / "saved",
    )
    dist.destroy_process_group()


@pytest.mark.distributed
def test_a_real_fsdp_checkpoint_of_two_processes(tmp_path: Path) -> None:
    children = []
    for rank in range(2):  # forked: torch is already imported
        if (child := os.fork()) == 0:
            try:
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                _fsdp_rank(rank, 2, tmp_path)
                os._exit(0)
            except BaseException as error:
                print(f"rank {rank}: {error!r}", flush=True)
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    expected = torch.load(tmp_path / "after.pt")
    assert not torch.equal(expected["embedding.weight"], torch.load(tmp_path / "before.pt")["embedding.weight"])
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2
    assert_same(import_weights(tmp_path / "saved"), expected)


def test_moments_are_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": weights(), "optimizer": {"state": {"norm.weight": {"exp_avg": torch.ones(4)}}}}
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    reads: list[str] = []
    read = SavedTensors.__getitem__
    monkeypatch.setattr(SavedTensors, "__getitem__", lambda self, name: reads.append(name) or read(self, name))
    assert_same(import_weights(tmp_path / "saved"), weights())
    assert sorted(reads) == sorted(f"model.{name}" for name in weights())


def test_objects_in_a_dcp_folder_are_never_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    dcp.save({"model": weights(), "extra": Touch(trap)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert_same(import_weights(tmp_path / "saved"), weights())
    assert not trap.exists()


def test_a_dcp_index_that_runs_code_or_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    dcp.save({"model": weights()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    path = tmp_path / "saved" / ".metadata"
    index = pickle.loads(path.read_bytes())
    for place in index.storage_data.values():
        place.relative_path = "../other.distcp"
    path.write_bytes(pickle.dumps(index))
    with pytest.raises(UserError, match="points outside its folder"):
        import_weights(tmp_path / "saved")
    path.write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    with pytest.raises(UserError, match="mkdir"):
        import_weights(tmp_path / "saved")
    path.write_bytes(b"nonsense")
    with pytest.raises(UserError, match="unreadable index"):
        import_weights(tmp_path / "saved")
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_our_own_is_verified_first(
    checkpoint_store: CheckpointStore, manifest_of: Callable[..., Any]
) -> None:
    state = {MODEL + name: tensor for name, tensor in weights().items()}
    folder = checkpoint_store.save(
        {**state, "optimizer.x": torch.ones(3), "guard.count": torch.tensor(1)}, manifest_of(4)
    )
    assert_same(import_weights(folder), weights())
    shard = next(folder.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match="hash mismatch"):
        import_weights(folder)


def test_fit_says_in_one_line_what_does_not_fit() -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in weights().items()}
    assert_same(select_weights(weights(), shapes, "here"), weights())
    tied = {**weights(), "head.weight": weights()["embedding.weight"]}
    assert_same(select_weights(tied, shapes, "here"), weights())
    wrong = {**weights(), "head.weight": torch.ones(7, 4), "norm.weight": torch.ones(5)}
    del wrong["blocks.0.ffn.up.weight"]
    with pytest.raises(UserError) as refusal:
        select_weights(wrong, shapes, "here")
    assert str(refusal.value) == (
        "here: does not fit the model: missing blocks.0.ffn.up.weight; unexpected head.weight; "
        "norm.weight is (5,), the model has (4,)"
    )


def test_names_of_other_models_are_refused() -> None:
    require_native_names(weights(), "here")
    with pytest.raises(UserError, match=r"transformer\.h\.0\.ln_1\.weight"):
        require_native_names({**weights(), "transformer.h.0.ln_1.weight": torch.ones(1)}, "here")


def test_imported_weights_become_a_checkpoint_of_weights_alone(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "start", weights(), {"imported_from": "x.pt"})
    manifest = verify(folder)
    assert (folder.name, manifest.content, manifest.step) == ("model-00000000.a1", "model", 0)
    assert manifest.progress == {"made_from": {"imported_from": "x.pt"}}
    assert_same(dict(SavedTensors(folder, MODEL)), weights())
    model = {MODEL + name: torch.zeros_like(tensor) for name, tensor in weights().items()}
    CheckpointStore(tmp_path / "start").load(folder, model)  # as a new run does
    assert_same({name.removeprefix(MODEL): tensor for name, tensor in model.items()}, weights())
    assert CheckpointStore(tmp_path / "start").committed() == []  # no run resumes from it by mistake
