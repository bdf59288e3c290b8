"""What is saved comes back bit for bit; attempts, leftovers and retention follow the rules."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bessemer.checkpoint.manifest import NAME, Damaged, commit, read_manifest, verify
from bessemer.checkpoint.shelf import Shelf
from bessemer.errors import UserError


def same_bits(a, b):
    a, b = a.contiguous().numpy(), b.contiguous().numpy()
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def blank(state):
    return {name: torch.full_like(tensor, 7) for name, tensor in state.items()}


def names(shelf):
    return sorted(path.name for path in shelf.folder.iterdir())


def test_a_saved_state_comes_back_bit_for_bit(shelf, state_of, manifest_of):
    saved = state_of(1)
    folder = shelf.save(saved, manifest_of(12, 2.5))
    loaded = blank(saved)
    manifest = shelf.load(folder, loaded)
    for name in saved:
        kind = torch.int16 if saved[name].dtype == torch.bfloat16 else saved[name].dtype
        assert same_bits(saved[name].view(kind), loaded[name].view(kind)), name
    assert folder.name == "step-00000012.a1"
    assert replace(manifest, files={}) == replace(manifest_of(12, 2.5), attempt=1)
    assert set(manifest.files) == {path.name for path in folder.iterdir()} - {NAME}


def test_a_load_fills_the_given_tensors_in_place_and_may_ask_for_a_part(shelf, state_of, manifest_of):
    saved = state_of(2)
    folder = shelf.save(saved, manifest_of(1))
    parameter = torch.nn.Parameter(torch.zeros(17, 5))
    shelf.load(folder, {"model.weight": parameter.detach()})
    assert same_bits(parameter.detach(), saved["model.weight"])


def test_a_save_does_not_change_the_state(shelf, state_of, manifest_of):
    state, untouched = state_of(3), state_of(3)
    shelf.save(state, manifest_of(1))
    assert all(torch.equal(state[name].nan_to_num(), untouched[name].nan_to_num()) for name in state)


def test_a_tensor_of_another_shape_is_named(shelf, state_of, manifest_of):
    folder = shelf.save(state_of(1), manifest_of(1))
    with pytest.raises(UserError, match=r"model\.weight has shape \(17, 5\), the model asks for \(5, 17\)"):
        shelf.load(folder, {"model.weight": torch.zeros(5, 17)})


def test_a_missing_tensor_is_named(shelf, state_of, manifest_of):
    folder = shelf.save(state_of(1), manifest_of(1))
    with pytest.raises(UserError, match=r"no tensor model\.head\.weight"):
        shelf.load(folder, {"model.head.weight": torch.zeros(5)})


def test_the_same_step_again_is_another_attempt_and_the_newest(shelf, state_of, manifest_of):
    folders = [shelf.save(state_of(k), manifest_of(5)) for k in range(3)]
    assert [folder.name for folder in folders] == [f"step-00000005.a{k}" for k in (1, 2, 3)]
    assert [read_manifest(folder).attempt for folder in folders] == [1, 2, 3]
    loaded = blank(state_of(0))
    shelf.load(next(iter(shelf.newest_first())), loaded)
    assert loaded["optimizer.step"] == 2


def test_attempts_and_steps_are_ordered_as_numbers(shelf, manifest_of):
    state = {"x": torch.zeros(1)}
    for step in (100_000_000, 7, 99_999_999):
        shelf.save(state, manifest_of(step))
    for _ in range(10):
        shelf.save(state, manifest_of(7))
    order = [path.name for path, _ in shelf.committed()]
    assert order == [f"step-00000007.a{k}" for k in range(1, 12)] + ["step-99999999.a1", "step-100000000.a1"]
    assert [path.name for path in shelf.newest_first()] == order[::-1]


def test_a_folder_without_a_manifest_is_never_listed_and_is_swept(shelf, state_of, manifest_of):
    kept = shelf.save(state_of(1), manifest_of(1))
    killed = shelf.save(state_of(2), manifest_of(2))
    (killed / NAME).rename(killed / f"{NAME}.tmp")  # as a kill just before the commit leaves it
    assert [path for path, _ in shelf.committed()] == [kept]
    assert list(shelf.newest_first()) == [kept]
    with pytest.raises(Damaged, match="no manifest, the save did not finish"):
        verify(killed)
    assert shelf.sweep() == [killed.name]
    assert names(shelf) == [kept.name]
    assert shelf.sweep() == []


def test_a_sweep_touches_nothing_that_is_not_a_save(shelf, state_of, manifest_of):
    for other in ("notes", "step-12", "step-00000012.a1.bak"):
        (shelf.folder / other).mkdir()
    (shelf.folder / "step-00000001.a1").mkdir()
    assert shelf.sweep() == ["step-00000001.a1"]
    assert names(shelf) == ["notes", "step-00000012.a1.bak", "step-12"]


def test_the_attempt_after_a_killed_one_counts_on(shelf, state_of, manifest_of):
    (shelf.folder / "step-00000004.a1").mkdir()
    assert shelf.save(state_of(1), manifest_of(4)).name == "step-00000004.a2"


def test_retention_keeps_the_last_and_the_best(shelf, manifest_of):
    losses = {1: 3.0, 2: 1.5, 3: 2.0, 4: None, 5: 2.5}
    for step, loss in losses.items():
        newest = shelf.save({"x": torch.zeros(1)}, manifest_of(step, loss))
    assert shelf.best().name == "step-00000002.a1"
    assert shelf.thin(newest, keep_last=2, keep_best=True) == ["step-00000001.a1", "step-00000003.a1"]
    assert names(shelf) == ["step-00000002.a1", "step-00000004.a1", "step-00000005.a1"]
    assert shelf.thin(newest, keep_last=1, keep_best=False) == ["step-00000002.a1", "step-00000004.a1"]
    assert [path for path, _ in shelf.committed()] == [newest]
    assert shelf.thin(newest, keep_last=3, keep_best=True) == []


def test_a_loss_that_is_not_a_number_is_never_the_best(shelf, manifest_of):
    for step, loss in enumerate([float("nan"), 2.0, float("-inf"), 3.0]):
        shelf.save({"x": torch.zeros(1)}, manifest_of(step, loss))
    assert shelf.best().name == "step-00000001.a1"


def test_retention_never_deletes_the_one_just_saved(shelf, manifest_of):
    """A damaged checkpoint of a later step was passed over at resume: it is what goes, not the new one."""
    for step in (5, 10):
        shelf.save({"x": torch.zeros(1)}, manifest_of(step, validation_loss=10.0 / step))  # 2.0, 1.0
    new = shelf.save({"x": torch.ones(1)}, manifest_of(6, validation_loss=3.0))
    assert shelf.thin(new, keep_last=1, keep_best=True) == ["step-00000010.a1"]
    assert names(shelf) == ["step-00000005.a1", "step-00000006.a1"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    losses=st.lists(st.one_of(st.none(), st.floats(0.5, 9)), min_size=1, max_size=6),
    last=st.integers(1, 7),
    keep_best=st.booleans(),
)
def test_retention_keeps_exactly_what_it_promises(tmp_path_factory, manifest_of, losses, last, keep_best):
    shelf = Shelf(tmp_path_factory.mktemp("shelf"))
    for step, loss in enumerate(losses):
        newest = shelf.folder / f"step-{step:08d}.a1"
        newest.mkdir()
        commit(newest, manifest_of(step, loss))
    scored = [(loss, step) for step, loss in enumerate(losses) if loss is not None]
    expected = set(range(len(losses))[-last:]) | ({min(scored)[1]} if scored and keep_best else set())
    gone = shelf.thin(newest, last, keep_best)
    assert {manifest.step for _, manifest in shelf.committed()} == expected
    assert len(gone) == len(losses) - len(expected)
