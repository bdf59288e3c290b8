"""The memory section of a spec in whole runs: the same losses whatever is kept, and a shortage that a resume keeps."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.errors import UserError
from bessemer.optim.guarded import GuardedOptimizer
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec
from bessemer.train.objective import Pretrain

from .conftest import spec_data

SMALL: dict[str, Any] = {
    "budget": {"steps": 12, "batch": 128}, "model": {"width": 32, "layers": 2, "heads": 2, "ffn": 64},
    "schedule": {"kind": "constant", "warmup": 1},
}  # fmt: skip


def trained(spec: RunSpec) -> tuple[str, list[float]]:
    outcome = train(spec)
    return outcome.kind, [record["loss"] for record in Run.existing(run_folder(spec)).metrics()]


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """Outcome and losses of a run without any of this."""
    return trained(RunSpec.model_validate(spec_data("plain", corpus, tmp_path_factory.mktemp("plain"), **SMALL)))


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param({"activations": "selective"}, marks=pytest.mark.slow), {"activations": "full"},
        {"activations": 0.5}, {"offload_activations": True},
    ],
    ids=str,
)  # fmt: skip
def test_losses_do_not_depend_on_what_is_kept(
    make_spec: Callable[..., RunSpec], plain: tuple[str, list[float]], memory: dict[str, Any]
) -> None:
    assert plain[0] == "finished" and trained(make_spec("lean", memory=memory, **SMALL)) == plain


def test_a_shortage_is_survived_and_remembered(
    make_spec: Callable[..., RunSpec], plain: tuple[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows do not fit from the fifth micro-batch on: the run goes on in twos, and so does its continuation."""
    whole, sizes = Pretrain.loss, []

    def loss(self: Pretrain, model: Any, feed: Any, count: float) -> Any:
        if model.training:
            sizes.append(len(feed.tokens_BT))
            if len(sizes) > 4 and sizes[-1] > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(self, model, feed, count)

    monkeypatch.setattr(Pretrain, "loss", loss)
    spec = make_spec("cramped", guard={"copies": "off"}, **SMALL)
    half = spec.model_copy(update={"budget": spec.budget.model_copy(update={"steps": 6})})
    trained(half)
    assert sizes == [4] * 5 + [2] * 4
    kind, found = trained(spec)
    assert kind == "finished" and set(sizes[9:]) == {2}
    assert found == pytest.approx(plain[1], rel=1e-4)
    settings = json.loads((run_folder(spec) / "settings.json").read_text())
    assert settings["micro_rows"] == 2


