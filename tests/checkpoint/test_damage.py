"""An altered checkpoint is refused by the name of the file, and a disk that refuses harms nothing."""

import errno
import json
import os
import re
import resource
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bessemer.checkpoint.manifest import NAME, DamagedCheckpoint, commit, discard, read_manifest, verify


@pytest.fixture
def saved(checkpoint_store, state_of, manifest_of):
    return checkpoint_store.save(state_of(1), manifest_of(9, 2.5))


def shard(folder):
    return next(path for path in folder.iterdir() if path.suffix == ".distcp")


def refused(checkpoint_store, folder, state):
    """The message with which both verify and load refuse it; nothing is written to the state."""
    blank = {name: torch.full_like(tensor, 7) for name, tensor in state.items()}
    with pytest.raises(DamagedCheckpoint) as first:
        verify(folder)
    with pytest.raises(DamagedCheckpoint) as second:
        checkpoint_store.load(folder, blank)
    assert str(first.value) == str(second.value)
    assert all(bool((tensor == 7).all()) for tensor in blank.values())
    return str(first.value)


def test_an_untouched_checkpoint_verifies(saved):
    assert verify(saved) == read_manifest(saved)


@pytest.mark.parametrize("name", [".metadata", "shard"])
@pytest.mark.parametrize("length", [0, 1, -1])
def test_a_truncated_file_is_named(checkpoint_store, saved, state_of, name, length):
    path = shard(saved) if name == "shard" else saved / name
    size = path.stat().st_size
    os.truncate(path, length % size)
    assert f"{path}: {length % size} bytes, the manifest says {size}" in refused(checkpoint_store, saved, state_of(1))


def test_a_file_that_grew_is_named(checkpoint_store, saved, state_of):
    with shard(saved).open("ab") as file:
        file.write(b"\0")
    assert str(shard(saved)) in refused(checkpoint_store, saved, state_of(1))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), index=st.booleans())
def test_one_flipped_bit_anywhere_is_found(saved, where, bit, index):
    path = saved / ".metadata" if index else shard(saved)
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[int(where * len(content))] ^= 1 << bit
    path.write_bytes(damaged)
    with pytest.raises(DamagedCheckpoint, match="hash mismatch") as error:
        verify(saved)
    assert str(path) in str(error.value)
    path.write_bytes(content)
    verify(saved)


@pytest.mark.parametrize("name", [".metadata", "shard"])
def test_a_missing_file_is_named(checkpoint_store, saved, state_of, name):
    path = shard(saved) if name == "shard" else saved / name
    path.unlink()
    assert refused(checkpoint_store, saved, state_of(1)) == f"{path}: missing"


def test_an_added_file_is_named(checkpoint_store, saved, state_of):
    (saved / "__1_0.distcp").write_bytes(b"")
    assert refused(checkpoint_store, saved, state_of(1)) == f"{saved / '__1_0.distcp'}: not in the manifest"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("step", 10),
        ("segments", [{"from_step": 0, "position": 1}]),
        ("progress", {}),
        ("validation_loss", 0.1),
        ("files", {}),
        ("stream_fingerprint", "f2"),
    ],
)
def test_an_edited_manifest_is_found(checkpoint_store, saved, state_of, key, value):
    data = json.loads((saved / NAME).read_text())
    data[key] = value
    (saved / NAME).write_text(json.dumps(data))
    assert refused(checkpoint_store, saved, state_of(1)).startswith(f"{saved / NAME}: its content differs")
    assert checkpoint_store.committed() == []


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "unreadable"),
        (b"{", "unreadable"),
        (b"[]", "unreadable"),
        (b'"x"', "unreadable"),
        (b"null", "unreadable"),
        (b"{}", "format None"),
        (b'{"format": 2}', "format 2, this version reads 1"),
        (b'{"format": 1}', "differs"),
        (b'{"step": "\xff"}', "unreadable"),
    ],
)
def test_a_manifest_that_is_none_is_refused_by_name(checkpoint_store, saved, state_of, content, word):
    (saved / NAME).write_bytes(content)
    message = refused(checkpoint_store, saved, state_of(1))
    assert message.startswith(f"{saved / NAME}: ") and word in message
    assert checkpoint_store.committed() == []
    assert list(checkpoint_store.newest_first()) == [saved]  # it has to be tried, or a run would start over in silence
    assert checkpoint_store.sweep() == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_one_flipped_bit_in_the_manifest_changes_nothing_or_is_found(saved, where, bit):
    content = (saved / NAME).read_bytes()
    before = read_manifest(saved)
    damaged = bytearray(content)
    damaged[int(where * len(content))] ^= 1 << bit
    (saved / NAME).write_bytes(damaged)
    found, message = None, ""
    try:
        found = verify(saved)
    except DamagedCheckpoint as error:
        message = str(error)
    (saved / NAME).write_bytes(content)
    # Nothing is changed by another kind of white space, or by the same number written in another way.
    assert found == before or str(saved / NAME) in message


