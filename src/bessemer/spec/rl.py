"""The rl section: rollouts, rewards, advantages and the policy-gradient loss of `objective: grpo, rloo, reinforce, ppo,
raft, online_dpo`, and the rollouts of `gkd`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from bessemer.spec.quantity import Seconds, SpecSection, check_url, section, setting
from bessemer.spec.rewards import Rewards

GKD = "gkd"  # on-policy distillation: rollouts without advantages
ONLINE_DPO = "online_dpo"
RL_OBJECTIVES = ("grpo", "rloo", "reinforce", "ppo", "raft", ONLINE_DPO, GKD)
REFERENCE, CRITIC = "reference", "critic"  # names of further models
PolicyLossName = Literal["auto", "clip", "gspo", "rloo", "reinforce", "cispo", "sapo", "vespo"]
AdvantageName = Literal["auto", "group_std", "group", "batch_std", "rloo", "global", "global_baseline", "gae"]
AggregateName = Literal["auto", "token", "sequence", "constant", "sum"]
# Of each objective: loss, advantage, aggregation.
DEFAULTS = {
    "grpo": ("clip", "group_std", "token"),
    "rloo": ("rloo", "rloo", "sequence"),
    "reinforce": ("clip", "global", "token"),
    "ppo": ("clip", "gae", "token"),
    "raft": ("reinforce", "auto", "token"),
    GKD: ("auto", "auto", "token"),
    ONLINE_DPO: ("clip", "auto", "token"),  # replaced by the loss of dpo
}
# Arrays of a round with a number for each answer token.
OLD, GENERATOR, REF, VALUES, RETURNS, ADVANTAGES = (
    "old_logps", "generator_logps", "ref_logps", "values", "returns", "advantages",
)  # fmt: skip
Unit = Annotated[float, Field(ge=0, le=1)]


class KlSpec(SpecSection):
    """The KL penalty against the reference model, which is loaded only if `beta`, `target` or `limit` is set."""

    beta: float = setting(0.0, "coefficient of the penalty; 0 trains without one", 0.05, ge=0, le=1000)
    estimator: Literal["auto", "k1", "k2", "k3"] = setting("auto", "auto: k3 in the loss, k1 in the reward", "k2")
    where: Literal["auto", "loss", "reward"] = setting(
        "auto", "auto: reward for ppo, rloo and reinforce, otherwise loss", "loss"
    )
    target: float | None = setting(
        None, "adapt beta towards this KL of an answer, in nats (Ziegler et al. 2019)", 6.0, gt=0, le=1e6
    )
    horizon: int = setting(10_000, "answers over which beta adapts", 10_000, ge=1, le=10**12)
    limit: float | None = setting(
        None, "stop the run when the KL of an answer exceeds this, in nats", 30.0, gt=0, le=1e6
    )

    @property
    def needs_reference(self) -> bool:
        return bool(self.beta) or self.target is not None or self.limit is not None


class OverlongSpec(SpecSection):
    """DAPO's soft punishment of long answers, subtracted from the reward."""

    buffer: int | None = setting(None, "the last tokens before max_tokens, over which the penalty rises", 64, ge=1)
    penalty: float = setting(1.0, "penalty of an answer of max_tokens", 1.0, ge=0, le=1e6)


class CorrectionSpec(SpecSection):
    """Corrects for the generator's log-probabilities, which differ from the trainer's in precision."""

    importance: Literal["truncated", "off"] = setting(
        "truncated", "truncated importance sampling (Yao et al. 2025) or off", "off"
    )
    cap: float = setting(2.0, "largest weight of a token", 2.0, ge=1, le=1e6)


class PpoSpec(SpecSection):
    """The critic and its advantages (`objective: ppo`)."""

    gamma: Unit = setting(1.0, "discount of later rewards", 1.0)
    lam: Unit = setting(0.95, "lambda of generalised advantage estimation", 0.95)
    value_clip: float | None = setting(0.2, "clipping range of the critic's values", 0.2, gt=0, le=1e6)
    value_weight: float = setting(0.1, "weight of the critic's loss", 0.1, ge=0, le=1e6)
    whiten: bool = setting(True, "normalise advantages to mean 0 and variance 1 over the round", True)


