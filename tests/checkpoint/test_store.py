"""What is saved comes back bit for bit; attempts, leftovers and retention follow the rules."""

import json
import os
from dataclasses import replace

import pytest
import torch

from bessemer.checkpoint.manifest import CONFIRMED, NAME, DamagedCheckpoint, read_manifest, verify
from bessemer.checkpoint.store import CheckpointStore
from bessemer.errors import UserError
from bessemer.spec.schema import CheckpointSpec


def same_bits(a, b):
    a, b = a.contiguous().numpy(), b.contiguous().numpy()
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def blank(state):
    return {name: torch.full_like(tensor, 7) for name, tensor in state.items()}


def names(checkpoint_store):
    return sorted(path.name for path in checkpoint_store.folder.iterdir())


def test_a_saved_state_comes_back_bit_for_bit(checkpoint_store, state_of, manifest_of):
    saved = state_of(1)
    folder = checkpoint_store.save(saved, manifest_of(12, 2.5))
    loaded = blank(saved)
    manifest = checkpoint_store.load(folder, loaded)
    for name in saved:
        kind = torch.int16 if saved[name].dtype == torch.bfloat16 else saved[name].dtype
        assert same_bits(saved[name].view(kind), loaded[name].view(kind)), name
    assert folder.name == "step-00000012.a1"
    assert replace(manifest, files={}) == replace(manifest_of(12, 2.5), attempt=1)
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {NAME}


def test_a_load_fills_the_given_tensors_in_place_and_may_ask_for_a_part(checkpoint_store, state_of, manifest_of):
    saved = state_of(2)
    folder = checkpoint_store.save(saved, manifest_of(1))
    parameter = torch.nn.Parameter(torch.zeros(17, 5))
    checkpoint_store.load(folder, {"model.weight": parameter.detach()})
    assert same_bits(parameter.detach(), saved["model.weight"])


def test_a_save_does_not_change_the_state(checkpoint_store, state_of, manifest_of):
    state, untouched = state_of(3), state_of(3)
    checkpoint_store.save(state, manifest_of(1))
    assert all(torch.equal(state[name].nan_to_num(), untouched[name].nan_to_num()) for name in state)


def test_a_tensor_of_another_shape_is_named(checkpoint_store, state_of, manifest_of):
    folder = checkpoint_store.save(state_of(1), manifest_of(1))
    with pytest.raises(UserError, match=r"model\.weight has shape \(17, 5\), the model asks for \(5, 17\)"):
        checkpoint_store.load(folder, {"model.weight": torch.zeros(5, 17)})


def test_a_missing_tensor_is_named(checkpoint_store, state_of, manifest_of):
    folder = checkpoint_store.save(state_of(1), manifest_of(1))
    with pytest.raises(UserError, match=r"no tensor model\.head\.weight"):
        checkpoint_store.load(folder, {"model.head.weight": torch.zeros(5)})


def test_the_same_step_again_is_another_attempt_and_the_newest(checkpoint_store, state_of, manifest_of):
    folders = [checkpoint_store.save(state_of(k), manifest_of(5)) for k in range(3)]
    assert [folder.name for folder in folders] == [f"step-00000005.a{k}" for k in (1, 2, 3)]
    assert [read_manifest(folder).attempt for folder in folders] == [1, 2, 3]
    loaded = blank(state_of(0))
    checkpoint_store.load(next(iter(checkpoint_store.newest_first())), loaded)
    assert loaded["optimizer.step"] == 2


def test_attempts_and_steps_are_ordered_as_numbers(checkpoint_store, manifest_of):
    state = {"x": torch.zeros(1)}
    for step in (100_000_000, 7, 99_999_999):
        checkpoint_store.save(state, manifest_of(step))
    for _ in range(10):
        checkpoint_store.save(state, manifest_of(7))
    order = [path.name for path, _ in checkpoint_store.committed()]
    assert order == [f"step-00000007.a{k}" for k in range(1, 12)] + ["step-99999999.a1", "step-100000000.a1"]
    assert [path.name for path in checkpoint_store.newest_first()] == order[::-1]


