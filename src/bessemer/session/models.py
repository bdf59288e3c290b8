"""The further models of a run (`models:` in the spec): a reference, a teacher, a reward model, a critic.

Each is read from its path and laid out over the processes as the run's own model is. The objective finds them in
`Objective.models`. Frozen ones are in no checkpoint: the plan has a fingerprint of their weights, and a run with others
is not continued. Trained ones are submodules of the run's model, so that the optimizer, checkpoints, snapshots and the
guard treat their weights like all others. Every process reads the files of all models once at its start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor, nn

from bessemer.checkpoint.base import FrozenTensor, Kind, open_weights
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError
from bessemer.model.transformer import Decoder, build_model, generator_for
from bessemer.parallel.shard import copy_shard, shard_or_replicate
from bessemer.parallel.world import World
from bessemer.plan.cost_model.memory import OtherModel
from bessemer.plan.decide import HALF
from bessemer.plan.decision import Plan
from bessemer.spec.classify import ClassifySpec, as_classifier
from bessemer.spec.model import BASE, OtherModelSpec
from bessemer.spec.quantity import human_count
from bessemer.spec.schema import RunSpec
from bessemer.spec.shape import ModelShape
from bessemer.train.trained import ModelFiles, find_model

COMPANIONS = "companions"  # the submodule with the trained ones
HEAD = ("head.", "head_bias", "transform.")


@dataclass
class ModelSource:
    """A further model on disk. `fingerprint` is set when its weights are read."""

    name: str
    spec: OtherModelSpec
    shape: ModelShape
    weights: Mapping[str, Tensor]
    place: str
    files: ModelFiles
    fingerprint: str = ""

    @property
    def size(self) -> OtherModel:
        return OtherModel(self.name, self.shape, self.spec.train)

    def read_fingerprint(self) -> str:
        """The fingerprint that `fill` sets, without a model."""
        names, digest = build_model(self.shape, "meta", 0).state_dict().keys(), xxhash.xxh3_128()
        for name in self.weights:
            if name in names:
                digest.update(f"{name} {FrozenTensor.of(self.weights[name]).xxh3_128}\n".encode())
        return digest.hexdigest()

    def fill(self, model: nn.Module, seed: int) -> None:
        """Copies the weights into the model, each rank its shards; draws those of a new head."""
        targets = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if COMPANIONS not in name}
        digest = xxhash.xxh3_128()
        with torch.no_grad():
            for name in self.weights:
                if name not in targets or (self.spec.head == "score" and name.startswith(HEAD)):
                    continue
                tensor = self.weights[name]
                digest.update(f"{name} {FrozenTensor.of(tensor).xxh3_128}\n".encode())
                copy_shard(targets.pop(name), tensor)
            for name, target in targets.items():
                if self.spec.head != "score" or not name.startswith(HEAD):
                    raise UserError(f"models.{self.name}: {self.place} has no weight {name}: it is incomplete")
                generator = generator_for(f"{self.name}.{name}", seed, torch.device("cpu"))
                copy_shard(target, torch.randn(target.shape, generator=generator) * (0.02 if target.ndim > 1 else 0.0))
        self.fingerprint = digest.hexdigest()


def open_models(spec: RunSpec, names: Collection[str] | None = None) -> list[ModelSource]:
    """The models of the spec that training holds in memory, or the named ones. Reads their configurations but no
    weights. Those whose log-probabilities are stored with the data are left out."""
    stored = {"reference": spec.objective == "dpo" and spec.dpo.reference == "stored", "teacher": spec.distill.stored}
    chosen = [name for name in spec.models if (not stored.get(name) if names is None else name in names)]
    return [open_model(name, spec.models[name]) for name in chosen if spec.models[name].path != BASE]


def open_model(name: str, other: OtherModelSpec) -> ModelSource:
    try:
        files = find_model(other.path, other.checkpoint)
        shape = files.shape
        kind: Kind = "checkpoint" if files.checkpoint else "hf"
        weights = open_weights(kind, files.checkpoint or files.place)
    except UserError as error:
        raise UserError(f"models.{name}: {error}") from None
    if other.head == "score":
        shape = as_classifier(shape, ClassifySpec(problem="regression", pool="last"))
    return ModelSource(name, other, shape, weights, str(files.checkpoint or files.place), files)


def check_tokenizers(sources: Iterable[ModelSource], tokenizer: Tokenizer) -> None:
    """Refuses models that cannot read the run's tokens, or for which they mean other text."""
    from tokenizers import Tokenizer as HfTokenizer

    vocab, words = tokenizer.vocab_size, tokenizer.inner.get_vocab()
    for source in sources:
        fix = f"use the model's own: tokenizer: {{path: {source.files.place / 'tokenizer.json'}}}"
        if source.name == "teacher":
            fix += ", or map its tokens (objective: distill, distill: {top_k: 64, stored: FOLDER})"
        if source.shape.vocab < vocab:
            raise UserError(
                f"models.{source.name}: its vocabulary of {source.shape.vocab:,} tokens is smaller than the run's "
                f"{vocab:,}: {fix}"
            )
        if not (source.files.place / "tokenizer.json").is_file():
            continue
        other = HfTokenizer.from_file(str(source.files.place / "tokenizer.json")).get_vocab()
        word_of = {number: word for word, number in other.items()}
        if different := next((word for word, number in words.items() if word_of.get(number, word) != word), None):
            number = words[different]
            problem = f"its tokenizer is not the run's (token {number} is {word_of[number]!r}, here {different!r})"
            raise UserError(f"models.{source.name}: {problem}: {fix}")


