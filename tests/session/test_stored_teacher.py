"""Distillation from stored predictions: the losses of the teacher in memory, resumption, ranks, another tokenizer."""

import os
import shutil

import pytest

from bessemer.data.stream.teacher import TeacherStore
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder

from .conftest import train_until

BUDGET = {"steps": 12, "batch": 256}
SMALL = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32}


@pytest.fixture
def teacher(make_spec):
    spec = make_spec("large", budget={"steps": 20, "batch": 256})
    Session(spec).train()
    return spec


def losses(spec) -> list[tuple[float, ...]]:
    records = Run(run_folder(spec)).metrics()
    return [(record["loss"], record["nll"], record["divergence"], record["grad_norm"]) for record in records]


def student(make_spec, tmp_path, teacher, name="student", **parts):
    distill = {"temperature": 2.0, "top_k": 8, "next_token": 0.2, **parts.pop("distill", {})}
    values = {"objective": "distill", "model": SMALL, "models": {"teacher": str(run_folder(teacher))}, "budget": BUDGET}
    return make_spec(name, distill=distill, **(values | parts))


@pytest.mark.parametrize("packing", ["concat", "pad"])
@pytest.mark.parametrize("loss", ["forward", "reverse", "js"])
def test_the_losses_are_those_of_the_live_teacher(make_spec, tmp_path, teacher, loss, packing) -> None:
    data, curves, validations = {"packing": packing}, [], []
    for name, stored in (("live", None), ("stored", str(tmp_path / "teacher"))):
        spec = student(make_spec, tmp_path, teacher, name, distill={"loss": loss, "stored": stored}, data=data)
        validations.append(Session(spec).train().validation)
        curves.append(losses(spec))
    assert len(curves[0]) == BUDGET["steps"]
    for live, stored in zip(*curves, strict=True):
        assert stored == pytest.approx(live, rel=1e-6, abs=1e-6)
    assert validations[0]["divergence"] == pytest.approx(validations[1]["divergence"], rel=1e-6)


def test_a_resumed_run_needs_no_teacher_and_gives_the_same_losses(make_spec, tmp_path, teacher) -> None:
    stored = {"stored": str(tmp_path / "teacher")}
    straight = student(make_spec, tmp_path, teacher, "straight", distill=stored)
    Session(straight).train()
    shutil.rmtree(run_folder(teacher))
    resumed = student(make_spec, tmp_path, teacher, "resumed", distill=stored, checkpoint={"every": 5})
    train_until(resumed, 6)
    Session(resumed).train()
    assert losses(resumed) == losses(straight)
    plan = (run_folder(resumed) / "plan.json").read_text()
    assert "not in memory" in plan and "memory.models.teacher" not in plan


def test_other_settings_and_damage_are_refused_by_name(make_spec, tmp_path, teacher) -> None:
    folder = tmp_path / "teacher"
    Session(student(make_spec, tmp_path, teacher, distill={"stored": str(folder)})).train()
    for change, message in (
        ({"temperature": 3.0}, "distill.temperature 2.0, not 3.0"),
        ({"top_k": 4}, "distill.top_k 8, not 4"),
    ):
        with pytest.raises(UserError, match=message):
            Session(student(make_spec, tmp_path, teacher, "other", distill={"stored": str(folder), **change})).train()
    with (folder / "log_p.npy").open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 200_000)
    with pytest.raises(UserError, match=r"row [\d,]+ of words \(\w+\) has changed on disk: delete the folder"):
        Session(student(make_spec, tmp_path, teacher, "damaged", distill={"stored": str(folder)})).train()


def test_a_killed_pass_continues_and_a_changed_teacher_is_refused(make_spec, tmp_path, teacher) -> None:
    folder = tmp_path / "teacher"
    short = {"steps": 3, "batch": 256}
    Session(student(make_spec, tmp_path, teacher, "short", distill={"stored": str(folder)}, budget=short)).train()
    before = TeacherStore(folder)
    some = int(before.stored.sum())
    longer = student(make_spec, tmp_path, teacher, "longer", distill={"stored": str(folder)})
    Session(longer).train()
    assert int(TeacherStore(folder).stored.sum()) > some
    live = student(make_spec, tmp_path, teacher, "live")
    Session(live).train()
    for one, other in zip(losses(longer), losses(live), strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)
    Session(make_spec("large", budget={"steps": 22, "batch": 256})).train()
    more = student(make_spec, tmp_path, teacher, "more", distill={"stored": str(folder)}, budget={"steps": 40})
    with pytest.raises(UserError, match="has rows of a teacher with weights"):
        Session(more).train()


def test_a_complete_store_notices_another_teacher(make_spec, tmp_path, teacher) -> None:
    folder = tmp_path / "teacher"
    first = student(make_spec, tmp_path, teacher, "first", distill={"stored": str(folder)})
    Session(first).train()
    for file in run_folder(teacher).rglob("*.distcp"):
        os.utime(file, (1, 1))  # other times, the same weights
    again = student(make_spec, tmp_path, teacher, "again", distill={"stored": str(folder)})
    Session(again).train()
    assert losses(again) == losses(first)
    Session(make_spec("large", budget={"steps": 22, "batch": 256})).train()
    changed = student(make_spec, tmp_path, teacher, "changed", distill={"stored": str(folder)})
    with pytest.raises(UserError, match=r"models.teacher: .* has changed since its predictions were stored in"):
        Session(changed).train()


@pytest.mark.slow
def test_a_teacher_with_another_tokenizer_teaches_by_common_tokens(make_spec, tmp_path, capsys) -> None:
    """Half of the gap between the first and the teacher's loss is closed with the divergence alone."""
    teacher = make_spec("large", tokenizer={"kind": "unigram", "vocab": 330}, budget={"steps": 40, "batch": 256})
    Session(teacher).train()
    words = {"tokenizer": {"vocab": 380}}
    live = student(make_spec, tmp_path, teacher, "live", **words)
    with pytest.raises(UserError, match=r"models.teacher: .*distill: \{top_k: 64, stored: FOLDER\}"):
        Session(live).train()
    stored = {"stored": str(tmp_path / "teacher"), "next_token": 0.0, "top_k": 64, "temperature": 1.0}
    spec = student(make_spec, tmp_path, teacher, distill=stored, budget={"steps": 40, "batch": 256}, **words)
    outcome = Session(spec).train()
    header = TeacherStore(tmp_path / "teacher").header
    assert 0.5 < header.covered < 1
    first, last = losses(spec)[0][1], outcome.validation["nll"]
    plain = make_spec("plain", model=SMALL, budget={"steps": 40, "batch": 256}, **words)
    best = Session(plain).train().validation["loss"]
    assert first - last > 0.5 * (first - best)

    few = student(make_spec, tmp_path, teacher, "few", distill={**stored, "stored": str(tmp_path / "few")})
    with pytest.raises(UserError, match=r"covers \d+% of the trained tokens .* at least 50% are needed"):
        Session(few).train()  # with 300 tokens, few end where the teacher's do
