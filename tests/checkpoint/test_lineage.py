"""Versions, where checkpoints come from, and going back without deleting."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.checkpoint.lineage import code_state, continue_from, lineage, read_tags, record_lineage, tag
from bessemer.checkpoint.manifest import DamagedCheckpoint, verify
from bessemer.checkpoint.remote import RemoteCheckpoints, recover
from bessemer.checkpoint.store import CheckpointStore
from bessemer.checkpoint.tensors import save_model
from bessemer.errors import UserError

Make = Callable[..., Any]


def save(checkpoint_store: CheckpointStore, manifest_of: Make, *steps: int) -> list[Path]:
    return [checkpoint_store.save({"model.w": torch.tensor([float(step)])}, manifest_of(step)) for step in steps]


def test_versions_name_checkpoints(checkpoint_store: CheckpointStore, manifest_of: Make) -> None:
    first, second = save(checkpoint_store, manifest_of, 10, 20)
    tag(checkpoint_store.folder, first.name, "v1.0.0")
    tag(checkpoint_store.folder, second.name, "1.1.0-rc.1+build.5")
    tag(checkpoint_store.folder, first.name, "v1.0.0")  # again is nothing new
    assert read_tags(checkpoint_store.folder) == {"v1.0.0": first.name, "1.1.0-rc.1+build.5": second.name}
    with pytest.raises(UserError, match=r"v1\.0\.0 already tags step-00000010\.a1"):
        tag(checkpoint_store.folder, second.name, "v1.0.0")
    tag(checkpoint_store.folder, second.name, "v1.0.0", move=True)
    assert read_tags(checkpoint_store.folder)["v1.0.0"] == second.name
    assert checkpoint_store.tagged() == {second.name}  # what retention spares


@pytest.mark.parametrize("version", ["v1", "1.2", "v1.2.x", "01.2.3", "latest", "", "v1.2.3 "])
def test_other_names_are_no_versions(checkpoint_store: CheckpointStore, manifest_of: Make, version: str) -> None:
    (folder,) = save(checkpoint_store, manifest_of, 10)
    with pytest.raises(UserError, match="semantic version"):
        tag(checkpoint_store.folder, folder.name, version)


def test_a_tag_needs_a_checkpoint_and_a_readable_file(checkpoint_store: CheckpointStore, manifest_of: Make) -> None:
    with pytest.raises(UserError, match="no checkpoint 'step-00000099"):
        tag(checkpoint_store.folder, "step-00000099.a1", "v1.0.0")
    for text in ("{", "[]"):
        (checkpoint_store.folder / "tags.json").write_text(text)
        with pytest.raises(UserError, match=r"tags\.json"):
            read_tags(checkpoint_store.folder)


def test_the_code_is_told_by_commit_and_what_differs_from_it(tmp_path: Path) -> None:
    assert code_state(tmp_path) is None  # no repository

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    assert code_state(tmp_path) is None  # no commit yet
    (tmp_path / "a.py").write_text("x = 1\n")
    git("add", "a.py")
    git("commit", "-q", "-m", "one")
    clean = code_state(tmp_path)
    assert clean == {"commit": git("rev-parse", "HEAD"), "dirty": ""}
    seen = set()
    for text in ("x = 2\n", "x = 3\n"):
        (tmp_path / "a.py").write_text(text)
        state = code_state(tmp_path)
        assert state is not None and state["commit"] == clean["commit"]
        seen.add(state["dirty"])
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "new.py").write_text("")
    seen.add((code_state(tmp_path) or {})["dirty"])
    assert len(seen) == 3 and "" not in seen  # every state its own hash, a new file too


def test_without_git_the_code_is_unknown_and_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert code_state(Path(__file__).parent) is None


def test_every_start_is_recorded(tmp_path: Path, manifest_of: Make) -> None:
    about = {"stream_fingerprint": "d1", "spec_fingerprint": "s1", "versions": {"torch": "2"}}
    record_lineage(tmp_path, **about, started_from="start/model-00000000.a1")  # type: ignore[arg-type]
    record_lineage(tmp_path, **about, resumed_from="step-00000010.a1")  # type: ignore[arg-type]
    checkpoint_store = CheckpointStore(tmp_path / "checkpoints")
    (source,) = save(checkpoint_store, manifest_of, 10)
    made = save_model(checkpoint_store.folder, {"w": torch.ones(1)}, {"averaged_of": [source.name]}, manifest_of(10))
    tag(checkpoint_store.folder, made.name, "v1.0.0")
    found = lineage(tmp_path)
    assert [start["started_from"] for start in found["starts"]] == ["start/model-00000000.a1", None]
    assert [start["resumed_from"] for start in found["starts"]] == [None, "step-00000010.a1"]
    assert found["starts"][0]["stream"] == "d1" and set(found["starts"][0]["code"]) == {"bessemer", "project"}
    assert found["made_from"] == {made.name: {"averaged_of": [source.name]}}
    assert found["tags"] == {"v1.0.0": made.name}
    assert json.loads((tmp_path / "checkpoints" / "lineage.json").read_text()) == found["starts"]


def test_what_came_later_is_set_aside_and_never_deleted(checkpoint_store: CheckpointStore, manifest_of: Make) -> None:
    save(checkpoint_store, manifest_of, 10, 20, 20, 30)
    save_model(checkpoint_store.folder, {"w": torch.ones(1)}, {}, manifest_of(30))
    (checkpoint_store.folder / "step-00000030.a1" / "manifest.json").write_text("damaged")
    later = ["step-00000020.a2", "model-00000030.a1", "step-00000030.a1"]
    assert sorted(continue_from(checkpoint_store.folder, "step-00000020.a1")[1]) == sorted(later)
    assert [path.name for path, _ in checkpoint_store.committed()] == ["step-00000010.a1", "step-00000020.a1"]
    assert next(iter(checkpoint_store.newest_first())).name == "step-00000020.a1"
    save(checkpoint_store, manifest_of, 30)
    assert continue_from(checkpoint_store.folder, "step-00000010.a1")[1] == ["step-00000020.a1", "step-00000030.a1"]
    kept = sorted(path.name for path in (checkpoint_store.folder / "abandoned").iterdir())
    assert kept == sorted([*later, "step-00000020.a1", "step-00000030.a1.1"])
    assert continue_from(checkpoint_store.folder, "step-00000010.a1")[1] == []


def test_a_remote_tier_does_not_bring_back_what_was_set_aside(
    checkpoint_store: CheckpointStore, manifest_of: Make, tmp_path: Path
) -> None:
    remote = RemoteCheckpoints(f"file://{tmp_path}/durable")
    for step in (10, 20):
        remote.upload(checkpoint_store.save({"model.w": torch.ones(1)}, replace(manifest_of(step), time=1000.0 + step)))
    continue_from(checkpoint_store.folder, "step-00000010.a1")
    assert recover(checkpoint_store, RemoteCheckpoints(remote.url), lambda *_, **__: None) is None
    assert [path.name for path, _ in checkpoint_store.committed()] == ["step-00000010.a1"]
    assert verify(checkpoint_store.folder / "step-00000010.a1").step == 10
    assert verify(checkpoint_store.folder / "abandoned" / "step-00000020.a1").time == 1020


def test_a_damaged_checkpoint_is_not_gone_back_to(checkpoint_store: CheckpointStore, manifest_of: Make) -> None:
    first, _ = save(checkpoint_store, manifest_of, 10, 20)
    next(first.glob("*.distcp")).write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="distcp"):
        continue_from(checkpoint_store.folder, first.name)
    assert len(checkpoint_store.committed()) == 2