def attach_trained(
    model: Decoder, sources: Iterable[ModelSource], world: World, spec: RunSpec, matrices: torch.dtype, half: bool
) -> None:
    """Adds the trained models as submodules and shards them; the model itself is to be sharded or replicated next."""
    trained = {
        source.name: _laid_out(source.shape, world, spec, matrices, half) for source in sources if source.spec.train
    }
    if trained:
        model.add_module(COMPANIONS, nn.ModuleDict(trained))


def _laid_out(shape: ModelShape, world: World, spec: RunSpec, matrices: torch.dtype, half: bool) -> Decoder:
    """A model on this rank; sharded ones are still on the meta device."""
    model = build_model(shape, "meta" if world.divided else world.device, spec.seed, matrices=matrices)
    if world.layout.tp > 1:
        assert world.mesh is not None
        from bessemer.parallel.tensor import parallelize_tensors

        parallelize_tensors(model, world.mesh["tp"], spec.parallel.sequence)
    if world.divided:
        shard_or_replicate(model, world, half, spec.parallel)
    return model


def companion(model: Decoder, source: ModelSource) -> Decoder | None:
    """The submodule of a trained model; None for a frozen one."""
    if not source.spec.train:
        return None
    other = model.get_submodule(f"{COMPANIONS}.{source.name}")
    assert isinstance(other, Decoder)
    return other


def load_trained(model: Decoder, sources: Iterable[ModelSource], seed: int) -> None:
    """The weights that trained models start with, in a new run."""
    for source in sources:
        if (other := companion(model, source)) is not None:
            source.fill(other, seed)


def load_frozen(source: ModelSource, world: World, spec: RunSpec, precision: str) -> Decoder:
    """A frozen model on this rank. On a GPU its matrices are in the precision that they are multiplied in."""
    half = world.device.type == "cuda" and precision in HALF
    model = _laid_out(source.shape, world, spec, torch.bfloat16 if half else torch.float32, half)
    if world.divided:
        model.to_empty(device=world.device)
    source.fill(model, spec.seed)
    return model.eval().requires_grad_(False)


def record_models(sources: Iterable[ModelSource], plan: Plan, previous: Plan | None) -> None:
    """Adds the models to the plan; refuses frozen ones whose weights are not those that the run began with."""
    for source in sources:
        if source.spec.train:
            count = f"{human_count(source.shape.parameters)} parameters"
            plan.add(f"models.{source.name}", f"{count}, trained", f"started from {source.place}", "asked")
            continue
        record_frozen(source, plan, previous)


def record_frozen(source: ModelSource, plan: Plan, previous: Plan | None) -> None:
    key = f"models.{source.name}"
    value = f"{human_count(source.shape.parameters)} parameters, fingerprint {source.fingerprint}"
    before = previous.decisions.get(key) if previous else None
    if before is not None and before.value != value:
        raise UserError(
            f"{key}: the weights of {source.place} are not those that the run began with ({value}, was "
            f"{before.value}): name the checkpoint that it began with ({key}.checkpoint), put the weights back, "
            "or start a run with another name"
        )
    plan.add(key, value, f"frozen, read from {source.place}", "asked")
