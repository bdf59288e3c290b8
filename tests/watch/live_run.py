"""A tiny run for the tests of the page, slowed down: python live_run.py RUNS NAME STEPS SECONDS_A_STEP [LR]

One batch gives gradients that are not finite: it is vetoed, tried, and reported.
"""

import json
import random
import sys
import time
from pathlib import Path

from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.session.session import Session
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job

WORDS = [
    "steel",
    "iron",
    "blast",
    "flame",
    "ore",
    "coke",
    "slag",
    "heat",
    "pour",
    "mould",
    "ingot",
    "forge",
    "anvil",
    "hammer",
    "tongs",
    "bellows",
]
BAD_STEP = 25


class SlowWithOneBadStep:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def attach(self, job: Job, tokenizer: Tokenizer) -> None:
        job.faults = self

    def before_step(self, job: Job, step: int) -> None:
        time.sleep(self.seconds)

    def after_backward(self, job: Job, step: int) -> None:
        if step == BAD_STEP:
            next(p for p in job.engine.model.parameters() if p.grad is not None).grad.fill_(float("nan"))

    def lr(self, step: int, planned: float) -> float:
        return planned


def main(runs: str, name: str, steps: str, seconds: str, lr: str = "0.01") -> None:
    corpus, draw = Path(runs).with_name("words.jsonl"), random.Random(0)
    if not corpus.exists():
        texts = [" ".join(draw.choices(WORDS, k=draw.randint(20, 120))) for _ in range(120)]
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spec = {
        "name": name, "runs": runs, "model": {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64},
        "tokenizer": {"vocab": 300},
        "data": {"sources": {"words": {"path": [str(corpus)]}}, "context": 32, "validation": 0.1},
        "budget": {"steps": int(steps), "batch": 128}, "optimizer": {"lr": float(lr)}, "precision": "fp32",
        "parallel": {"device": "cpu", "threads": 1}, "guard": {"warmup": 8, "window": 32, "look_every": 5},
        "checkpoint": {"every": 20}, "evaluate": {"every": 10, "tokens": 512},
    }  # fmt: skip
    Session(RunSpec.model_validate(spec), faults=SlowWithOneBadStep(float(seconds))).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
