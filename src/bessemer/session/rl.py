"""What `objective: grpo, rloo, reinforce, ppo, raft, online_dpo, gkd` adds to a start: prompts, further models,
rewards, rollouts and the evaluation on held-out prompts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bessemer.align.gkd import AnswerEncoder, GkdHeldOut, GkdMaker
from bessemer.align.held_out import HeldOutRollouts
from bessemer.align.prompts import (
    Prompt,
    PromptData,
    PromptRows,
    hold_out,
    prompt_column,
    prompts_of_dataset,
    read_prompts,
)
from bessemer.align.rewards.reward import make_rewards
from bessemer.align.rollout_maker import RolloutMaker
from bessemer.align.rollout_stream import CurrentRounds, RolloutStream
from bessemer.align.rollouts import FOLDER, RoundStore
from bessemer.align.sampler import Sampler
from bessemer.align.vllm import VllmGenerator
from bessemer.data.prepare import chat_template, load_tokenizer
from bessemer.data.stream.order import BatchPhase, MixturePhase, Segment, StepPositions, StreamOrder
from bessemer.data.stream.rows import Rows
from bessemer.data.tokenizer.tokenizer import hf_prompt_format, native_prompt_format
from bessemer.errors import UserError
from bessemer.model.families.folder import HfFolder
from bessemer.parallel.world import World
from bessemer.plan.decide import TrainPlan
from bessemer.plan.mixtures import sources_used
from bessemer.spec.load import load_spec
from bessemer.spec.rl import GKD, RL_OBJECTIVES
from bessemer.spec.rl_checks import with_companions
from bessemer.spec.schema import RunSpec
from bessemer.train.evaluate import HeldOutSet
from bessemer.train.trained import TextReader, folder_template_file

PYTHON_SOURCE = "python"
TRUE_GOALS = ("exact", "math", "code")
NO_TEMPLATE = "none"  # texts are read as they are


def with_rl_defaults(spec: RunSpec) -> RunSpec:
    """The spec with the tokenizer and the chat template of the model that training starts from, and the further models
    that the objective needs, where it is silent."""
    if spec.objective not in RL_OBJECTIVES:
        return spec
    tokenizer: dict[str, Any] = {}
    folder = _started_from(spec)
    if spec.tokenizer.path is None and folder is not None:
        tokenizer["path"] = str(folder / "tokenizer.json")
    if "chat" not in spec.tokenizer.model_fields_set:
        tokenizer["chat"] = _template(spec, folder)
    return with_companions(spec.model_copy(update={"tokenizer": spec.tokenizer.model_copy(update=tokenizer)}))


def _started_from(spec: RunSpec) -> Path | None:
    """The folder with the tokenizer of the checkpoint that the run starts from."""
    if spec.start_from is None:
        return None
    path = Path(os.path.expanduser(spec.start_from))
    return next((folder for folder in (path, *path.parents[:2]) if (folder / "tokenizer.json").is_file()), None)


def _template(spec: RunSpec, folder: Path | None) -> str:
    if spec.model.hf is not None:
        return str(folder_template_file(HfFolder(spec.model.hf).path) or NO_TEMPLATE)
    if folder is not None and (folder / "spec.yaml").is_file():
        base = load_spec(folder / "spec.yaml")
        if any(source.is_chat for source in base.data.sources.values()) or base.objective in RL_OBJECTIVES:
            return base.tokenizer.chat
    return NO_TEMPLATE


def open_prompts(spec: RunSpec, folder: Path, datasets: Mapping[str, Any]) -> PromptData:
    """The prompts of the spec's sources, or of the caller's datasets, divided into training and held-out ones."""
    tokenizer = load_tokenizer(spec.data, spec.tokenizer)
    if tokenizer is None:
        raise UserError(
            "tokenizer.path: RL needs the tokenizer of its model: write model: {hf: FOLDER}, start_from or path"
        )
    form = (
        hf_prompt_format(HfFolder(spec.model.hf).path, tokenizer, True)
        if spec.model.hf
        else native_prompt_format(tokenizer)
    )
    template = None if spec.tokenizer.chat == NO_TEMPLATE else chat_template(spec.tokenizer)
    train: dict[str, list[Prompt]] = {}
    validation: dict[str, list[Prompt]] = {}
    for name, source in spec.data.sources.items():
        if source.path == [PYTHON_SOURCE]:
            if name not in datasets:
                raise UserError(
                    f"data.sources.{name}: its path is python: call bessemer.train_run(spec, "
                    f"datasets={{{name!r}: ...}})"
                )
            prompts = list(prompts_of_dataset(name, datasets[name], prompt_column(source)))
        else:
            prompts = list(read_prompts(name, source, spec.data.bad_rows))
        if not prompts:
            raise UserError(f"data.sources.{name}: has no prompts: correct its path")
        train[name], held_out = hold_out(prompts, spec.data.validation, spec.seed)
        if held_out:
            validation[name] = held_out
    return PromptData(tokenizer, train, validation, folder, TextReader(tokenizer, form, template))


def prompt_rows(spec: RunSpec, data: PromptData, context: int) -> dict[str, Rows]:
    answers = spec.rl.answers_of_row(spec.objective)
    return {name: data.rows(data.train[name], context, spec.rl.max_tokens, answers) for name in sources_used(spec)}


def held_out_prompts(spec: RunSpec, data: PromptData, context: int) -> dict[str, HeldOutSet]:
    """The held-out prompts; one counts as a row of the context."""
    rows = {name: data.rows(prompts, context, spec.rl.max_tokens) for name, prompts in data.validation.items()}
    return {name: HeldOutSet(prompts, prompts.count * context, 1.0) for name, prompts in rows.items()}


def rollout_stream(
    spec: RunSpec, vocab: int, rows: Mapping[str, Rows], plan: TrainPlan, segments: list[Segment], folder: Path
) -> RolloutStream:
    """The run's batches: a step advances by its prompts."""
    steps = StepPositions([BatchPhase(0, spec.rl.step_positions)], segments)
    prompts = {name: prompts for name, prompts in rows.items() if isinstance(prompts, PromptRows)}
    lengths = {name: source.count for name, source in prompts.items()}
    order = StreamOrder([MixturePhase(start, mixture) for start, mixture in plan.mixtures], lengths, spec.seed)
    rounds = CurrentRounds(RoundStore(folder / FOLDER, spec.rl.keep and spec.rl.keep + spec.rl.ahead))
    arrays, answers = spec.rl.arrays(spec.objective), spec.rl.answers_of_row(spec.objective)
    return RolloutStream(prompts, order, plan.context, steps, spec.rl, arrays, rounds, vocab, {}, answers)


