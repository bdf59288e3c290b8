"""Policy losses against loops in float64 and TRL 1.13, values and gradients."""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer.align.policy_losses import (
    KL_ESTIMATORS,
    POLICY_LOSSES,
    Clip,
    KlController,
    KlPenalty,
    PolicyTokens,
    aggregation,
    policy_loss,
    truncated_importance,
    value_loss,
)  # fmt: skip

B, T = 6, 9


def make_tokens(seed: int = 0, spread: float = 0.4, importance: bool = False) -> PolicyTokens:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    old = -draw(B, T).abs() - 0.2
    mask = (torch.arange(T) < torch.tensor([9, 1, 4, 7, 9, 3])[:, None]).double()
    mask[0, 3:5] = 0  # a tool's output
    return PolicyTokens(
        (old + spread * draw(B, T)).requires_grad_(), old, draw(B, 1).expand(B, T), mask, old + 0.3 * draw(B, T),
        truncated_importance(old, old + 0.5 * draw(B, T)) if importance else None,
    )  # fmt: skip


def scalar_loss(name: str, logp: float, log_ratio: float, advantage: float, clip: Clip) -> float:
    """One token, as the papers write it; the ratio may be that of the token or of its answer."""
    ratio = math.exp(log_ratio)
    if name == "reinforce":
        return -advantage * logp
    if name == "cispo":
        return -min(ratio, 1 + clip.high) * advantage * logp
    if name == "sapo":
        heat = 1.0 if advantage > 0 else 1.05
        return -4 / heat / (1 + math.exp(-heat * (ratio - 1))) * advantage
    surrogate = min(ratio * advantage, max(1 - clip.low, min(1 + clip.high, ratio)) * advantage)
    if clip.dual is not None and advantage < 0:
        surrogate = max(surrogate, clip.dual * advantage)
    return -surrogate


@pytest.mark.parametrize("dual", [None, 1.5])
@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"vespo"}))
def test_losses_are_the_formulas(name: str, dual: float | None) -> None:
    tokens, clip = make_tokens(), Clip(0.15, 0.25, dual)
    losses, ratios = (x.detach() for x in policy_loss(name, tokens, clip))
    logps, log_ratios = tokens.logps.detach(), tokens.log_ratio.detach()
    level = POLICY_LOSSES[name].ratio
    clipped = 0
    for row in range(B):
        used = [t for t in range(T) if tokens.mask[row, t] > 0]
        logs = {t: float(log_ratios[row, t]) for t in used}
        total = sum(logs.values())
        for t in used:
            log_ratio = {"token": logs[t], "sequence_sum": total, "sequence_mean": total / len(used)}[level]
            logp, advantage = float(logps[row, t]), float(tokens.advantages[row, t])
            expected = scalar_loss(name, logp, log_ratio, advantage, clip)
            assert float(losses[row, t]) == pytest.approx(expected, abs=1e-12)
            assert float(ratios[row, t]) == pytest.approx(math.exp(log_ratio))
            clipped += not 1 - clip.low <= math.exp(log_ratio) <= 1 + clip.high
    assert clipped > 3  # both sides of the clip are compared
    assert (losses[tokens.mask == 0] == 0).all() and (ratios[tokens.mask == 0] == 1).all()


def test_ppo_by_hand() -> None:
    """Clip 0.2, advantages +1, +1, -1, -1 and ratios 1.5, 0.5, 1.5, 0.5: the losses are -1.2, -0.5, 1.5, 0.8; only the
    second and third have gradients."""
    logps = torch.tensor([[1.5, 0.5, 1.5, 0.5]]).log().requires_grad_()
    advantages, zeros, ones = torch.tensor([[1.0, 1.0, -1.0, -1.0]]), torch.zeros(1, 4), torch.ones(1, 4)
    losses, _ = policy_loss("clip", PolicyTokens(logps, zeros, advantages, ones), Clip(0.2, 0.2))
    torch.testing.assert_close(losses, torch.tensor([[-1.2, -0.5, 1.5, 0.8]]))
    (gradient,) = torch.autograd.grad(losses.sum(), logps)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -0.5, 1.5, 0.0]]))
    losses, _ = policy_loss("clip", PolicyTokens(logps, zeros, advantages, ones), Clip(0.2, 0.2, dual=1.4))
    torch.testing.assert_close(losses, torch.tensor([[-1.2, -0.5, 1.4, 0.8]]))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_is_the_policy_gradient_on_the_sampled_policy(name: str) -> None:
    tokens = make_tokens(spread=0.0)
    losses, _ = policy_loss(name, tokens)
    (gradient,) = torch.autograd.grad(losses.sum(), tokens.logps)
    expected = -tokens.advantages * tokens.mask
    if name == "rloo":  # each token's loss has the gradient of its answer's log-probability
        expected = expected * tokens.mask.sum(1, keepdim=True)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_packed_answers_are_separate(name: str) -> None:
    tokens = make_tokens(importance=True)
    packed = PolicyTokens(**{
        field: None if value is None else value.detach().reshape(2, -1) for field, value in vars(tokens).items()
    })  # fmt: skip
    packed.logps.requires_grad_()
    packed.samples = torch.arange(3).repeat_interleave(T).expand(2, -1)
    kl = KlPenalty(0.1)
    results = [policy_loss(name, each, kl=kl)[0] for each in (tokens, packed)]
    torch.testing.assert_close(results[0].reshape(2, -1), results[1])
    gradients = [torch.autograd.grad(r.sum(), e.logps)[0] for r, e in zip(results, (tokens, packed), strict=True)]
    torch.testing.assert_close(gradients[0].reshape(2, -1), gradients[1])