def test_a_written_micro_batch_that_does_not_fit_is_a_fault_in_one_line(
    make_spec: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    spec = make_spec("full", memory={"activations": "none"}, **{**SMALL, "budget": {"steps": 4, "micro_batch": 4}})
    monkeypatch.setattr(Pretrain, "loss", loss)
    monkeypatch.setattr("bessemer.train.loop.validate", lambda *_: None)
    outcome = train(spec)
    assert outcome.kind == "failed" and "Write budget.micro_batch: 2, or memory.activations" in outcome.reason


def test_a_model_that_cannot_even_be_built_is_a_fault_in_one_line(
    make_spec: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    spec = make_spec("large", **SMALL)
    monkeypatch.setattr("bessemer.session.build.optimizer_for", full)
    with pytest.raises(UserError) as told:
        train(spec)
    message = str(told.value)
    assert message.startswith("out of memory while the model was built: by estimate a step takes ")
    assert "moments" in message and "The machine has" in message and "memory.moments: 8bit" in message
    assert "\n" not in message
    assert not run_folder(spec).exists()  # a refused run leaves nothing behind
    monkeypatch.undo()
    assert train(spec).kind == "finished"

    def broken(*_: Any) -> Any:
        raise RuntimeError("something else")

    monkeypatch.setattr("bessemer.session.build.optimizer_for", broken)
    with pytest.raises(RuntimeError, match="something else"):
        train(make_spec("broken", **SMALL))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_cannot_hold_a_model_says_with_which_settings_it_would(make_spec: Callable[..., RunSpec]) -> None:
    """A parameter for every 8 bytes of the device: with 12 each it does not fit, with 6 it would."""
    whole = torch.cuda.get_device_properties(0).total_memory
    layers = round(whole / 8 / (4 * 4096**2 + 3 * 4096 * 16_384))
    model = {"width": 4096, "layers": layers, "heads": 32, "ffn": 16_384}
    spec = make_spec(
        "large", model=model, precision="bf16", parallel={"device": "cuda"}, budget={"steps": 2, "batch": 128}
    )
    torch.cuda.set_per_process_memory_fraction(0.05)  # who else is on the card keeps their room
    try:
        with pytest.raises(UserError, match=r"while the model was built.*The device has.*This one GPU holds it with m"):
            train(spec)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


def test_a_shortage_in_an_update_ends_the_run_with_a_reason_and_its_last_checkpoint_goes_on(
    make_spec: Callable[..., RunSpec], plain: tuple[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, steps = GuardedOptimizer.step, []

    def step(self: GuardedOptimizer, *arguments: Any) -> None:
        steps.append(0)
        if len(steps) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.\nGPU 0 has ...")
        whole(self, *arguments)

    monkeypatch.setattr(GuardedOptimizer, "step", step)
    spec = make_spec("late", checkpoint={"every": 4}, **SMALL)
    outcome = train(spec)
    assert outcome.kind == "failed" and outcome.reason.startswith("out of memory outside of a step's passes")
    assert "Write budget.micro_batch: 2, or memory.activations" in outcome.reason
    assert outcome.reason.endswith("the last checkpoint stands")
    (told,) = Run.existing(run_folder(spec)).events("out_of_memory")
    assert told["said"] == "CUDA out of memory. Tried to allocate 20 MiB."
    assert trained(spec) == plain


@pytest.mark.slow
def test_what_is_updated_in_backward_is_told_of_and_never_called_a_veto(
    make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    """The update is past withholding when its step is judged, and one step is no reason to go back."""
    poison = tmp_path / "noise.txt"
    poison.write_text("".join(map(chr, random.Random(0).choices(range(1, 32), k=2000))))
    sources = {**make_spec().data.model_dump()["sources"], "noise": {"path": [str(poison)], "weight": 0.02}}
    spec = make_spec(
        "late", data={"sources": sources, "context": 32, "validation": 0.1}, budget={"steps": 160, "batch": 32},
        memory={"update": "in_backward"}, guard={"loss_sigma": 6},
    )  # fmt: skip
    assert train(spec).kind == "finished"
    run = Run.existing(run_folder(spec))
    kinds = {event["kind"] for event in run.events()}
    late = [event for event in run.events() if event["kind"] == "judged_late"]
    assert late and all(event["documents"][0]["file"] == str(poison) for event in late)
    assert "after its update" in late[0]["reason"] and not kinds & {"veto", "rollback"}
    assert not any(record["veto"] for record in run.metrics())
    plan = json.loads((run.folder / "plan.json").read_text())["decisions"]
    assert any("judged after its update" in decision["reason"] for decision in plan)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("fp32", "kahan"), ("kahan", "fp32")])
def test_a_resumed_run_may_keep_its_weights_in_another_way(
    make_spec: Callable[..., RunSpec], before: str, after: str
) -> None:
    """Both are exact: what the other has to say in another way is the same number."""
    spec = make_spec("both", memory={"weights": before}, precision="bf16", **SMALL)
    half = spec.model_copy(update={"budget": spec.budget.model_copy(update={"steps": 6})})
    trained(half)
    kind, found = trained(make_spec("both", memory={"weights": after}, precision="bf16", **SMALL))
    plain = trained(make_spec("plain", memory={"weights": before}, precision="bf16", **SMALL))
    assert kind == "finished" and found == pytest.approx(plain[1], rel=1e-3)


def test_moments_in_eight_bits_are_never_read_as_numbers(make_spec: Callable[..., RunSpec]) -> None:
    big: dict[str, Any] = {**SMALL, "model": {"width": 64, "layers": 1, "heads": 2, "ffn": 128}}
    spec = make_spec("eight", memory={"moments": "8bit"}, **big)
    trained(spec.model_copy(update={"budget": spec.budget.model_copy(update={"steps": 6})}))
    with pytest.raises(UserError, match=r"uint8.*put the spec's optimizer and memory sections back"):
        train(make_spec("eight", **big))
