"""DCP's index is a pickle; ours is read without running anything in it."""

import builtins
import io
import os
import pickle
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from bessemer.checkpoint import dcp as safe_reader
from bessemer.checkpoint.dcp import TensorReader
from bessemer.checkpoint.manifest import CONFIRMED, NAME, DamagedCheckpoint, commit, hash_file, read_manifest


def describe_files(folder):
    """Size and hash of every file in a checkpoint folder."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith(NAME) and path.name != CONFIRMED)
    return {name: {"bytes": (folder / name).stat().st_size, "xxh3_128": hash_file(folder / name)} for name in names}


@pytest.fixture
def saved(checkpoint_store, state_of, manifest_of):
    return checkpoint_store.save(state_of(1), manifest_of(9))


def put_index(folder, content: bytes):
    """Replace the index and commit again, as whoever hands over a crafted checkpoint would."""
    (folder / ".metadata").write_bytes(content)
    commit(folder, replace(read_manifest(folder), files=describe_files(folder)))


class Call:
    """A pickle of it calls a function when loaded."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("inside", ["alone", "planner_data", "storage_data", "state_dict_metadata"])
@pytest.mark.parametrize(
    ("function", "name"), [(os.system, "posix.system"), (builtins.exec, "builtins.exec")], ids=["system", "exec"]
)
def test_refused_by_name_a_crafted_metadata_pickle(checkpoint_store, saved, state_of, tmp_path, function, name, inside):
    witness = tmp_path / "witness"
    command = f"touch {witness}" if function is os.system else f"open({str(witness)!r}, 'w')"
    payload = Call(function, command)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    if inside != "alone":
        setattr(metadata, inside, {"x": payload})
    crafted = pickle.dumps(payload if inside == "alone" else metadata)
    pickle.loads(crafted)
    assert witness.exists(), "the payload is live: plain pickle runs it"
    witness.unlink()

    put_index(saved, crafted)
    with pytest.raises(DamagedCheckpoint) as error:
        checkpoint_store.load(saved, state_of(1))
    assert str(saved / ".metadata") in str(error.value) and name in str(error.value)
    assert not witness.exists()


def test_refused_by_name_a_crafted_optimizer_entry(checkpoint_store, saved, state_of, tmp_path):
    """Optimizers' own state dicts hold plain objects, which DCP stores as pickles and loads as such."""
    witness = tmp_path / "witness"
    crafted = state_of(1) | {"optimizer.param_groups": Call(os.system, f"touch {witness}")}
    dcp.save(crafted, storage_writer=dcp.FileSystemWriter(saved), no_dist=True)
    commit(saved, replace(read_manifest(saved), files=describe_files(saved)))
    dcp.load(dict(crafted), storage_reader=dcp.FileSystemReader(saved), no_dist=True)
    assert witness.exists(), "the payload is live: DCP's own reader runs it"
    witness.unlink()

    for asked in (crafted, state_of(1)):
        with pytest.raises(DamagedCheckpoint) as error:
            checkpoint_store.load(saved, asked)
        assert str(saved / ".metadata") in str(error.value) and "BytesStorageMetadata" in str(error.value)
    assert not witness.exists()


def test_refused_by_name_a_tensor_that_is_a_pickle(checkpoint_store, saved, state_of, tmp_path):
    """The index says tensor, and the shard holds an object that runs code when it is loaded."""
    witness, shard = tmp_path / "witness", next(saved.glob("*.distcp"))
    payload = io.BytesIO()
    torch.save(Call(os.system, f"touch {witness}"), payload)
    torch.load(io.BytesIO(payload.getvalue()), weights_only=False)
    assert witness.exists(), "the payload is live"
    witness.unlink()

    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        if index.fqn == "optimizer.exp_avg":
            place.offset, place.length = shard.stat().st_size, len(payload.getvalue())
    shard.write_bytes(shard.read_bytes() + payload.getvalue())
    put_index(saved, pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpoint) as error:
        checkpoint_store.load(saved, state_of(1))
    assert str(saved) in str(error.value) and "system" in str(error.value)
    assert not witness.exists()


def test_refused_by_name_a_swapped_shard(checkpoint_store, saved, state_of, manifest_of):
    """The same tensors of another checkpoint: the right size, a sound file, and not the one that was saved."""
    other = checkpoint_store.save(state_of(2), manifest_of(10))
    (shard,), (foreign,) = saved.glob("*.distcp"), other.glob("*.distcp")
    shard.write_bytes(foreign.read_bytes())
    with pytest.raises(DamagedCheckpoint) as error:
        checkpoint_store.load(saved, state_of(1))
    assert str(error.value) == f"{shard}: its content differs from what was saved (hash mismatch)"