def test_a_manifest_may_hold_what_json_cannot(tmp_path, manifest_of):
    """Integer keys and a loss that is not a number come back as JSON has them, and still verify."""
    manifest = manifest_of(1, float("nan"))
    manifest.progress[3] = (1, 2)
    commit(tmp_path, manifest)
    read = read_manifest(tmp_path)
    assert read.progress["3"] == [1, 2] and read.validation_loss != read.validation_loss


@pytest.mark.parametrize("kept", range(4))
def test_a_deletion_that_is_cut_short_leaves_what_a_sweep_removes(checkpoint_store, saved, monkeypatch, kept):
    real, left = Path.unlink, [kept]

    def unlink(path, *_, **__):
        if not left[0]:
            raise OSError(errno.EIO, "no", str(path))
        left[0] -= 1
        real(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    files = len(list(saved.iterdir())) - 1  # the manifest is the last to go
    if kept < files:
        with pytest.raises(OSError, match="no"):
            discard(saved)
        assert not (saved / NAME).exists()
    assert checkpoint_store.sweep([saved.name]) == ([saved.name] if kept < files else [])
    assert kept >= files or not saved.exists()


def test_a_sweep_leaves_a_checkpoint_that_lost_its_manifest(checkpoint_store, saved):
    (saved / NAME).unlink()
    assert checkpoint_store.sweep([saved.name]) == [] and shard(saved).exists()
    assert checkpoint_store.without_manifest() == [saved]
    assert checkpoint_store.sweep() == [saved.name]  # a save that never finished


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_refusal_at_any_sync_leaves_the_older_checkpoints_and_nothing_else(
    checkpoint_store, saved, state_of, manifest_of, monkeypatch
):
    before, real, calls = snapshot(checkpoint_store.folder), os.fsync, 0
    for refusing in range(100):
        calls = 0

        def fsync(descriptor, refusing=refusing):
            nonlocal calls
            calls += 1
            if calls > refusing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        message = ""
        try:
            checkpoint_store.save(state_of(2), manifest_of(10))
        except OSError as error:
            message = str(error)
        if calls <= refusing:
            break
        assert "step-00000010.a1: saving failed: [Errno 28] No space left on device" in message
        assert snapshot(checkpoint_store.folder) == before
    assert refusing >= 5  # shard, index, manifest and the folders
    assert verify(checkpoint_store.folder / "step-00000010.a1").step == 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of open files from /proc")
def test_everything_is_on_the_disk_before_the_manifest_appears(checkpoint_store, state_of, manifest_of, monkeypatch):
    """The order that a power cut cannot break: shards, index, folder, manifest under another name; then its name."""
    log, sizes, real_sync, real_replace = [], {}, os.fsync, os.replace

    def fsync(descriptor):
        log.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sizes[re.sub(r"(\.[0-9a-f]{12})?\.tmp$", "", log[-1])] = os.fstat(descriptor).st_size
        real_sync(descriptor)

    def replace(source, target):
        if Path(target).name == NAME:
            assert not Path(target).exists() and json.loads(Path(source).read_text())["step"] == 3
            log.append("commit")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    folder = checkpoint_store.save(state_of(1), manifest_of(3))
    at = log.index("commit")
    assert log[at - 2] == folder.name and re.fullmatch(rf"{NAME}\.[0-9a-f]+\.tmp", log[at - 1])
    assert log[at:] == ["commit", folder.name, checkpoint_store.folder.name]
    assert set(log[: at - 2]) == {shard(folder).name, ".metadata.tmp"}
    for path in folder.iterdir():
        assert sizes[path.name] == path.stat().st_size, f"{path.name} was synced before all of it was written"
    verify(folder)


@pytest.fixture
def small_files():
    """The kernel refuses to let any file of this process grow beyond 20 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_the_kernel_refuses(checkpoint_store, saved, manifest_of, small_files):
    before = snapshot(checkpoint_store.folder)
    with pytest.raises(OSError, match=r"step-00000010\.a1: saving failed: \[Errno 27\] File too large"):
        checkpoint_store.save({"x": torch.randn(50_000)}, manifest_of(10))
    assert snapshot(checkpoint_store.folder) == before
