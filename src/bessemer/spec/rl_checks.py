"""Checks of settings that cannot work with `objective: grpo, rloo, reinforce, ppo, raft, online_dpo, gkd`."""

from __future__ import annotations

from collections.abc import Iterator

from bessemer.errors import UserError
from bessemer.spec.data import CurriculumSpec, NoiseSpec
from bessemer.spec.document import KeyPath
from bessemer.spec.model import BASE, ObjectiveSpec, OtherModelSpec
from bessemer.spec.rl import CRITIC, GKD, ONLINE_DPO, REFERENCE, RL_OBJECTIVES, RlSpec
from bessemer.spec.schema import OBJECTIVES, RunSpec

Problem = tuple[KeyPath, str]
# The keys of `rl` that on-policy distillation has a use for; rewards are logged.
OF_ROLLOUTS = (
    "prompts", "samples", "max_tokens", "temperature", "top_p", "top_k", "minibatches", "epochs", "rewards",
    "mask_truncated", "held_out_temperature", "slots", "keep",
)  # fmt: skip


def check_prompt_columns(spec: RunSpec) -> Iterator[Problem]:
    """A prompt alone is a row of RL only."""
    for name, source in spec.data.sources.items():
        columns = source.columns or {}
        if spec.objective in OBJECTIVES and spec.objective not in RL_OBJECTIVES and source.has_only_prompt:
            yield (
                ("data", "sources", name, "columns"),
                "a prompt needs completion, both chosen and rejected, or answers",
            )
        known = ("prompt", "completion") if spec.objective == GKD else ("prompt",)
        if spec.objective in RL_OBJECTIVES and (others := [role for role in columns if role not in known]):
            problem = f"{others[0]} has no use: every column of a row is passed to the rewards by its name"
            yield ("data", "sources", name, "columns"), f"{problem}; name only the prompt's"


def with_companions(spec: RunSpec) -> RunSpec:
    """The spec with the reference and the critic that its objective needs: both start from the run's model."""
    if spec.objective not in RL_OBJECTIVES:
        return spec
    models, path = dict(spec.models), spec.model.hf or spec.start_from
    fix = "write model: {hf: FOLDER} or start_from"
    if spec.rl.needs_reference(spec.objective) and REFERENCE not in models:
        key = "objective: online_dpo: the loss" if spec.objective == ONLINE_DPO else "rl.kl: a penalty"
        if path is None:
            raise UserError(f"{key} compares with the model that training starts from: {fix}")
        models[REFERENCE] = OtherModelSpec(path=BASE if spec.adapter else path)
    if spec.objective == "ppo" and CRITIC not in models:
        if path is None:
            raise UserError(f"objective: ppo: the critic starts from the model that training starts from: {fix}")
        models[CRITIC] = OtherModelSpec(path=path, train=True, head="score")
    return spec.model_copy(update={"models": models})


def check_rl(spec: RunSpec) -> Iterator[Problem]:
    rl = spec.rl
    if spec.objective not in RL_OBJECTIVES:
        if rl != RlSpec():
            yield ("rl",), f"has no effect with objective: {spec.objective}: write objective: grpo, or remove it"
        return
    yield from _check_gkd(spec) if spec.objective == GKD else _check_rewards(spec)
    if rl.prompts % rl.round_steps:
        divide = f"minibatches x epochs = {rl.round_steps}"
        yield ("rl", "prompts"), f"{rl.prompts} prompts are not a multiple of {divide}: change one of them"
    context = spec.data.context
    if context != "auto" and context <= rl.max_tokens:
        yield ("data", "context"), f"{context} tokens hold no prompt beside rl.max_tokens ({rl.max_tokens}): raise it"
    yield from _check_rest(spec)


def _check_gkd(spec: RunSpec) -> Iterator[Problem]:
    """On-policy distillation: rollouts that are compared with a teacher, and not rewarded."""
    rl = spec.rl
    for key in rl.model_dump(exclude_defaults=True):
        if key not in OF_ROLLOUTS:
            yield ("rl", key), "has no effect with objective: gkd, which compares answers with a teacher: remove it"
    if spec.distill.on_policy == 1:
        return
    if rl.samples > 1:
        yield ("rl", "samples"), "the data has one answer to a prompt: write samples: 1, or distill: {on_policy: 100%}"
    for name, source in spec.data.sources.items():
        if "completion" not in (source.columns or {}):
            fix = "columns: {prompt: question, completion: answer}"
            problem = f"distill.on_policy below 100% needs answers: name their column, such as {fix}"
            yield ("data", "sources", name), problem


