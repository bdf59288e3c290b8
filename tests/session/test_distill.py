"""A student learns from a teacher: `objective: distill` from spec to validation."""

from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder

BUDGET = {"steps": 60, "batch": 256}


def test_distillation_closes_most_of_the_gap_to_the_teacher(make_spec) -> None:
    large = make_spec("large", budget=BUDGET, model={"width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 128})
    best = Session(large).train().validation["loss"]
    small = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 32}
    models = {"teacher": str(run_folder(large))}
    curves = []
    for micro in (8, 2):
        spec = make_spec(
            f"student{micro}", objective="distill", model=small, models=models, distill={"next_token": 0.0},
            budget={**BUDGET, "micro_batch": micro},
        )  # fmt: skip
        outcome = Session(spec).train()
        records = list(Run(run_folder(spec)).metrics())
        curves.append([[record["loss"], record["nll"]] for record in records])
        begin, end = records[0]["nll"], outcome.validation["nll"]
        assert begin - end > 0.5 * (begin - best), "half of the gap from random weights to the teacher"
    for one, other in zip(*curves, strict=True):
        assert abs(one[0] - other[0]) < 2e-3
