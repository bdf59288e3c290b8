"""Distillation from stored predictions on two ranks: the teacher's pass and the losses are those of one process."""

import pytest

from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder


def _train(spec):
    Session(spec).train()


@pytest.mark.distributed
@pytest.mark.parametrize("layout", [{"dp_replicate": 2}, {"dp_shard": 2}])
@pytest.mark.slow
def test_ranks_store_and_read_what_one_process_does(tiny_spec, ranks, tmp_path, layout) -> None:
    teacher, curves = tiny_spec("teacher", budget={"steps": 8, "batch": 256}), []
    Session(teacher).train()
    for size in (1, 2):
        spec = tiny_spec(
            f"student{size}", objective="distill", models={"teacher": str(run_folder(teacher))},
            distill={"top_k": 8, "stored": str(tmp_path / f"stored{size}")},
            parallel={"device": "cpu", "threads": 1, **(layout if size > 1 else {})},
            budget={"steps": 8, "batch": 256, "micro_batch": 2},
        )  # fmt: skip
        ranks(size, _train, spec)
        curves.append([(r["loss"], r["divergence"]) for r in Run(run_folder(spec)).metrics()])
    assert len(curves[0]) == 8
    for one, two in zip(*curves, strict=True):
        assert two == pytest.approx(one, rel=2e-5, abs=1e-6)
