"""The models of a server by name: one base, adapters merged into copies of it, and the newest checkpoint of a run.

Each adapter is merged into its own copy of the weights, with its own cache, so requests of different adapters cannot
mix. Tensors that the adapter leaves as they are share the base's memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from bessemer.checkpoint.store import CheckpointStore
from bessemer.errors import UserError
from bessemer.model.generate import Generator, ModelDrafter, NgramDrafter, Request, Sampling
from bessemer.model.generate.speculate import Drafter
from bessemer.run.directory import Run
from bessemer.serve.encoders import EncoderBackend, read_classes, read_pooling
from bessemer.serve.errors import ApiError
from bessemer.serve.grammar import GrammarCompiler
from bessemer.serve.scheduler import Backend, InferenceJob, SampleProgress
from bessemer.spec.classify import ClassifySpec
from bessemer.spec.shape import cache_bytes
from bessemer.train.trained import LoadedModel, find_checkpoint, find_model, load_model

_log = logging.getLogger(__name__)
DEFAULT_CONTEXT = 8192  # of models that read any length
RESERVED = 0.7  # of the free memory that a cache may take at the start
Task = Literal["generate", "embed", "classify"]


@dataclass(frozen=True)
class ModelOptions:
    """How models are loaded and run."""

    checkpoint: str = "last"
    device: str = "auto"
    template: str | None = None
    slots: int = 16
    context: int | None = None
    draft: str | None = None  # ngram, or a smaller model
    compiled: bool = False


class GeneratorBackend:
    """A `Generator` as the scheduler drives it."""

    def __init__(self, make: Callable[[], Generator]) -> None:
        self.make, self.generator = make, make()
        self.slots = self.generator.slots

    def free(self) -> int:
        return self.slots - len(self.generator.rows) - len(self.generator.waiting)

    def start(self, job: InferenceJob) -> None:
        job.completions = self.generator.submit(job.work)

    def cancel(self, job: InferenceJob) -> None:
        self.generator.cancel(job.completions[0].request)

    def step(self) -> None:
        self.generator.step()

    def progress(self, job: InferenceJob) -> list[SampleProgress]:
        return [SampleProgress(len(sample.tokens), sample.text, sample.reason) for sample in job.completions]

    def reset(self) -> None:
        self.generator = self.make()


@dataclass(frozen=True)
class ServedModel:
    """A model under a name of the API."""

    name: str
    task: Task
    loaded: LoadedModel
    backend: Backend
    source: str  # folder and checkpoint
    created: int
    context: int  # most tokens of a prompt and its answer
    grammar: GrammarCompiler
    classes: ClassifySpec | None = None

    @property
    def checkpoint(self) -> str:
        """The checkpoint's name; empty if the model is a folder without checkpoints."""
        return self.source.rpartition("@")[2] if "@" in self.source else ""


def load_served(name: str, folder: Path, options: ModelOptions) -> ServedModel:
    """Load a run, a checkpoint, a Hugging Face folder or an adapter for serving."""
    files = find_model(folder, options.checkpoint)
    loaded = load_model(files.checkpoint or folder, options.checkpoint, options.device)
    if options.template is not None:
        loaded = LoadedModel(loaded.model, loaded.tokenizer, loaded.format, options.template, loaded.context)
        loaded.chat_prompt([{"role": "user", "content": "x"}])  # it must work with this tokenizer
    source = f"{files.place}@{files.checkpoint.name}" if files.checkpoint else str(folder)
    grammar = GrammarCompiler(loaded.tokenizer, loaded.stop_ids)
    shape, created = loaded.model.shape, int(time.time())
    context = min(options.context or DEFAULT_CONTEXT, loaded.context or 1 << 30)
    if options.context is None and loaded.context is not None:
        context = loaded.context
    if shape.labels or (not shape.causal and not shape.decoder_layers):
        classes = read_classes(files.place, loaded.model) if shape.labels else None
        backend: Backend = EncoderBackend(loaded.model, read_pooling(files.place), classes)
        task: Task = "classify" if shape.labels else "embed"
        return ServedModel(name, task, loaded, backend, source, created, context, grammar, classes)

    def make() -> Generator:
        generator = loaded.generator(options.slots, context, _drafter(options, loaded), options.compiled)
        if loaded.model.head_weight.device.type == "cuda":
            warm_up(generator, loaded.format.start)
        return generator

    return ServedModel(name, "generate", loaded, GeneratorBackend(make), source, created, context, grammar)


