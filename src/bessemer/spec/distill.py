"""The distill section: which divergence from a teacher a student minimises, and on whose texts."""

from __future__ import annotations

from typing import Literal

from bessemer.spec.quantity import Share, SpecSection, setting


class DistillSpec(SpecSection):
    """Distillation of `models.teacher` into the run's model: on the texts of the data (`objective: distill`), or on
    answers that the student writes (`objective: gkd`)."""

    loss: Literal["forward", "reverse", "js"] = setting(
        "forward", "forward KL (teacher to student), reverse KL, or js, the Jensen-Shannon divergence", "reverse"
    )
    beta: float = setting(
        0.5, "of js: weight of the teacher in the mixture; 0 is forward, 1 is reverse KL", 0.1, ge=0, le=1
    )
    on_policy: Share = setting(
        1.0, "with gkd: share of the rounds on the student's own answers; the others take those of the data", "50%"
    )
    temperature: float = setting(
        1.0, "divides both models' logits; losses are multiplied by its square", 2.0, gt=0, le=100
    )
    next_token: Share = setting(0.0, "share of the plain next-token loss in the sum", "50%")
    top_k: int | None = setting(
        None, "compare the teacher's k most likely tokens and the sum of the others, instead of all tokens", 64, ge=1
    )
    stored: str | None = setting(
        None,
        "folder for the teacher's top_k log-probabilities of every row, written once before the first step: training "
        "then needs no teacher in memory, and the teacher may have another tokenizer",
        "runs/.data/teacher",
        min_length=1,
    )