def test_a_folder_without_a_manifest_is_never_listed_and_is_swept(checkpoint_store, state_of, manifest_of):
    kept = checkpoint_store.save(state_of(1), manifest_of(1))
    killed = checkpoint_store.save(state_of(2), manifest_of(2))
    (killed / NAME).rename(killed / f"{NAME}.0123456789ab.tmp")  # as a kill just before the commit leaves it
    assert [path for path, _ in checkpoint_store.committed()] == [kept]
    assert list(checkpoint_store.newest_first()) == [kept]
    with pytest.raises(DamagedCheckpoint, match="no manifest, the save did not finish"):
        verify(killed)
    assert checkpoint_store.sweep() == [killed.name]
    assert names(checkpoint_store) == [kept.name]
    assert checkpoint_store.sweep() == []


def test_a_sweep_touches_nothing_that_is_not_a_save(checkpoint_store, state_of, manifest_of):
    for other in ("notes", "step-12", "step-00000012.a1.bak"):
        (checkpoint_store.folder / other).mkdir()
    (checkpoint_store.folder / "step-00000001.a1").mkdir()
    assert checkpoint_store.sweep() == ["step-00000001.a1"]
    assert names(checkpoint_store) == ["notes", "step-00000012.a1.bak", "step-12"]


def test_the_attempt_after_a_killed_one_counts_on(checkpoint_store, state_of, manifest_of):
    (checkpoint_store.folder / "step-00000004.a1").mkdir()
    assert checkpoint_store.save(state_of(1), manifest_of(4)).name == "step-00000004.a2"


def test_retention_keeps_the_last_and_the_best(checkpoint_store, manifest_of):
    losses = {1: 3.0, 2: 1.5, 3: 2.0, 4: None, 5: 2.5}
    for step, loss in losses.items():
        newest = checkpoint_store.save({"x": torch.zeros(1)}, manifest_of(step, loss))
    assert checkpoint_store.best().name == "step-00000002.a1"
    assert checkpoint_store.thin(newest, CheckpointSpec(keep_last=2)) == ["step-00000001.a1", "step-00000003.a1"]
    assert names(checkpoint_store) == ["step-00000002.a1", "step-00000004.a1", "step-00000005.a1"]
    last_alone = CheckpointSpec(keep_last=1, keep_best=False)
    assert checkpoint_store.thin(newest, last_alone) == ["step-00000002.a1", "step-00000004.a1"]
    assert [path for path, _ in checkpoint_store.committed()] == [newest]
    assert checkpoint_store.thin(newest, CheckpointSpec(keep_last=3)) == []


def test_a_loss_that_is_not_a_number_is_never_the_best(checkpoint_store, manifest_of):
    for step, loss in enumerate([float("nan"), 2.0, float("-inf"), 3.0]):
        checkpoint_store.save({"x": torch.zeros(1)}, manifest_of(step, loss))
    assert checkpoint_store.best().name == "step-00000001.a1"


def test_retention_never_deletes_the_one_just_saved(checkpoint_store, manifest_of):
    """A damaged checkpoint of a later step was passed over at resume: it is what goes, not the new one."""
    for step in (5, 10):
        checkpoint_store.save({"x": torch.zeros(1)}, manifest_of(step, validation_loss=10.0 / step))  # 2.0, 1.0
    new = checkpoint_store.save({"x": torch.ones(1)}, manifest_of(6, validation_loss=3.0))
    assert checkpoint_store.thin(new, CheckpointSpec(keep_last=1)) == ["step-00000010.a1"]
    assert names(checkpoint_store) == ["step-00000005.a1", "step-00000006.a1"]


def test_a_confirmation_is_there_after_a_restart_and_changes_nothing_else(checkpoint_store, state_of, manifest_of):
    folders = [checkpoint_store.save(state_of(k), manifest_of(k)) for k in range(4)]
    assert checkpoint_store.confirmed() == []
    assert checkpoint_store.confirm(folders[2]) and checkpoint_store.confirm(folders[0])
    again = CheckpointStore(checkpoint_store.folder)
    assert again.confirmed() == [folders[2], folders[0]]
    again.load(folders[2], blank(state_of(2)))
    assert again.confirm(folders[2]), "twice is once"
    assert again.confirmed() == [folders[2], folders[0]]


def test_what_is_gone_is_not_confirmed(checkpoint_store, state_of, manifest_of):
    folder = checkpoint_store.save(state_of(1), manifest_of(1))
    (folder / NAME).unlink()
    assert not checkpoint_store.confirm(folder) and not (folder / CONFIRMED).exists()
    assert not checkpoint_store.confirm(checkpoint_store.folder / "step-00000099.a1")