def _check_rewards(spec: RunSpec) -> Iterator[Problem]:
    """Rewards, advantages and losses of reinforcement learning."""
    rl = spec.rl
    if not rl.rewards and rl.environment is None:
        yield (
            ("rl", "rewards"),
            "no reward: write for example rewards: {right: {verifier: exact}}, or {own: rewards.py:f}",
        )
    loss, advantage, _ = rl.resolved(spec.objective)
    if (advantage == "gae") != (spec.objective == "ppo"):
        yield ("rl", "advantage"), "gae needs the critic of objective: ppo, which has no other advantage: remove this"
    grouped = advantage in ("group_std", "group", "rloo", "global_baseline")
    if rl.ahead and rl.dynamic_sampling:
        yield ("rl", "ahead"), "dynamic_sampling draws further prompts with the present weights: write ahead: 0"
    if rl.generator is not None and rl.generator.folder is None:
        yield (
            ("rl", "generator", "folder"),
            "the server would keep the weights that it began with: name the folder that it serves",
        )
    if rl.generator is not None and spec.adapter is not None:
        yield ("rl", "generator"), "it is given complete weights, and this run trains an adapter: remove one of them"
    if rl.generator is not None and spec.parallel.tp > 1:
        yield ("rl", "generator"), "its weights are written by ranks that hold whole layers: write parallel: {tp: 1}"
    if rl.samples < 2 and (grouped or rl.dynamic_sampling):
        key = "advantage" if grouped else "dynamic_sampling"
        yield ("rl", "samples"), f"{key} compares the answers to a prompt: write 2 or more"
    if rl.kl.target is not None and not rl.kl_in_reward(spec.objective):
        yield ("rl", "kl", "target"), "an adaptive coefficient is that of a penalty in the reward: write where: reward"
    if rl.overlong.buffer is not None and rl.overlong.buffer >= rl.max_tokens:
        yield ("rl", "overlong", "buffer"), f"{rl.overlong.buffer} is not less than max_tokens ({rl.max_tokens})"
    if spec.objective == "raft" and rl.raft.top > rl.samples:
        yield ("rl", "raft", "top"), f"{rl.raft.top} exceeds the {rl.samples} answers to a prompt: lower it"
    if loss == "reinforce" and rl.round_steps > 1 and spec.objective != "raft":
        yield ("rl", "loss"), "reinforce is right for one step only: write loss: clip, or minibatches: 1 and epochs: 1"
    if spec.objective == ONLINE_DPO:
        yield from _check_online_dpo(spec)


def _check_online_dpo(spec: RunSpec) -> Iterator[Problem]:
    """Settings of a policy gradient have no effect on the loss of pairs."""
    rl, plain = spec.rl, RlSpec()
    if rl.samples < 2:
        yield ("rl", "samples"), "a pair is the best and the worst of the answers to a prompt: write 2 or more"
    for key in ("loss", "advantage", "aggregate", "clip", "clip_high", "dual_clip", "correction", "ppo", "raft"):
        if getattr(rl, key) != getattr(plain, key):
            yield ("rl", key), "has no effect with objective: online_dpo, whose loss is dpo.loss: remove it"
    if rl.kl.beta or rl.kl.target is not None:
        yield (("rl", "kl"), "the loss of pairs holds the model to the reference: write dpo: {beta: 0.1}")
    if spec.dpo.sft_weight:
        yield (("dpo", "sft" if spec.dpo.sft else "loss"), "online_dpo adds no cross-entropy: remove it")
    for key in ("share_prefix", "reference"):
        if getattr(spec.dpo, key) != "auto":
            yield ("dpo", key), "is for pairs from files: remove it"


def _check_rest(spec: RunSpec) -> Iterator[Problem]:
    """Settings of other objectives and layouts."""
    parallel, data, budget = spec.parallel, spec.data, spec.budget
    for key in ("cp", "pp"):
        if getattr(parallel, key) > 1:
            yield ("parallel", key), "answers are generated by ranks that hold all layers and columns: write 1"
    if parallel.engine == "deepspeed":
        yield ("parallel", "engine"), "DeepSpeed's engine cannot generate: write engine: torch"
    if budget.batch != "auto":
        yield ("budget", "batch"), "follows from rl.prompts, rl.samples and rl.minibatches: remove it"
    if budget.batch_changes:
        yield ("budget", "batch_changes"), "follows from rl.prompts: remove it"
    for key, is_set in (
        ("phases", data.phases), ("clean", data.clean), ("store", data.store), ("noise", data.noise != NoiseSpec()),
        ("curriculum", data.curriculum != CurriculumSpec()), ("mix", data.mix == "auto"), ("exclude", data.exclude),
    ):  # fmt: skip
        if is_set:
            yield ("data", key), "is for token data, and RL reads prompts: remove it"
    for name, source in data.sources.items():
        if source.max_epochs is not None or source.clean:
            key = "clean" if source.clean else "max_epochs"
            yield ("data", "sources", name, key), "is for token data, and RL reads prompts: remove it"
    if any(task != ObjectiveSpec() for task in spec.tasks):
        yield ("tasks",), "are those of pre-training: remove them, or write objective: pretrain"
    if any(spec.loss.model_dump().values()):
        yield ("loss",), "is that of pre-training: remove it"
    if spec.model.causal is False:
        yield ("model",), "answers need a model that predicts the next token: a causal decoder"
    for name, other in spec.models.items():
        if (name, spec.objective) == ("teacher", GKD):
            continue
        if name not in (REFERENCE, CRITIC) or (name == "critic" and spec.objective != "ppo"):
            yield ("models", name), f"objective: {spec.objective} uses no model of this name: remove it"
        elif name == "reference" and (other.train or other.head == "score"):
            yield ("models", name), "the reference is a frozen language model: remove train and head"
        elif name == "critic" and not (other.train and other.head == "score"):
            yield ("models", name), "the critic is trained and gives a number: write train: true and head: score"
