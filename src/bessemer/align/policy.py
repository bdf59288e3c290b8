"""The objective of reinforcement learning: a policy-gradient loss on the tokens of stored rollouts.

Weights of tokens and the step's count come from `align/policy_losses.aggregation`, so the loss is the same at any
accumulation, packing and number of ranks. Log-probabilities are of the distribution that the answers were sampled from,
at the rollouts' temperature, and never need all logits in memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bessemer.align.policy_losses import (
    POLICY_LOSSES,
    Clip,
    KlPenalty,
    PolicyTokens,
    aggregation,
    k3,
    policy_loss,
    truncated_importance,
    value_loss,
)
from bessemer.align.rollout_stream import LENGTHS, SAMPLES
from bessemer.data.stream.batches import Batch
from bessemer.errors import UserError
from bessemer.guard.judge import JudgedNumber
from bessemer.model.transformer import Decoder
from bessemer.spec.model import LossSpec
from bessemer.spec.rl import ADVANTAGES, CRITIC, GENERATOR, OLD, REF, REFERENCE, RETURNS, VALUES, RlSpec
from bessemer.train.objective import ElementLosses, Metric, ModelInputs, Objective, loss_options
from bessemer.train.objectives import ObjectiveBatch

# The number that is judged is the mean of -log p of the sampled tokens: the loss is near zero and of either sign. A
# broken model raises it by 2 nats. Gradient norms below ten times the clipping limit are not compared, since they
# depend on how many groups have unequal rewards.
BROKEN_NATS, LEAST_NORM = 2.0, 10.0


class PolicyGradient(Objective):
    """`objective` is grpo, rloo, reinforce, ppo or raft. `clip_norm` is the limit of the gradient norm."""

    counts_inputs = True

    def __init__(self, objective: str, rl: RlSpec, clip_norm: float = 1.0, dropout_seed: int | None = None) -> None:
        super().__init__(dropout_seed=dropout_seed)
        self.objective, self.rl = objective, rl
        self.loss_name, _, self.aggregate = rl.resolved(objective)
        usual = POLICY_LOSSES[self.loss_name].clip
        low = usual.low if rl.clip is None else rl.clip
        high = usual.high if rl.clip is None else rl.clip
        self.clip = Clip(low, high if rl.clip_high is None else rl.clip_high, rl.dual_clip)
        self.penalty = None
        if rl.kl.beta and not rl.kl_in_reward(objective):
            self.penalty = KlPenalty(rl.kl.beta, rl.kl_estimator(objective))
        self.corrects = rl.correction.importance == "truncated" and objective != "raft"
        self.metrics = ("entropy", "ratio_high", "ratio_low", "importance", "mismatch")
        if rl.needs_reference(objective):
            self.metrics, self.needs_models = (*self.metrics, "kl"), (REFERENCE,)
        if objective == "ppo":
            self.metrics, self.needs_models = (*self.metrics, "value_loss"), (*self.needs_models, CRITIC)
        self.judged = JudgedNumber(
            "entropy", row=BROKEN_NATS, level=1.0, least_norm=LEAST_NORM * clip_norm, examine=False
        )
        self.scored = rl.scored_arrays(objective)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The numbers of each answer token that batches carry."""
        return self.rl.arrays(self.objective)

    def inputs(self, batch: Batch) -> ObjectiveBatch:
        lengths_BT = torch.from_numpy(batch.fields[LENGTHS] * (batch.weights > 0))
        weights_BT, _ = aggregation(self.aggregate, lengths_BT, self.rl.max_tokens)  # type: ignore[arg-type]
        return ObjectiveBatch(
            batch.tokens, batch.targets, weights_BT.float().numpy(), batch.documents, batch.tokens, in_place=True,
            read=(batch.tokens != 0) | (batch.targets != 0) | (batch.weights > 0),
        )  # fmt: skip

    def columns_read(self, made: Batch | ObjectiveBatch) -> npt.NDArray[np.bool_] | None:
        answered: npt.NDArray[np.bool_] = made.weights > 0
        return answered

    def logps(self, model: Decoder, hidden_BTW: Tensor, inputs: ModelInputs) -> Tensor:
        """Log-probabilities of the answers' tokens at the rollouts' temperature."""
        options, heat = loss_options(model.shape, LossSpec()), self.rl.temperature
        if heat != 1.0:
            if options.logit_cap is not None or model.head_bias is not None:
                raise UserError(
                    "rl.temperature: a model with capped logits or a bias of its head is trained at 1: write 1"
                )
            options = replace(options, logit_scale=options.logit_scale / heat)
        return -self.token_losses(model, hidden_BTW, inputs, options)

    def values(self, inputs: ModelInputs) -> Tensor:
        """The critic's value before each target."""
        critic = self.models[CRITIC]
        return self.logits(critic, self.other_hidden(CRITIC, inputs))[..., 0].float()

    @torch.no_grad()
    def score(self, model: Decoder, inputs: ModelInputs) -> dict[str, Tensor]:
        """What the round stores besides the answers, (B, T) each."""
        values: dict[str, Tensor] = {}
        hidden_BTW = model(inputs.tokens_BT, inputs.attention_mask, **inputs.more) if self.scored else None
        if OLD in self.scored and hidden_BTW is not None:
            values[OLD] = self.logps(model, hidden_BTW, inputs)
        if REF in self.scored:
            hidden_BTU = self.other_hidden(REFERENCE, inputs)
            values[REF] = self.logps(self.models[REFERENCE], hidden_BTU, inputs)
        if VALUES in self.scored:
            values[VALUES] = self.values(inputs)
        return values

    def element_losses(self, model: Decoder, inputs: ModelInputs, hidden_BTW: Tensor) -> ElementLosses:
        fields, mask_BT = inputs.fields, (inputs.weights_BT > 0).float()
        logps_BT = self.logps(model, hidden_BTW, inputs)
        tokens = self.policy_tokens(logps_BT, inputs, mask_BT)
        losses_BT, ratio_BT = policy_loss(self.loss_name, tokens, self.clip, self.penalty)
        _, scale_BT = aggregation(self.aggregate, fields[LENGTHS], self.rl.max_tokens)  # type: ignore[arg-type]
        values = self._numbers(tokens, ratio_BT, fields[GENERATOR])
        if self.objective == "ppo":
            ppo = self.rl.ppo
            error_BT = value_loss(self.values(inputs), fields[VALUES], fields[RETURNS], ppo.value_clip)
            error_BT = error_BT.where(mask_BT > 0, 0.0)
            losses_BT = losses_BT + ppo.value_weight * error_BT
            values["value_loss"] = error_BT
        count = mask_BT.sum()
        metrics: dict[str, Metric] = {
            name: ((value_BT.detach() * mask_BT).sum(), count) for name, value_BT in values.items()
        }
        return ElementLosses(losses_BT * scale_BT, metrics)

    def policy_tokens(self, logps_BT: Tensor, inputs: ModelInputs, mask_BT: Tensor) -> PolicyTokens:
        """What the loss reads. Without stored log-probabilities the round has one step, whose own they are."""
        fields = inputs.fields
        old_BT = fields.get(OLD, logps_BT.detach())
        importance_BT = None
        if self.corrects:
            generated_BT = fields[GENERATOR].where(mask_BT > 0, old_BT)
            importance_BT = truncated_importance(old_BT, generated_BT, self.rl.correction.cap)
        return PolicyTokens(
            logps_BT, old_BT, fields[ADVANTAGES], mask_BT, fields.get(REF), importance_BT, fields[SAMPLES]
        )

    @torch.no_grad()
    def _numbers(self, tokens: PolicyTokens, ratio_BT: Tensor, generated_BT: Tensor) -> dict[str, Tensor]:
        """The metrics of each token; of ratios, the share whose gradient the clip removes."""
        gains_BT = tokens.advantages > 0
        losing_BT = tokens.advantages < 0
        importance_BT = tokens.importance
        numbers = {
            "entropy": -tokens.logps,
            "ratio_high": ((ratio_BT > 1 + self.clip.high) & gains_BT).float(),
            "ratio_low": ((ratio_BT < 1 - self.clip.low) & losing_BT).float(),
            "importance": torch.ones_like(ratio_BT) if importance_BT is None else importance_BT,
            "mismatch": (tokens.old_logps - generated_BT).abs(),
        }
        if tokens.ref_logps is not None and self.rl.kl.needs_reference:
            numbers["kl"] = k3(tokens.logps, tokens.ref_logps)
        return {name: value_BT.where(tokens.mask > 0, 0.0) for name, value_BT in numbers.items()}
