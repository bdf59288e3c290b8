"""Checks of combinations of settings that belong to an objective, its models and adapters. See checks.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bessemer.spec.adapter import VIRTUAL
from bessemer.spec.data import NoiseSpec, SourceSpec
from bessemer.spec.distill import DistillSpec
from bessemer.spec.document import KeyPath
from bessemer.spec.model import BASE, ObjectiveSpec
from bessemer.spec.preference import PREFERENCES, DpoSpec, KtoSpec
from bessemer.spec.reward_model import RewardModelSpec
from bessemer.spec.rl import GKD, ONLINE_DPO, RL_OBJECTIVES
from bessemer.spec.rl_checks import check_prompt_columns, check_rl
from bessemer.spec.schema import OBJECTIVES, RunSpec

Problem = tuple[KeyPath, str]


def check_classify(spec: RunSpec) -> Iterator[Problem]:
    if spec.objective != "classify":
        if spec.classify is not None:
            yield (
                ("classify",),
                f"has no effect with objective: {spec.objective}: write objective: classify, or remove it",
            )
        return
    if spec.classify is None:
        yield ("classify",), "missing: write for example classify: {labels: [negative, positive]}"
        return
    if spec.model.wrap:
        yield ("model", "wrap"), "a wrapped model has no head of labels: remove wrap"
    roles = ("words", "label") if spec.classify.kind == "token" else ("label",)
    for name, source in spec.data.sources.items():
        path: KeyPath = ("data", "sources", name, "columns")
        if source.path != ["python"] and (missing := [role for role in roles if role not in (source.columns or {})]):
            yield (
                path,
                f"does not name the column of {missing[0]}: write for example columns: {{text: text, label: label}}",
            )
    if spec.data.packing == "concat" and "packing" in spec.data.model_fields_set:
        yield ("data", "packing"), "concat cuts documents, whose labels are of the whole: write pad or best_fit"
    if spec.data.padding.long == "split" and "long" in spec.data.padding.model_fields_set:
        yield ("data", "padding", "long"), "split cuts documents, whose labels are of the whole: write truncate"
    if spec.data.cross_documents:
        yield ("data", "cross_documents"), "a label is of its own document: remove this"
    if any(task != ObjectiveSpec() for task in spec.tasks):
        yield ("tasks",), "are those of pre-training: remove them, or write objective: pretrain"
    if any(spec.loss.model_dump().values()):
        yield ("loss",), "is that of pre-training: remove it"


def check_sft(spec: RunSpec) -> Iterator[Problem]:
    if spec.objective != "sft":
        if spec.sft is not None:
            yield ("sft",), f"has no effect with objective: {spec.objective}: write objective: sft, or remove it"
        return
    if any(task != ObjectiveSpec() for task in spec.tasks):
        yield ("tasks",), "are those of pre-training: remove them, or write objective: pretrain"
    if spec.model.causal is False:
        yield ("model",), "sft predicts the next token: it needs a causal decoder"
    degrees = [name for name in ("tp", "cp", "pp") if getattr(spec.parallel, name) > 1]
    if spec.sft and spec.sft.neftune and (degrees or spec.model.wrap):
        other = f"parallel.{degrees[0]}" if degrees else "model.wrap"
        yield (("sft", "neftune"), f"the noise needs complete embeddings, which {other} does not have: remove one")


def check_distill(spec: RunSpec) -> Iterator[Problem]:
    if spec.objective not in ("distill", GKD):
        if spec.distill != DistillSpec():
            problem = f"has no effect with objective: {spec.objective}"
            yield ("distill",), f"{problem}: write objective: distill, or remove it"
        return
    if spec.distill.loss != "js" and spec.distill.beta != 0.5:
        yield ("distill", "beta"), f"is of loss: js, not of {spec.distill.loss}: write loss: js, or remove it"
    if spec.objective == "distill" and spec.distill.on_policy != 1:
        yield ("distill", "on_policy"), "the student answers prompts with objective: gkd: write it, or remove this"
    if spec.objective == GKD and spec.distill.stored:
        yield ("distill", "stored"), "the teacher reads answers that are new in each round: remove it"
    if "teacher" not in spec.models:
        yield ("models",), "distillation needs a teacher: write models: {teacher: runs/large}"
    elif spec.models["teacher"].train:
        yield ("models", "teacher", "train"), "a teacher is frozen: remove train"
    if spec.parallel.tp > 1:
        yield ("parallel", "tp"), "distillation compares whole rows of logits: write tp: 1"
    if spec.distill.stored and spec.distill.top_k is None:
        yield ("distill", "top_k"), "all log-probabilities are too many to store: write for example top_k: 64"
    if spec.distill.stored and any(spec.data.noise.model_dump(exclude_defaults=True).values()):
        yield ("data", "noise"), "the stored teacher read the text without noise: remove it, or distill.stored"
    if any(task != ObjectiveSpec() for task in spec.tasks):
        yield ("tasks",), "are those of pre-training: remove them, or write objective: pretrain"


def check_preferences(spec: RunSpec) -> Iterator[Problem]:
    for name, section, default in (("dpo", spec.dpo, DpoSpec()), ("kto", spec.kto, KtoSpec())):
        reads = (name, ONLINE_DPO) if name == "dpo" else (name,)
        if spec.objective not in reads and section != default:
            yield (name,), f"has no effect with objective: {spec.objective}: write objective: {name}, or remove it"
    if spec.objective not in PREFERENCES:
        return
    yield from _check_answers(spec)
    reference = spec.models.get("reference")
    if reference and (reference.train or reference.head == "score"):
        yield ("models", "reference"), "the reference is a frozen language model: remove train and head"
    if spec.objective == "kto" and spec.parallel.pp > 1:
        yield ("parallel", "pp"), "pipeline stages have no place for the reference: write pp: 1"
    if spec.objective == "kto" and spec.data.packing == "best_fit":
        yield ("data", "packing"), "kto has one answer in a row: remove packing"
    if spec.dpo.reference == "stored" and spec.dpo.needs_reference and spec.data.noise != NoiseSpec():
        yield ("dpo", "reference"), "noise changes the answers at every step: write live, or remove data.noise"
    if spec.dpo.share_prefix is True and spec.data.noise != NoiseSpec():
        yield ("dpo", "share_prefix"), "noise would differ between prompts: remove it, or data.noise"


def check_reward(spec: RunSpec) -> Iterator[Problem]:
    if spec.objective != "reward":
        if spec.reward != RewardModelSpec():
            yield ("reward",), f"has no effect with objective: {spec.objective}: write objective: reward, or remove it"
        return
    yield from _check_answers(spec)
    if spec.data.packing == "best_fit":
        yield ("data", "packing"), "reward has one pair in a row: remove packing"
    if spec.model.wrap:
        yield ("model", "wrap"), "a wrapped model has no head of scores: remove wrap"
    if spec.model.causal is False:
        yield ("model",), "the score is that of the last token, which has read all others: it needs a causal decoder"


def _check_answers(spec: RunSpec) -> Iterator[Problem]:
    """What all objectives of rows with answers need."""
    for name, source in spec.data.sources.items():
        if source.names_content and (problem := lacking_columns(spec.objective, source)):
            yield ("data", "sources", name), problem
    if spec.parallel.cp > 1:
        yield ("parallel", "cp"), "answers are summed over complete rows: write cp: 1"
    if any(task != ObjectiveSpec() for task in spec.tasks):
        yield ("tasks",), "are those of pre-training: remove them, or write objective: pretrain"


def lacking_columns(objective: str, source: SourceSpec) -> str:
    """What a source of dpo, kto or reward lacks; empty if nothing."""
    columns = source.columns or {}
    if "chosen" in columns or "answers" in columns:
        return ""
    if objective != "kto":
        fix = "columns: {prompt: question, chosen: good, rejected: bad}"
        return f"{objective} compares two answers: name their columns, such as {fix}"
    if "turns" in columns or ("label" in columns and ("completion" in columns or "output" in columns)):
        return ""
    fix = "columns: {prompt: question, completion: answer, label: thumbs_up}"
    return f"kto learns from answers with a label, or from pairs: name their columns, such as {fix}"


def check_models(spec: RunSpec) -> Iterator[Problem]:
    for name, other in spec.models.items():
        if other.path == BASE and spec.adapter is None:
            yield ("models", name, "path"), "base is the run's model without its adapter: add adapter, or write a path"
        if other.path == BASE and (other.train or other.head == "score"):
            yield ("models", name, "path"), "base shares the frozen weights of the run's model: remove train and head"
        if spec.objective in OBJECTIVES and spec.objective not in ("distill", "dpo", "kto", *RL_OBJECTIVES):
            yield ("models", name), f"objective: {spec.objective} uses no other model: remove it"
        if spec.parallel.pp > 1:
            yield ("models", name), "pipeline stages have no place for another model: write parallel: {pp: 1}"
        if other.train and spec.parallel.engine == "deepspeed":
            yield ("models", name, "train"), "DeepSpeed trains one model: remove train, or write engine: torch"


def check_adapter(spec: RunSpec) -> Iterator[Problem]:
    parallel = spec.parallel
    if spec.adapter is None:
        return
    if spec.model.hf is None and spec.start_from is None:
        yield ("adapter",), "needs trained weights to adapt: write model: {hf: FOLDER}, or start_from"
    if spec.model.wrap:
        native = {"kind": spec.adapter.kind in ("ia3", *VIRTUAL), "base": spec.adapter.base == "nf4",
                  "modules_to_save": bool(spec.adapter.modules_to_save)}  # fmt: skip
        for key in (key for key, is_set in native.items() if is_set):
            yield ("adapter", key), "is for native models, and this one is run by transformers: remove it"
    for key, value in (("tp", parallel.tp), ("pp", parallel.pp), ("ep", parallel.ep)):
        if value > 1:
            yield ("parallel", key), "adapters are trained with dp_replicate, dp_shard and cp: write 1"
    if parallel.engine == "deepspeed":
        yield ("parallel", "engine"), "adapters are trained by torch's engine: write engine: torch"
    if spec.adapter.kind in VIRTUAL and parallel.cp > 1:
        yield ("parallel", "cp"), f"the virtual tokens of {spec.adapter.kind} have no column: write 1"
    if spec.adapter.kind == "prompt" and spec.objective == "dpo" and spec.dpo.share_prefix is not False:
        yield ("dpo", "share_prefix"), "rows of a prompt's virtual tokens have no further branches: write false"
    if spec.precision.startswith("fp8"):
        yield ("precision",), f"{spec.precision} converts the layers that are adapted: write bf16"
    if spec.adapter.base == "nf4":
        if parallel.cp > 1:
            yield (
                ("parallel", "cp"),
                "weights in NF4 are divided by dp_shard only: write 1, and dp_shard or dp_replicate",
            )
        if parallel.shard.alone:
            yield ("parallel", "shard", "alone"), "weights in NF4 are divided among several processes: write false"


OBJECTIVE_CHECKS: tuple[tuple[Callable[[RunSpec], Iterator[Problem]], tuple[str, ...]], ...] = (
    (check_distill, ("objective", "distill", "models", "parallel", "tasks", "data")),
    (check_preferences, ("objective", "dpo", "kto", "data", "models", "parallel", "tasks")),
    (check_rl, ("objective", "rl", "dpo", "data", "models", "parallel", "tasks", "budget", "loss", "model")),
    (check_prompt_columns, ("objective", "data")),
    (check_reward, ("objective", "reward", "data", "model", "parallel", "tasks")),
    (check_models, ("models", "objective", "parallel", "adapter")),
    (check_sft, ("objective", "sft", "model", "tasks", "parallel")),
    (check_adapter, ("adapter", "model", "start_from", "parallel", "precision")),
    (check_classify, ("objective", "classify", "model", "data", "tasks", "loss")),
)
