"""Tasks and sample prompts of a run (`evaluate.tasks`, `evaluate.samples`), scored at its evaluations.

All ranks ask the same questions of a plain copy of the model that shares its weights, and divide the work. The state of
every random generator is restored, so the run goes on as if nothing had been asked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bessemer.align.resident import plain_model
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.evaluate.harness import unchanged_random_state
from bessemer.evaluate.language_model import LanguageModel
from bessemer.evaluate.registered import EVENT, check_registration
from bessemer.evaluate.results import Evaluation
from bessemer.evaluate.run_tasks import TaskList, TaskSettings, open_tasks, registration, run_tasks
from bessemer.spec.schema import RunSpec
from bessemer.storage import write_atomic
from bessemer.train.job import Job
from bessemer.train.trained import LoadedModel, prompt_format, run_template

SAMPLES, EVALUATIONS = "samples", "evaluations"


class RunTasks:
    """The tasks of a run, read and checked once."""

    def __init__(self, spec: RunSpec, folder: Path, tokenizer: Tokenizer, context: int) -> None:
        own = spec.evaluate
        data = Path(own.data) if own.data else None
        self.settings = TaskSettings(tuple(own.tasks), own.limit, own.shots, own.chat, data)
        self.tasks: TaskList | None = open_tasks(self.settings) if own.tasks else None
        self.spec, self.folder, self.tokenizer, self.context = own, folder, tokenizer, context
        self.evaluations = 0
        self.format, self.template = prompt_format(folder, tokenizer), run_template(folder, tokenizer)

    def score(self, job: Job, step: int) -> dict[str, Any]:
        """Scores, and writes them, the logged questions and the samples into the run's folder."""
        due = self.evaluations % self.spec.tasks_every == 0 or step >= job.plan.total_steps
        self.evaluations += 1

        def report(what: str, done: int = 0, total: int = 0) -> None:
            job.recorder.view.activity(f"{what} after step {step:,}", done, total)
            job.check_interrupt()

        world, result = job.world, Evaluation("", [])
        with unchanged_random_state(), plain_model(job.engine.model, world, job.plan.precision) as local:
            share = (world.dp_rank, world.layout.dp, world.gather) if world.size > 1 else None
            loaded = LoadedModel(local, self.tokenizer, self.format, self.template, self.context)
            model = LanguageModel(loaded, self.settings.chat, report, share=share)
            if self.tasks is not None and due:
                result = run_tasks(model, self.settings, self.tasks)
                result.model = f"{job.spec.name} step {step}"
            plain = LanguageModel(loaded, False, report, share=share) if self.settings.chat else model
            limits = {"max_gen_toks": self.spec.sample_tokens}
            texts = plain.answer([(prompt, limits) for prompt in self.spec.samples])
        if world.main:
            self._write(result, texts, step)
        if texts:
            job.recorder.event("samples", step=step, prompt=self.spec.samples[0], text=texts[0])
        return _summary(result)

    def _write(self, result: Evaluation, texts: list[str], step: int) -> None:
        if result.results:
            result.write(self.folder / EVALUATIONS / f"step-{step:08d}")
        if texts:
            pairs = zip(self.spec.samples, texts, strict=True)
            lines = [json.dumps({"step": step, "prompt": a, "text": b}, ensure_ascii=False) for a, b in pairs]
            write_atomic(self.folder / SAMPLES / f"prompts-{step:08d}.jsonl", "\n".join(lines) + "\n", parents=True)


def _summary(result: Evaluation) -> dict[str, Any]:
    """By task and metric: the score and its interval."""
    scores: dict[str, Any] = {}
    for each in result.results:
        (low, high), _ = each.interval
        numbers = {"score": each.reported, "questions": len(each.ids)}
        scores[each.name] = numbers | ({"low": low, "high": high} if each.values else {})
    return scores


def attach_tasks(job: Job, spec: RunSpec, tokenizer: Tokenizer, folder: Path) -> None:
    """Opens the run's tasks and registers them. Call it when the run's files are written."""
    if not (spec.evaluate.tasks or spec.evaluate.samples):
        return
    if not job.data.evaluator.available:
        raise UserError("evaluate.tasks: are scored when the held-out loss is: hold data back with data.validation")
    if job.world.layout.pp > 1:
        raise UserError(
            "evaluate.tasks: a pipeline rank holds only some layers: remove the key and score checkpoints with "
            "`bessemer evaluate RUN`, or use parallel.tp or parallel.dp_shard"
        )
    job.world.wait()  # rank 0 has written the folder's files
    job.data.tasks = tasks = RunTasks(spec, folder, tokenizer, job.plan.context)
    hashes = registration(tasks.settings)
    if hashes and check_registration(folder, hashes):
        job.recorder.event(EVENT, step=job.start_step, hashes=hashes)
    job.world.wait()  # no rank reads the events before they are complete
