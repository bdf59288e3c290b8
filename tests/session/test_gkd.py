"""On-policy distillation in a run: rounds of sampled answers and of the data's, resume, replay and learning."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.align.rollouts import RoundStore
from bessemer.checkpoint.store import CheckpointStore
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.replay import documents_of, job_of
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.trial.replay import replay_to

from .conftest import spec_data, train_until

PAIRS = [(a, b) for a in range(10) for b in range(10)]
MODEL = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 64}
COLUMNS = {"prompt": "prompt", "completion": "completion"}


def write_rows(path: Path, answer: Callable[[int, int], Any], times: int = 3) -> Path:
    rows = [{"prompt": f"{a},{b}=", "completion": str(answer(a, b))} for a, b in PAIRS for _ in range(times)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft(folder: Path, name: str, rows: Path, steps: int, **tokenizer: Any) -> Path:
    spec = spec_data(
        name, rows, folder, objective="sft", model=MODEL, data={"context": 16}, checkpoint={"every": steps},
        budget={"steps": steps, "batch": 16 * 32}, evaluate={"every": steps},
    )  # fmt: skip
    spec["tokenizer"] = {"chat": "none", **tokenizer}
    run = RunSpec.model_validate(spec)
    assert Session(run).train().kind == "finished"
    return run_folder(run)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A teacher that was shown pairs of digits in reverse, and a student that was shown a third of them wrong."""
    folder = tmp_path_factory.mktemp("gkd")
    right = write_rows(folder / "right.jsonl", lambda a, b: f"{b}{a}")
    wrong = write_rows(folder / "wrong.jsonl", lambda a, b: f"{b}{a}" if (a + 3 * b) % 3 else f"{a}{a}")
    teacher = sft(folder, "teacher", right, 200, kind="char")
    student = sft(folder, "student", wrong, 60, path=str(teacher / "tokenizer.json"))
    (checkpoint,) = (student / "checkpoints").glob("step-00000060*")
    once = write_rows(folder / "once.jsonl", lambda a, b: f"{b}{a}", 1)
    return {"teacher": str(teacher), "start_from": str(checkpoint), "rows": str(once)}


Make = Callable[..., RunSpec]


@pytest.fixture
def make(base: dict[str, str], tmp_path: Path) -> Make:
    def spec_of(name: str = "gkd", rl: dict[str, Any] | None = None, distill: Any = None, **parts: Any) -> RunSpec:
        source = {"path": [base["rows"]], "columns": COLUMNS}
        return RunSpec.model_validate({
            "name": name, "runs": str(tmp_path / "runs"), "objective": "gkd", "start_from": base["start_from"],
            "models": {"teacher": base["teacher"]}, "model": MODEL, "distill": distill or {"loss": "js"},
            "rl": {"prompts": 16, "max_tokens": 4} | (rl or {}),
            "data": {"sources": {"pairs": source}, "context": 12, "validation": 0.1},
            "budget": {"steps": 6}, "optimizer": {"lr": 3e-3}, "schedule": {"kind": "constant", "warmup": 1},
            "precision": "fp32", "checkpoint": {"every": 2}, "evaluate": {"every": 3, "tokens": 8 * 12},
            "parallel": {"device": "cpu", "threads": 1}, "lints": {"silence": ["continued_at_the_peak"]}, **parts,
        })  # fmt: skip

    return spec_of


def run_of(spec: RunSpec) -> Run:
    return Run.existing(run_folder(spec))


def numbers(spec: RunSpec) -> list[list[Any]]:
    names = ("step", "loss", "grad_norm", "divergence", "nll", "on_policy", "answer_tokens")
    return [[record[name] for name in names] for record in run_of(spec).metrics()]


@pytest.mark.slow
def test_rounds_hold_sampled_answers_or_those_of_the_data(make: Make) -> None:
    spec = make(distill={"loss": "js", "beta": 0.2, "on_policy": 0.5}, rl={"rewards": {"right": {
        "verifier": "exact", "column": "completion"}}}, budget={"steps": 8})  # fmt: skip
    assert Session(spec).train().kind == "finished"
    records = list(run_of(spec).metrics())
    assert {record["on_policy"] for record in records} == {0.0, 1.0}
    for record in records:
        made = RoundStore(run_folder(spec) / "rollouts").load(record["step"])
        assert made is not None and len(made.samples) == 16
        lines = (run_folder(spec) / "rollouts" / f"round-{record['step']:08}.jsonl").read_text().splitlines()
        for line, sample in zip(map(json.loads, lines), made.samples, strict=True):
            a, b = map(int, line["prompt"][:-1].split(","))
            if record["on_policy"]:
                assert np.isfinite(sample.logps).all() and sample.seed
            else:
                assert line["answer"] == f"{b}{a}" and line["finished"]
                assert sample.tokens.size == len(line["answer"]) + 1  # with the end of the text
    validations = list(run_of(spec).validations())
    assert [record["step"] for record in validations] == [0, 3, 6, 8]
    assert all({"nll", "divergence", "reward_right"} <= record.keys() for record in validations)
    assert validations[-1]["loss"] == pytest.approx(validations[-1]["divergence"], abs=1e-6)


