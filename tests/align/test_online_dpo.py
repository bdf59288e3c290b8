"""Online DPO: which answers become pairs, and the loss of a round's pairs against the formula with all logits."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bessemer.align.advantages import best_and_worst
from bessemer.align.online_dpo import OnlineDpo
from bessemer.align.rollout_stream import RolloutStream
from bessemer.align.rollouts import Round
from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.preference import DpoSpec
from bessemer.train.engine import forward_backward

from .test_rollouts import CONTEXT, GROUP, SHAPE, loss_of, make_round, rl_of, stream_of

PROMPTS = 4


def round_of_pairs(**settings: Any) -> tuple[Any, Round]:
    rl = rl_of(**settings)
    made = make_round(rl, "online_dpo", PROMPTS)
    chosen = best_and_worst(made.rewards())
    made.used &= (chosen != 0).flatten().numpy()
    lengths = [sample.tokens.size for sample in made.samples]
    made.arrays["advantages"] = np.repeat(chosen.flatten().float().numpy(), lengths)
    return rl, made


def stream_of_pairs(folder: Path, rl: Any, made: Round) -> RolloutStream:
    stream = stream_of(folder, rl, made, "online_dpo")
    stream.together, stream.sequence_length = 2, 2 * CONTEXT
    return stream


def expected_loss(model: Decoder, made: Round, dpo: DpoSpec, heat: float) -> torch.Tensor:
    """One pair at a time, from the logits of all tokens."""
    losses = []
    for prompt in range(PROMPTS):
        rewards = made.rewards()[prompt]
        ratios = []
        for number in (prompt * GROUP + int(rewards.argmax()), prompt * GROUP + int(rewards.argmin())):
            sample = made.samples[number]
            ids = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens]))
            logits_TV = F.linear(model(ids[None, :-1])[0], model.head_weight) / heat
            logps_T = logits_TV.log_softmax(-1)[sample.prompt.size - 1 :].gather(1, ids[sample.prompt.size :, None])
            ratios.append(logps_T.sum() - float(made.tokens_of(number, "ref_logps").sum(dtype=np.float64)))
        if dpo.divergence == "js":
            ratios = [torch.log(2 * ratio.exp() / (1 + ratio.exp())) for ratio in ratios]
        losses.append(-F.logsigmoid(dpo.beta_value * (ratios[0] - ratios[1])))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("divergence", ["reverse_kl", "js"])
def test_the_loss_is_that_of_the_pairs_at_any_accumulation_and_number_of_ranks(tmp_path: Path, divergence: Any) -> None:
    rl, made = round_of_pairs(temperature=0.7)
    dpo = DpoSpec(beta=0.3, divergence=divergence)
    stream, objective = stream_of_pairs(tmp_path, rl, made), OnlineDpo(rl, dpo)
    model = build_model(SHAPE, seed=0, device="cpu")
    model.zero_grad()
    expected = expected_loss(model, made, dpo, 0.7)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for micro, world in ((100, 1), (1, 1), (1, 2), (2, 4)):
        loss, metrics, own = loss_of(model, objective, stream, micro=micro, world=world)
        assert loss == pytest.approx(expected.item(), rel=2e-5)
        assert 0 <= metrics["accuracy"] <= 1 and metrics["margin"] == pytest.approx(
            metrics["chosen_reward"] - metrics["rejected_reward"], abs=1e-4
        )
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-3, atol=2e-6)


def test_a_pair_shares_a_row_the_chosen_answer_first(tmp_path: Path) -> None:
    rl, made = round_of_pairs()
    stream = stream_of_pairs(tmp_path, rl, made)
    numbers = stream.step_samples(0)
    assert len(numbers) == 2 * PROMPTS
    for chosen, rejected in zip(numbers[::2], numbers[1::2], strict=True):
        assert chosen // GROUP == rejected // GROUP
        assert made.samples[chosen].reward > made.samples[rejected].reward
    objective = OnlineDpo(rl, DpoSpec())
    for world in (1, 2, 4):
        batches = [batch for rank in range(world) for batch in stream.micro_batches(0, 2, rank, world)]
        assert sum(objective.inputs(batch).count for batch in batches) == PROMPTS


def test_equal_rewards_make_no_pair() -> None:
    nan = torch.nan
    rewards = torch.tensor([[1.0, 3, 2], [2, 2, 2], [nan, 1, 4], [nan, nan, 1]])
    assert best_and_worst(rewards).tolist() == [[-1, 1, 0], [0, 0, 0], [0, -1, 1], [0, 0, 0]]


def test_a_step_without_pairs_has_a_loss_of_zero(tmp_path: Path) -> None:
    rl, made = round_of_pairs()
    made.used[:] = False
    objective, model = OnlineDpo(rl, DpoSpec()), build_model(SHAPE, seed=0, device="cpu")
    batches = [
        objective.feed(batch, torch.device("cpu")) for batch in stream_of_pairs(tmp_path, rl, made).micro_batches(0, 9)
    ]
    result = forward_backward(model, objective, deque(batches), 1.0, "fp32")
    assert float(result.loss) == 0 and all(not p.grad.any() for p in model.parameters() if p.grad is not None)