def test_the_newest_confirmed_one_and_the_next_candidate_outlive_frequent_saves(checkpoint_store, manifest_of):
    """Saves every step, each confirmed only ten steps later: at any time one can be rolled back to."""
    rules = CheckpointSpec(keep_last=2, keep_best=False)
    for step in range(35):
        newest = checkpoint_store.save({"x": torch.zeros(1)}, manifest_of(step))
        for path, manifest in checkpoint_store.committed():
            if manifest.step <= step - 10:
                checkpoint_store.confirm(path)
        checkpoint_store.thin(newest, rules, confirming=True)
        assert len(checkpoint_store.committed()) <= 4
        if step >= 10:
            (confirmed,) = checkpoint_store.confirmed()
            assert read_manifest(confirmed).step > step - 25


def test_tagged_ones_stay_and_a_broken_list_of_tags_protects_nothing(checkpoint_store, manifest_of):
    for step in range(4):
        newest = checkpoint_store.save({"x": torch.zeros(1)}, manifest_of(step))
    tags = checkpoint_store.folder / "tags.json"
    tags.write_text(json.dumps({"release": "step-00000000.a1", "gone": "step-00000077.a1"}))
    rules = CheckpointSpec(keep_last=1)
    assert checkpoint_store.thin(newest, rules) == ["step-00000001.a1", "step-00000002.a1"]
    assert checkpoint_store.abandon(2) == ["step-00000003.a1"] and checkpoint_store.abandon(-1) == []
    newest = checkpoint_store.save({"x": torch.zeros(1)}, manifest_of(1))
    for content in ("", "[]", "{"):
        tags.write_text(content)
        assert checkpoint_store.tagged() == set()
    assert checkpoint_store.thin(newest, rules) == ["step-00000000.a1"]


def test_after_a_rollback_later_checkpoints_are_abandoned_unless_nothing_else_is_left(checkpoint_store, manifest_of):
    for step in (10, 20, 30):
        checkpoint_store.save({"model.x": torch.zeros(1)}, manifest_of(step))
        checkpoint_store.write_model({"model.x": torch.zeros(1)}, manifest_of(step), every=10)
    assert checkpoint_store.abandon(5) == [], "a doubtful state is better than none"
    gone = [f"{kind}-000000{step}.a1" for kind in ("step", "model") for step in (20, 30)]
    assert checkpoint_store.abandon(15) == gone
    assert names(checkpoint_store) == ["model-00000010.a1", "step-00000010.a1"]


def test_a_copy_of_the_weights_is_made_once_in_a_stretch_and_no_run_resumes_from_it(
    checkpoint_store, state_of, manifest_of
):
    written = [
        checkpoint_store.write_model(state_of(step), manifest_of(step), every=100) for step in range(30, 330, 30)
    ]
    made = [path.name for path in written if path]
    assert made == ["model-00000120.a1", "model-00000210.a1", "model-00000300.a1"]
    assert checkpoint_store.committed() == [] and list(checkpoint_store.newest_first()) == []
    folder, manifest = checkpoint_store.committed("model")[1]
    assert manifest.content == "model" and manifest.step == 210
    weights = {name: tensor for name, tensor in state_of(0).items() if name.startswith("model.")}
    checkpoint_store.load(folder, weights)
    assert torch.equal(weights["model.norm"], state_of(210)["model.norm"])
    with pytest.raises(UserError, match=r"has no tensor optimizer\.exp_avg"):
        checkpoint_store.load(folder, state_of(0))
    back = checkpoint_store.save(
        state_of(1), manifest_of(150)
    )  # the run went back: the later copies are of another branch
    assert checkpoint_store.thin(back, CheckpointSpec()) == ["model-00000210.a1", "model-00000300.a1"]


def test_what_the_disk_gives_back_is_compared_with_what_left_the_memory(
    checkpoint_store, state_of, manifest_of, monkeypatch
):
    """A disk that turns a bit: the save fails, by the name of the file, and is no checkpoint."""
    older = checkpoint_store.save(state_of(1), manifest_of(1))
    real = os.fsync

    def spoil(descriptor):
        real(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(".distcp"):
            with open(path, "r+b") as file:
                file.seek(100)
                byte = file.read(1)[0]
                file.seek(100)
                file.write(bytes([byte ^ 4]))

    monkeypatch.setattr(os, "fsync", spoil)
    with pytest.raises(OSError, match=r"the data read back differs from the data written: '.*distcp'"):
        checkpoint_store.save(state_of(2), manifest_of(2))
    assert [path for path, _ in checkpoint_store.committed()] == [older] and names(checkpoint_store) == [older.name]