def test_padding_of_any_value_changes_nothing() -> None:
    for name in POLICY_LOSSES:
        tokens, padded = make_tokens(importance=True), make_tokens(importance=True)
        assert padded.importance is not None and padded.ref_logps is not None
        with torch.no_grad():
            for values in (padded.logps, padded.old_logps, padded.ref_logps):
                values[tokens.mask == 0] = -torch.inf
        results = [policy_loss(name, each, kl=KlPenalty(0.1))[0] for each in (tokens, padded)]
        gradients = [torch.autograd.grad(r.sum(), e.logps)[0] for r, e in zip(results, (tokens, padded), strict=True)]
        assert torch.equal(*results) and torch.equal(*gradients), name


def test_kl_estimators_agree_with_the_exact_divergence() -> None:
    """Over all tokens of a vocabulary: k1 and k3 have the exact mean; the gradient of k2, and of k3 times the ratio, is
    that of the exact divergence, and k1's is 0."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, dtype=torch.float64, generator=generator, requires_grad=True)
    reference = torch.log_softmax(logits.detach() + 0.3 * torch.randn(50, generator=generator), 0)
    logps = torch.log_softmax(logits, 0)
    probs = logps.detach().exp()
    exact = (logps.exp() * (logps - reference)).sum()
    gradient = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    for name, unbiased, right in (("k1", True, False), ("k2", False, True), ("k3", True, False)):
        mean = (probs * KL_ESTIMATORS[name](logps, reference)).sum()
        assert (abs(float((mean - exact).detach())) < 1e-12) == unbiased
        assert torch.allclose(torch.autograd.grad(mean, logits, retain_graph=True)[0], gradient) == right
    ratio = (logps - logps.detach()).exp()
    corrected = (probs * ratio * KL_ESTIMATORS["k3"](logps, reference)).sum()
    torch.testing.assert_close(torch.autograd.grad(corrected, logits, retain_graph=True)[0], gradient)
    k1 = (probs * KL_ESTIMATORS["k1"](logps, reference)).sum()
    assert torch.autograd.grad(k1, logits)[0].abs().max() < 1e-12


def test_value_loss_by_hand() -> None:
    """Values 1.0, 0.1; old 0.5, 0.0; returns 2.0, 0.5; clip 0.2: the first is clipped to 0.7, its error is larger."""
    values, old, returns = torch.tensor([1.0, 0.1]), torch.tensor([0.5, 0.0]), torch.tensor([2.0, 0.5])
    torch.testing.assert_close(value_loss(values, old, returns), torch.tensor([0.5 * 1.69, 0.5 * 0.16]))
    torch.testing.assert_close(value_loss(values, old, returns, None), torch.tensor([0.5, 0.08]))


def test_kl_controller() -> None:
    fixed, moving = KlController(0.1), KlController(0.1, target=6.0, horizon=1000, limit=20.0)
    fixed.update(50.0, 100)
    assert fixed.beta == 0.1 and not fixed.exceeded(1e9)
    moving.update(6.6, 100)  # 10 % above the target: 0.1 * (1 + 0.1 * 0.1)
    assert moving.beta == pytest.approx(0.101)
    moving.update(1e6, 100)
    assert moving.beta == pytest.approx(0.101 * 1.02)
    moving.update(0.0, 100)
    assert moving.beta == pytest.approx(0.101 * 1.02 * 0.98)
    assert moving.exceeded(20.1) and moving.exceeded(math.nan) and not moving.exceeded(20.0)
    fixed.load_state_dict(moving.state_dict())
    assert fixed.beta == moving.beta


def aggregate(name: Any, losses: Tensor, mask: Tensor, max_tokens: int) -> Tensor:
    weights, scales = aggregation(name, mask.sum(1, keepdim=True) * mask, max_tokens)
    return (weights * scales * losses).sum() / weights.sum()


@pytest.mark.parametrize("name", ["token", "sequence", "constant", "sum"])
def test_aggregation_is_the_formula_and_splits(name: str) -> None:
    losses, _ = policy_loss("clip", make_tokens())
    mask = make_tokens().mask
    rows = [(float(losses[i].detach().sum()), int(mask[i].sum())) for i in range(B)]
    expected = {
        "token": sum(total for total, _ in rows) / sum(count for _, count in rows),
        "sequence": sum(total / count for total, count in rows) / B,
        "constant": sum(total for total, _ in rows) / (B * 16),
        "sum": sum(total for total, _ in rows) / B,
    }[name]
    assert float(aggregate(name, losses, mask, 16).detach()) == pytest.approx(expected, rel=1e-6)
    sums = [0.0, 0.0]
    for part in (slice(0, 1), slice(1, 4), slice(4, 6)):
        weights, scales = aggregation(name, (mask.sum(1, keepdim=True) * mask)[part], 16)  # type: ignore[arg-type]
        sums[0] += float((weights * scales * losses[part]).sum().detach())
        sums[1] += float(weights.sum())
    assert sums[0] / sums[1] == pytest.approx(expected, rel=1e-6)


TRL = {  # loss_type: our loss, aggregation, TRL's importance_sampling_level
    "grpo": ("clip", "sequence", "token"), "bnpo": ("clip", "token", "token"), "dr_grpo": ("clip", "constant", "token"),
    "dapo": ("clip", "token", "token"), "cispo": ("cispo", "token", "token"), "sapo": ("sapo", "sequence", "token"),
    "vespo": ("vespo", "token", "token"), "gspo": ("gspo", "sequence", "sequence"),
    "luspo": ("gspo", "sum", "sequence"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.0, 0.07])
@pytest.mark.parametrize("correction", [False, True])
@pytest.mark.parametrize("loss_type", TRL)
def test_grpo_losses_are_those_of_trl(loss_type: str, correction: bool, beta: float) -> None:
    grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL 1.13 is not installed")
    name, way, level = TRL[loss_type]
    tokens = make_tokens(7, importance=correction)
    clip = Clip(0.15, 0.6, dual=2.0)
    losses, _ = policy_loss(name, tokens, clip, KlPenalty(beta) if beta else None)
    ours = aggregate(way, losses, tokens.mask, 16)
    vespo = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    args = SimpleNamespace(
        use_bias_correction_kl=True, delta=2.0, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        steps_per_generation=1, **vespo,
    )  # fmt: skip
    trainer = trl_trainer(
        tokens, loss_type="grpo" if loss_type == "gspo" else loss_type, importance_sampling_level=level, beta=beta,
        args=args, epsilon_low=0.15, epsilon_high=1.6 if loss_type == "cispo" else 0.6, use_vllm=correction,
        get_gamma_weights=grpo.GRPOTrainer.get_gamma_weights,
    )  # fmt: skip
    inputs = trl_inputs(tokens) | {
        "old_per_token_logps": tokens.old_logps, "ref_per_token_logps": tokens.ref_logps,
        "num_items_in_batch": tokens.mask.sum(),
    }  # fmt: skip
    if correction:
        inputs["importance_sampling_ratio"] = torch.where(tokens.mask > 0, tokens.importance, 1.0)
    compare(ours, grpo.GRPOTrainer._compute_loss(trainer, None, inputs), tokens.logps)


@pytest.mark.slow
def test_rloo_is_that_of_trl() -> None:
    trl = pytest.importorskip("trl.trainer.rloo_trainer", reason="TRL 1.13 is not installed")
    tokens = make_tokens(8, spread=0.1)
    losses, ratios = policy_loss("rloo", tokens, Clip(0.2, 0.2))
    inputs = trl_inputs(tokens) | {"old_logps": (tokens.old_logps * tokens.mask).sum(1)}
    trainer = trl_trainer(tokens, epsilon_low=0.2, epsilon_high=0.2)
    ours = aggregate("sequence", losses, tokens.mask, 16)
    compare(ours, trl.RLOOTrainer._compute_loss(trainer, None, inputs), tokens.logps)
    assert ((ratios - 1).abs() > 0.2).any()


def compare(ours: Tensor, theirs: Tensor, logps: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    gradients = [torch.autograd.grad(loss, logps, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)
    assert gradients[0].abs().max() > 1e-3


def trl_trainer(tokens: PolicyTokens, **settings: Any) -> Any:
    """What TRL's `_compute_loss` reads of its trainer, with log-probabilities given instead of a model."""
    nothing = torch.zeros_like(tokens.logps)
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (tokens.logps, nothing, None), aux_loss_enabled=False,
        accelerator=accelerator, model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, vllm_importance_sampling_correction=True,
        max_completion_length=16, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)}, **settings,
    )  # fmt: skip


def trl_inputs(tokens: PolicyTokens) -> dict[str, Any]:
    ids = torch.zeros(B, T, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :2], "prompt_mask": ids[:, :2] + 1, "completion_ids": ids, "completion_mask": tokens.mask,
        "advantages": tokens.advantages[:, 0],
    }  # fmt: skip