@pytest.mark.parametrize("on_policy", [1.0, 0.5])
def test_a_killed_run_continues_with_the_same_losses(make: Make, on_policy: float) -> None:
    """Step 4 is in the middle of a round of two steps."""
    settings = {"loss": "js", "on_policy": on_policy}
    whole, killed = (make(name, {"minibatches": 2}, settings) for name in ("whole", "killed"))
    assert Session(whole).train().kind == "finished"
    assert train_until(killed, 2).kind == "interrupted"
    assert Session(killed).train().kind == "finished"
    assert numbers(whole) == numbers(killed) and len(numbers(whole)) == 6


def test_every_step_replays_from_the_stored_rollouts(make: Make) -> None:
    spec = make(rl={"minibatches": 2}, checkpoint={"every": 1, "keep_last": 10})
    assert Session(spec).train().kind == "finished"
    folder = run_folder(spec)
    job, _ = job_of(folder)
    records = list(job.recorder.run.metrics())
    for start in (1, 4):
        checkpoint = next((folder / "checkpoints").glob(f"step-{start:08}*"))
        CheckpointStore(folder / "checkpoints").load(checkpoint, job.engine.state())
        path = replay_to(job, 6, records, start)
        assert [(step.loss, step.grad_norm) for step in path] == [(r["loss"], r["grad_norm"]) for r in records[start:]]
    assert all("nan" not in document["texts"][0] for document in documents_of(folder, 4, texts=True))


@pytest.mark.slow
def test_the_student_learns_what_its_teacher_knows(make: Make, base: dict[str, str]) -> None:
    """Nothing is trained on the reward, which measures answers to prompts that the rounds never ask."""
    right = {"right": {"verifier": "exact", "column": "completion"}}
    spec = make(
        rl={"prompts": 32, "rewards": right}, distill={"loss": "reverse"}, budget={"steps": 80},
        evaluate={"every": 80, "tokens": 50 * 12},
        data={"sources": {"pairs": {"path": base["rows"], "columns": COLUMNS}}, "context": 12, "validation": 0.4},
    )  # fmt: skip
    assert Session(spec).train().kind == "finished"
    before, after = run_of(spec).validations()
    assert after["loss"] < 0.3 * before["loss"]
    assert before["reward_right"] < 0.5 and after["reward_right"] > 0.9


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"models": {}}, "distillation needs a teacher"),
        ({"rl": {"kl": {"beta": 0.1}}}, "rl.kl: has no effect with objective: gkd"),
        ({"rl": {"advantage": "group"}}, "rl.advantage: has no effect"),
        ({"distill": {"on_policy": 0.5}, "rl": {"samples": 2}}, "the data has one answer"),
        ({"distill": {"loss": "forward", "beta": 0.1}}, "distill.beta: is of loss: js"),
        ({"distill": {"top_k": 4, "stored": "x"}}, "distill.stored: the teacher reads answers that are new"),
    ],
)  # fmt: skip
def test_settings_without_use_are_refused(make: Make, parts: dict[str, Any], message: str, tmp_path: Path) -> None:
    from bessemer.spec.load import dump_spec

    path = tmp_path / "spec.yaml"
    path.write_text(dump_spec(make(**parts)))
    with pytest.raises(UserError, match=message):
        load_spec(path)


def test_prompts_alone_suffice_unless_rounds_take_answers_of_the_data(make: Make, tmp_path: Path) -> None:
    from bessemer.spec.load import dump_spec

    data = make().data.model_dump(exclude_unset=True)
    data["sources"]["pairs"] = {"path": data["sources"]["pairs"]["path"], "columns": {"prompt": "prompt"}}
    (tmp_path / "a.yaml").write_text(dump_spec(make(data=data)))
    assert load_spec(tmp_path / "a.yaml").rl.samples == 1
    (tmp_path / "b.yaml").write_text(dump_spec(make(data=data, distill={"on_policy": 0.5})))
    with pytest.raises(UserError, match=r"data.sources.pairs: distill.on_policy below 100% needs answers"):
        load_spec(tmp_path / "b.yaml")
    spec = make(distill={"on_policy": 0.5}, data={**data, "sources": {"pairs": {**data["sources"]["pairs"], "columns": {
        "prompt": "prompt", "completion": "prompt"}}}, "context": 9})  # fmt: skip
    with pytest.raises(UserError, match=r"once.jsonl:\d+: prompt and answer of 10 tokens exceed data.context 9"):
        Session(spec).train()
