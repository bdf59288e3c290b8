"""`bessemer bench scaling`: what is counted from the measurements, the workers, and the whole with real processes."""

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bessemer.bench import scaling as module
from bessemer.bench.scaling import (
    USUAL,
    Scaling,
    ScalingRow,
    check_ranks,
    layouts_of,
    measure_scaling,
    parse_layout,
    save,
    suggestion,
    table,
    timed_spec,
    with_efficiency,
)
from bessemer.bench.scaling_worker import FAULT, TIMED, ScalingSession, main
from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.parallel.world import leave_process_group
from bessemer.spec.schema import RunSpec
from bessemer.train.device import pick_device

FOUND = Scaling("x.yaml", "strong", "2026-11-16T09:00:00+00:00", "a machine", "cpu", 1, 64, 4096, 10, {})


@pytest.fixture
def small(tmp_path: Path) -> dict[str, Any]:
    words = ["steel", "iron", "blast", "flame", "ore", "coke", "slag", "heat", "pour", "mould", "ingot", "forge"]
    lines = [json.dumps({"text": " ".join(words[i % 12 :] + words[: i % 7])}) for i in range(300)]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    return {
        "name": "small", "runs": str(tmp_path / "runs"), "precision": "fp32", "tokenizer": {"vocab": 280},
        "model": {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 32},
        "data": {"sources": {"words": str(tmp_path / "words.jsonl")}, "context": 16},
        "budget": {"steps": 1000, "batch": 128}, "parallel": {"device": "cpu", "threads": 1},
    }  # fmt: skip


def test_layouts_are_filled_up_or_left_out() -> None:
    assert layouts_of(USUAL, 1) == [{}]
    assert layouts_of(USUAL, 2) == [{"dp_replicate": 2}, {"dp_shard": 2}]
    assert layouts_of(USUAL, 8)[-1] == {"dp_replicate": 2, "dp_shard": 4}
    assert layouts_of(["tp=2+dp_shard", "tp=4"], 8) == [{"tp": 2, "dp_shard": 4}]
    assert layouts_of(["tp=3+dp_shard"], 8) == []
    assert layouts_of(["ep=4+dp_shard"], 4) == [{"ep": 4, "dp_shard": 4}]


@pytest.mark.parametrize("text", ["dp", "tp=two", "tp=0", "dp_shard+dp_replicate", ""])
def test_a_layout_that_is_none_is_named(text: str) -> None:
    with pytest.raises(UserError, match=r"^--layouts"):
        parse_layout(text)


def measured(*rates: tuple[int, dict[str, int], float, int]) -> Scaling:
    rows = [ScalingRow(ranks, layout, rate, 4096 / rate, None, 0.1, memory) for ranks, layout, rate, memory in rates]
    return replace(FOUND, rows=with_efficiency(rows))


def test_efficiency_is_of_each_process_against_the_fewest() -> None:
    found = measured((1, {}, 100.0, 9), (2, {"dp_shard": 2}, 150.0, 9), (4, {"dp_shard": 4}, 200.0, 9))
    assert [row.efficiency for row in found.rows] == [1.0, 0.75, 0.5]
    broken = ScalingRow(8, {"tp": 8}, fault="does not fit")
    assert with_efficiency([broken]) == [broken]


def test_the_fastest_is_suggested_and_of_equals_the_one_that_holds_less() -> None:
    two = (2, {"dp_replicate": 2}, 150.0, 9), (2, {"dp_shard": 2}, 148.0, 5)
    found = suggestion(measured((1, {}, 100.0, 9), *two))
    assert found is not None and found["parallel"] == {"dp_shard": 2}
    assert "the most of 3 measured within 3%, with the least memory" in found["reason"]
    more = suggestion(measured((1, {}, 100.0, 9), *two, (4, {"dp_shard": 4}, 120.0, 2)))
    assert more is not None and more["ranks"] == 2 and "4 processes gain nothing" in more["reason"]
    assert suggestion(replace(FOUND, rows=[ScalingRow(1, {}, fault="no")])) is None


def test_the_table_says_how_it_was_measured() -> None:
    found = measured((1, {}, 4096.0, 10**9), (2, {"dp_replicate": 2}, 6144.0, 10**9))
    found.rows.append(ScalingRow(2, {"tp": 2}, fault="parallel.tp: 2 does not divide 3 heads"))
    text = "\n".join(table(found))
    assert "4,096 tokens a step in all (strong scaling), 10 steps each; 1 threads for each process" in text
    assert "2      dp_replicate 2  6,144     667 ms    75%         10%" in text
    assert "parallel.tp: 2 does not divide 3 heads" in text and "send nothing" in text
    assert "suggested: parallel: {dp_replicate: 2}" in text and "others were using" not in text
    assert "other programs used this machine (load 5 per core" in "\n".join(table(replace(found, load=5.0)))
    assert "for each process (weak scaling)" in table(replace(found, kind="weak"))[0]