def warm_up(generator: Generator, token: int) -> None:
    """Compile and capture the passes of every batch size, so that no request waits for it. A cache that grows later
    would drop them: it takes its full size now, unless that leaves little for anything else."""
    weight = generator.model.head_weight
    if weight.is_cuda:
        needed = (generator.slots + 1) * cache_bytes(generator.model.shape, generator.max_length, weight.element_size())
        if needed < RESERVED * torch.cuda.mem_get_info(weight.device)[0]:
            generator.reserve()
    count = 1
    while count <= generator.slots:
        for temperature in (0.0, 1.0):
            generator.run([Request([token], 3, Sampling(temperature=temperature))] * count)
        count *= 2
    generator.contents.clear()


def _drafter(options: ModelOptions, loaded: LoadedModel) -> Drafter | None:
    if options.draft is None:
        return None
    if options.draft == "ngram":
        return NgramDrafter()
    draft = load_model(options.draft, device=options.device).model
    return ModelDrafter(draft.to(loaded.model.head_weight.dtype), loaded.model)


def load_adapter(name: str, folder: Path, base: ServedModel, options: ModelOptions) -> ServedModel:
    """An adapter, merged into a copy of its base, of which unchanged tensors are shared with `base`."""
    served = load_served(name, folder, options)
    if served.loaded.model.shape != base.loaded.model.shape:
        raise UserError(f"--adapter {name}={folder}: its base has another shape than {base.source}: serve them apart")
    if share_equal_tensors(served.loaded.model, base.loaded.model) == 0:
        raise UserError(f"--adapter {name}={folder}: shares no tensor with {base.source}: it has another base")
    return served


def share_equal_tensors(model: torch.nn.Module, base: torch.nn.Module) -> int:
    """Let parameters with equal values be the base's. Returns their number."""
    theirs, count = dict(base.named_parameters()), 0
    for name, parameter in model.named_parameters():
        other = theirs.get(name)
        if other is not None and other.dtype == parameter.dtype and torch.equal(parameter.data, other.data):
            parameter.data = other.data
            count += 1
    return count


class ModelRegistry:
    """The served models; a name may get a newer model while requests run."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models: dict[str, ServedModel] = {}
        for model in models:
            if model.name in self.models:
                raise UserError(f"two models have the name {model.name!r}: choose others with --name and --adapter")
            self.replace(model)

    def replace(self, model: ServedModel) -> None:
        """Requests that were accepted before are answered by the model before."""
        self.models[model.name] = model

    def get(self, name: str | None, task: Task) -> ServedModel:
        """The model of a request; ApiError for an unknown name or the wrong task."""
        if name is None:
            name = next(iter(self.models))
        if name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(404, f"no model {name!r}; there are {known}", "model", "model_not_found")
        model = self.models[name]
        if model.task != task:
            verbs = {"generate": "writes text", "embed": "embeds texts (/v1/embeddings)",
                     "classify": "classifies texts (/v1/classify)"}  # fmt: skip
            raise ApiError(400, f"the model {name!r} {verbs[model.task]}: use its endpoint", "model", "wrong_task")
        return model


class RunWatcher:
    """Serves the newest checkpoint of a live run: a thread looks for one every few seconds, loads it, and hands it to
    the registry. Requests that wait or run end on the model that they were accepted for."""

    def __init__(
        self, run: Path, name: str, options: ModelOptions, registry: ModelRegistry, interval_s: float = 5.0,
        report: Callable[[str], None] = _log.warning,
    ) -> None:  # fmt: skip
        self.run, self.name, self.options, self.registry = Run.existing(run), name, options, registry
        self.interval_s, self.report = interval_s, report
        self.failure = ""  # why the newest checkpoint is not served, reported once
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bessemer-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            try:
                self.check()
                self.failure = ""
            except Exception as error:  # retention may remove it while it is read, or memory is short: tried again
                if str(error) != self.failure:
                    self.failure = str(error)
                    self.report(f"the newest checkpoint was not loaded, the one before stays: {error}")

    def check(self) -> bool:
        """Load the newest checkpoint if it is a new one."""
        newest = find_checkpoint(self.run, "last")
        if self.registry.models[self.name].checkpoint == newest.name:
            return False
        self.registry.replace(load_served(self.name, newest, self.options))
        self.report(f"now serving {newest.name}")
        return True


def wait_for_checkpoint(folder: Path, report: Callable[[str], None], interval_s: float = 2.0) -> None:
    """Returns when the run has a checkpoint: a run that has just started saves its first one later."""
    store, waiting = CheckpointStore(Run.existing(folder).checkpoints), False
    while not store.committed():
        if not waiting:
            report(f"waiting  for the first checkpoint of {folder}; Ctrl-C ends")
        waiting = True
        time.sleep(interval_s)