def judge_names(spec: RunSpec) -> list[str]:
    """Metrics of rewards that measure the true goal: verifiers of answers, and rewards that nothing is trained on."""
    rewards = spec.rl.rewards.items()
    return [f"reward_{name}" for name, reward in rewards if reward.weight == 0 or reward.verifier in TRUE_GOALS]


def check_reward_columns(spec: RunSpec, data: PromptData) -> None:
    """Every prompt has the columns that verifiers and judges read: a missing one is told before anything is sampled."""
    columns = {f"rl.rewards.{name}.{key}": column for name, reward in spec.rl.rewards.items()
               for key, column in reward.columns_read()}  # fmt: skip
    for side in (data.train, data.validation):
        for prompt in (prompt for prompts in side.values() for prompt in prompts):
            for key, column in columns.items():
                if column not in prompt.columns:
                    names = ", ".join(prompt.columns) or "no columns"
                    fix = f"it has {names}; name one that every row has"
                    raise UserError(f"{key}: {prompt.place} has no column {column!r} ({fix})")


def attach_rollouts(
    spec: RunSpec, data: PromptData, stream: RolloutStream, held_out: Mapping[str, HeldOutSet], plan: TrainPlan,
    device: torch.device, world: World, folder: Path,
) -> tuple[RolloutMaker, HeldOutRollouts]:  # fmt: skip
    """What makes the rounds of a run, and its evaluation. Reads files and functions of the rewards."""
    check_reward_columns(spec, data)
    rewards = make_rewards(spec.rl.rewards, device.type)
    parts = data.reader, spec.rl, rewards, plan.context, spec.seed
    sampler = Sampler(*parts)  # held-out prompts are answered with the weights of their step, so not remotely
    rounds = Sampler(*parts, VllmGenerator(spec.rl.generator)) if spec.rl.generator else sampler
    distills = spec.objective == GKD
    maker = (GkdMaker if distills else RolloutMaker)(spec.objective, spec.rl, rounds, stream.sources, stream.rounds)
    if isinstance(maker, GkdMaker):
        maker.spec = spec.distill
        if spec.distill.on_policy < 1:
            columns = {name: (source.columns or {})["completion"] for name, source in spec.data.sources.items()}
            maker.answers = AnswerEncoder(data.reader, plan.context, columns).encode(stream.sources)
    prompts = {name: held.rows for name, held in held_out.items() if isinstance(held.rows, PromptRows)}
    verified = tuple(name for name, reward in spec.rl.rewards.items() if reward.verifier and reward.tests == "all")
    evaluator = (GkdHeldOut if distills else HeldOutRollouts)(
        prompts, plan.evaluate_tokens // plan.context, sampler, stream, verified, plan.micro_rows, plan.precision,
        device, world, folder,
    )  # fmt: skip
    return maker, evaluator