def test_numbers_are_kept_with_their_date(tmp_path: Path) -> None:
    path = save(measured((1, {}, 100.0, 9)), tmp_path / "results")
    assert path.name == "scaling-2026-11-16.json"
    kept = json.loads(path.read_text())
    assert kept["rows"][0]["tokens_per_s"] == 100.0 and kept["suggestion"]["ranks"] == 1 and "command" in kept
    assert save(measured((1, {}, 100.0, 9)), tmp_path / "mine.json") == tmp_path / "mine.json"


def test_numbers_of_processes(small: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    device = pick_device(RunSpec.model_validate(small).parallel)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert check_ranks(None, device) == [1, 2, 4]
    assert check_ranks([2, 1, 2], device) == [1, 2]
    with pytest.raises(UserError, match="--ranks 0"):
        check_ranks([0], device)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without torchrun"):
        measure_scaling("10M", [])


def test_a_worker_times_steps_of_the_asked_size(small: dict[str, Any], tmp_path: Path) -> None:
    spec = timed_spec(RunSpec.model_validate(small), {}, 256, steps=3)
    session = ScalingSession(spec, tmp_path / "scratch", steps=3, vocab=1000)
    session.train()
    assert session.result["tokens"] == 256 and session.result["step_s"] > 0
    assert session.result["parameters"] > 16 * 1000  # as many tokens as a preset has, not as the text needs
    assert not (tmp_path / "runs" / "small").exists() and not list(tmp_path.glob("scratch/checkpoints/step-*"))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp_replicate": 2}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 2}, marks=pytest.mark.slow),
        {"dp_replicate": 2, "dp_shard": 2},
    ],
)
def test_processes_that_send_nothing_do_the_same_work(
    small: dict[str, Any], tmp_path: Path, layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is enough to see it: nobody answers, and every step ends."""
    size = layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    monkeypatch.setenv("RANK", str(size - 1))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    spec = timed_spec(RunSpec.model_validate(small), layout, 128, steps=2)

    def work(answers: Any) -> None:
        session = ScalingSession(spec, tmp_path / "scratch", steps=2, silent=True)
        try:
            session.train()
        finally:
            leave_process_group()
        answers.put((session.result, session.world.layout.dp_replicate))

    # In a child: torch caches what it computed for a mesh, and a later test on real ranks would inherit it.
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=work, args=(answers,))
    child.start()
    result, replicas = answers.get(timeout=100)
    child.join()
    assert result["tokens"] == 128 and result["step_s"] > 0
    assert replicas == layout.get("dp_replicate", 1)


def test_a_refused_layout_is_a_row_with_its_reason(small: dict[str, Any], tmp_path: Path) -> None:
    spec = timed_spec(RunSpec.model_validate(small), {"dp_shard": 2}, 128, steps=2)  # and there is one process
    (tmp_path / "spec.yaml").write_text(module.dump_spec(spec))
    (tmp_path / "request.json").write_text(json.dumps({"steps": 2, "vocab": None}))
    main(tmp_path)
    assert "needs 2 processes, and there are 1" in (tmp_path / f"{FAULT}-0.txt").read_text()
    assert not (tmp_path / TIMED).exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["spec", "preset"])
def test_real_processes(small: dict[str, Any], tmp_path: Path, target: str) -> None:
    path, told = tmp_path / "small.yaml", []
    path.write_text(yaml.safe_dump(small))
    if target == "spec":
        found = measure_scaling(str(path), [], [1, 2], ["dp_shard", "tp"], steps=3, tell=told.append, weak=True)
        assert [row.tokens_per_s is not None for row in found.rows] == [True, True, False]
        assert "parallel.tp: 2 does not divide" in found.rows[-1].fault  # of one key-value head
        assert found.kind == "weak" and found.batch_tokens == 128
    else:
        settings = ["parallel.device=cpu", "precision=fp32"]
        found = measure_scaling("1M", settings, [1, 2], ["dp_replicate"], steps=2, context=32, batch=128)
    for row in found.rows[:2]:
        assert row.tokens_per_s and row.step_s and row.memory_bytes and row.communication is not None
        assert row.efficiency and row.efficiency > 0
    assert suggestion(found)


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["bench", "scaling", *arguments])
        assert isinstance(result.exception, UserError)
        return str(result.exception)

    monkeypatch.chdir(tmp_path)
    assert said("nothing.yaml").startswith("nothing.yaml: neither a file or folder nor a preset")
    assert said("10M", "--ranks", "one").startswith("--ranks one: write numbers separated by commas")
    assert said("10M", "--layouts", "zp=2").startswith("--layouts zp=2: write degrees")
    assert said("10M", "--steps", "0").startswith("--steps 0: write 1 or more")