class RaftSpec(SpecSection):
    """Which answers are imitated (`objective: raft`)."""

    top: int = setting(1, "best answers of each prompt", 1, ge=1, le=1024)
    least: float | None = setting(None, "smallest reward of an answer that is imitated", 1.0, ge=-1e9, le=1e9)


class GeneratorSpec(SpecSection):
    """A server that samples the answers instead of the embedded generator."""

    vllm: str = setting(..., "base URL of a vLLM server, which ends in /v1", "http://localhost:8000/v1")
    model: str = setting(..., "name of the model there", "policy")
    folder: str | None = setting(
        None,
        "the folder that the server serves: each round's weights are written there and the server is told to reload",
        "served/",
    )
    key_env: str | None = setting(None, "environment variable with the key, which is written nowhere", "VLLM_API_KEY")
    parallel: int = setting(64, "requests at the same time", 64, ge=1, le=1024)
    timeout: Seconds = setting(600.0, "timeout of a request", "600s", gt=0)
    retries: int = setting(5, "retries after 429, 5xx, no answer or no connection", 5, ge=0, le=100)

    @field_validator("vllm")
    @classmethod
    def _is_url(cls, value: str) -> str:
        check_url(value, "http://localhost:8000/v1")
        if not value.startswith(("http://", "https://")):
            raise ValueError("write http://... or https://...")
        return value.rstrip("/")