def test_refused_by_name_a_wrong_hash(checkpoint_store, saved, state_of):
    """A manifest that is whole and signed with its own hash, but vouches for another file."""
    (shard,) = saved.glob("*.distcp")
    files = describe_files(saved)
    files[shard.name]["xxh3_128"] = "0" * 32
    commit(saved, replace(read_manifest(saved), files=files))
    with pytest.raises(DamagedCheckpoint) as error:
        checkpoint_store.load(saved, state_of(1))
    assert str(error.value) == f"{shard}: its content differs from what was saved (hash mismatch)"


def global_pickle(module: str, name: str, argument: str) -> bytes:
    """`module.name(argument)` in the oldest protocol, where a name is any text."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("torch", "load"),
        ("torch", "serialization.os.system"),
        ("torch", "float32.__reduce__"),
        ("torch.serialization", "_get_layout.__globals__"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("pathlib", "Path.write_text"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ],
)
def test_every_other_name_is_refused(saved, module, name):
    (saved / ".metadata").write_bytes(global_pickle(module, name, "x"))
    with pytest.raises(DamagedCheckpoint) as error:
        TensorReader(saved).read_metadata()
    assert f"refers to {module}.{name}" in str(error.value)


@pytest.mark.parametrize("entry", [BytesStorageMetadata(), "text", None, {"a": 1}], ids=repr)
def test_an_entry_that_is_not_a_tensor_is_refused(checkpoint_store, saved, state_of, entry):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.state_dict_metadata["extra"] = entry
    put_index(saved, pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpoint, match=r"BytesStorageMetadata|entry 'extra' is not a tensor") as error:
        checkpoint_store.load(saved, state_of(1))
    assert str(saved / ".metadata") in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage", pickle.dumps([1, 2]), pickle.dumps(None)], ids=repr)
def test_an_index_that_is_none_is_refused(checkpoint_store, saved, state_of, content):
    put_index(saved, content)
    with pytest.raises(DamagedCheckpoint) as error:
        checkpoint_store.load(saved, state_of(1))
    assert str(saved / ".metadata") in str(error.value)


def test_an_index_that_points_out_of_its_folder_is_refused(checkpoint_store, saved, state_of, tmp_path):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    (tmp_path / "elsewhere").write_bytes(next(saved.glob("*.distcp")).read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = "../../elsewhere"
    put_index(saved, pickle.dumps(metadata))
    with pytest.raises(DamagedCheckpoint, match=r"points outside its folder, to \.\./\.\./elsewhere"):
        checkpoint_store.load(saved, state_of(1))


def test_an_index_without_its_storage_meta_is_read(checkpoint_store, saved, state_of):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    del metadata.storage_meta
    put_index(saved, pickle.dumps(metadata))
    loaded = state_of(2)
    checkpoint_store.load(saved, loaded)
    assert torch.equal(loaded["model.norm"], state_of(1)["model.norm"])


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_an_index_of_any_python_is_read(checkpoint_store, saved, state_of, module):
    """Python 3.13 alone says that a path's class lives in pathlib._local."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    content = pickle.dumps(metadata, protocol=2)
    for known in (b"cpathlib\n", b"cpathlib._local\n"):
        content = content.replace(known, b"c" + module + b"\n")
    assert b"c" + module + b"\nPosixPath" in content
    put_index(saved, content)
    loaded = state_of(2)
    checkpoint_store.load(saved, loaded)
    assert torch.equal(loaded["model.norm"], state_of(1)["model.norm"])


def test_the_list_has_no_name_that_an_index_does_not_use(saved):
    asked = set()

    class Asked(pickle.Unpickler):
        def find_class(self, module, name):
            asked.add((module, name))
            return super().find_class(module, name)

    with (saved / ".metadata").open("rb") as file:
        Asked(file).load()
    dtypes = {(module, name) for module, name in asked if module == "torch" and name != "Size"}
    paths = {(module, name) for module, name in asked if name == "PosixPath"}
    assert asked - dtypes - paths == safe_reader._ALLOWED
    assert paths <= safe_reader._PATHS and all(isinstance(getattr(torch, name), torch.dtype) for _, name in dtypes)
