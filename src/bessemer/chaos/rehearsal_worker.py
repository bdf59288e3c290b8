"""`python -m bessemer.chaos.rehearsal_worker SPEC STEP` trains a run and kills its own process with SIGKILL."""

from __future__ import annotations

import os
import signal
import sys

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.observe.view import LineView
from bessemer.session.session import Session
from bessemer.spec.load import load_spec
from bessemer.train.job import Job


class KillAtStep:
    """Ends the process before a step, as a power failure would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def attach(self, job: Job, tokenizer: Tokenizer) -> None:
        job.faults = self

    def before_step(self, job: Job, step: int) -> None:
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_backward(self, job: Job, step: int) -> None: ...

    def lr(self, step: int, planned: float) -> float:
        return planned


def main(spec_path: str, step: str) -> int:
    try:
        outcome = Session(load_spec(spec_path), LineView(None), faults=KillAtStep(int(step))).train()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"the run {outcome.kind} before step {step}: {outcome.reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