class RlSpec(SpecSection):
    """Reinforcement learning from rewards. A round samples answers to `prompts` prompts and trains on them for
    `minibatches * epochs` steps."""

    prompts: int = setting(32, "prompts of a round", 32, ge=1, le=1_000_000)
    samples: int = setting(8, "answers to each prompt (gkd: 1)", 8, ge=1, le=1024)
    max_tokens: int = setting(256, "longest answer, in tokens", 256, ge=1, le=10**7)
    temperature: float = setting(1.0, "sampling temperature; the loss uses the same distribution", 1.0, gt=0, le=100)
    top_p: float = setting(1.0, "sample from the most likely tokens with this sum of probabilities", 0.95, gt=0, le=1)
    top_k: int = setting(0, "sample from this many most likely tokens; 0: all", 50, ge=0)
    minibatches: int = setting(1, "steps of one pass over a round", 4, ge=1, le=10_000)
    epochs: int = setting(1, "passes over a round", 2, ge=1, le=1000)
    rewards: Rewards = setting(
        {}, "parts of the reward by name; each is logged as reward_NAME", {"right": {"verifier": "exact"}}
    )
    loss: PolicyLossName = setting("auto", "clip, gspo, rloo, reinforce, cispo, sapo or vespo", "clip")
    advantage: AdvantageName = setting(
        "auto",
        "group_std (GRPO), group (Dr. GRPO), batch_std, rloo, global (REINFORCE++), global_baseline, gae (PPO)",
        "group",
    )
    aggregate: AggregateName = setting(
        "auto", "mean over token (DAPO), over sequence (GRPO); constant (Dr. GRPO) or sum (LUSPO)", "sequence"
    )
    clip: float | None = setting(None, "clipping range of the ratio (default: of the loss, 0.2 for clip)", 0.2, gt=0)
    clip_high: float | None = setting(None, "upper range, if it differs (DAPO: 0.28)", 0.28, gt=0)
    dual_clip: float | None = setting(None, "bound of the ratio for negative advantages", 3.0, gt=1)
    kl: KlSpec = section(KlSpec, "penalty against the reference model")
    dynamic_sampling: bool = setting(
        False, "replace groups whose rewards are all equal by further prompts, up to three times as many", True
    )
    mask_truncated: bool = setting(False, "give answers without an end no loss", True)
    overlong: OverlongSpec = section(OverlongSpec, "soft penalty on long answers")
    correction: CorrectionSpec = section(CorrectionSpec, "differences between generator and trainer")
    ppo: PpoSpec = section(PpoSpec, "with objective: ppo: the critic")
    raft: RaftSpec = section(RaftSpec, "with objective: raft: which answers are imitated")
    held_out_temperature: float = setting(
        0.0, "temperature of answers to held-out prompts; 0 takes the most likely token", 0.7, ge=0, le=100
    )
    environment: str | None = setting(
        None, "class of episodes of several turns, such as tools: file.py:Class or module:Class", "tools.py:Calculator"
    )
    turns: int = setting(8, "with environment: answers of the model in an episode, at most", 4, ge=1, le=1000)
    generator: GeneratorSpec | None = setting(
        None,
        "a vLLM server that samples the answers (default: the embedded generator)",
        {"vllm": "http://localhost:8000/v1", "model": "policy", "folder": "served/"},
    )
    ahead: Literal[0, 1] = setting(
        0, "1 samples the next round while this one trains, with the weights from before it", 1
    )
    slots: int = setting(64, "answers that are generated at the same time on each device", 64, ge=1, le=65_536)
    keep: int | None = setting(None, "newest rounds whose rollouts are kept (default: all)", 100, ge=1, le=10**9)

    @field_validator("environment")
    @classmethod
    def _names_class(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^:]+:[A-Za-z_]\w*", value):
            raise ValueError(f"{value!r} names no class: write file.py:Class or module:Class")
        return value

    @property
    def round_steps(self) -> int:
        """U, the steps of a round."""
        return self.minibatches * self.epochs

    @property
    def step_prompts(self) -> int:
        """Prompts that a step trains on."""
        return self.prompts // self.minibatches

    @property
    def step_positions(self) -> int:
        """Positions of the prompt stream by which each step advances."""
        return self.prompts // self.round_steps

    def needs_reference(self, objective: str) -> bool:
        return self.kl.needs_reference or objective == ONLINE_DPO

    def answers_of_row(self, objective: str) -> int:
        """Answers that must be in one row of a batch: both of a pair."""
        return 2 if objective == ONLINE_DPO else 1

    def kl_in_reward(self, objective: str) -> bool:
        if not self.kl.needs_reference:
            return False
        return self.kl.where == "reward" or (self.kl.where == "auto" and objective in ("ppo", "rloo", "reinforce"))

    def kl_estimator(self, objective: str) -> str:
        if self.kl.estimator != "auto":
            return self.kl.estimator
        return "k1" if self.kl_in_reward(objective) else "k3"

    def resolved(self, objective: str) -> tuple[str, str, str]:
        """Loss, advantage and aggregation, with the objective's defaults."""
        given = (self.loss, self.advantage, self.aggregate)
        usual = DEFAULTS[objective]
        loss, advantage, aggregate = (
            own if value == "auto" else value for value, own in zip(given, usual, strict=True)
        )
        return loss, advantage, aggregate

    def scored_arrays(self, objective: str) -> tuple[str, ...]:
        """What a round needs besides the generator's own numbers, by passes without gradients."""
        if objective == GKD:
            return ()
        controlled = self.kl_in_reward(objective) or self.kl.target is not None or self.kl.limit is not None
        old = self.round_steps > 1 and objective != ONLINE_DPO
        names = [OLD] if old or controlled or objective == "ppo" else []
        names += [REF] if self.needs_reference(objective) else []
        return (*names, VALUES) if objective == "ppo" else tuple(names)

    def arrays(self, objective: str) -> tuple[str, ...]:
        """The arrays of a round that batches carry."""
        if objective == GKD:
            return ()
        returns = (RETURNS,) if objective == "ppo" else ()
        return (GENERATOR, *self.scored_arrays(objective), ADVANTAGES, *returns)
