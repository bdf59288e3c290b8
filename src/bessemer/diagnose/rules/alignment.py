"""Rules of preference training (DPO and relatives) and of reinforcement learning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bessemer.diagnose.rules.causes import make_finding, rank
from bessemer.diagnose.rules.curve import Curve, trend
from bessemer.diagnose.rules.view import RunView
from bessemer.run.finding import Finding

LEAST = 8  # points of a series that is judged


def judge_alignment(view: RunView) -> list[Finding]:
    findings: list[Finding | None] = []
    if view.preference:
        findings += [judge_reference(view), judge_displacement(view), judge_pairs(view), judge_margin(view)]
    if view.reinforcement:
        findings += [judge_kl(view), judge_entropy(view), judge_groups(view), judge_cuts(view), judge_ratio(view)]
        findings += [judge_reward(view)]
    return [finding for finding in findings if finding]


def _ends(curve: Curve) -> tuple[float, float]:
    """The levels of the first and last tenth."""
    return curve.level(0.1, end=False, least=2), curve.level(0.1, least=2)


def _finding(
    text: str, causes: list[Any], curve: Curve, severity: str, step: int | None = None, **evidence: Any
) -> Finding:
    where = int(curve.steps[-1]) if step is None else step
    return make_finding(text, causes, severity, where, evidence)


def _crossing(curve: Curve, limit: float, above: bool = True) -> int:
    """The first step from which the smoothed curve is beyond a limit."""
    smooth = curve.smooth(2)
    beyond = np.flatnonzero(smooth > limit if above else smooth < limit)
    return int(curve.steps[beyond[0]]) if len(beyond) else int(curve.steps[-1])


# --- pairs


def judge_reference(view: RunView) -> Finding | None:
    """The first loss of a sigmoid DPO is ln 2 and the first margin 0."""
    margin, loss = view.curve("reward_margin", 2), view.curve("loss", 2)
    if margin is None or loss is None or loss.steps[0] > 0.02 * max(view.last_step, 50) + 1:
        return None
    kind = str(view.flat_settings.get("loss_type", "sigmoid")).lower()
    first, start = float(margin.values[0]), float(loss.values[0])
    right = abs(first) < 0.1 and abs(start - math.log(2)) < 0.1
    if "sigmoid" not in kind or right or margin.steps[0] > loss.steps[0]:
        return None
    noise = loss.noise()
    if abs(start - math.log(2)) < max(0.05, 3 * noise) and abs(first) < 3 * margin.noise():
        return None
    causes = rank(view, reference_mismatch=0.8, lr_too_high=0.2)
    text = f"the first loss is {start:.3g} and the first margin {first:.3g}; they should be ln 2 = 0.693 and 0"
    return _finding(text, causes, margin, "warning", int(loss.steps[0]), first_loss=start, first_margin=first)


def judge_displacement(view: RunView) -> Finding | None:
    chosen, rejected = view.curve("chosen_logp", LEAST), view.curve("rejected_logp", LEAST)
    name = "log-probability"
    if chosen is None or rejected is None:
        chosen, rejected, name = view.curve("chosen_reward", LEAST), view.curve("rejected_reward", LEAST), "reward"
    if chosen is None or rejected is None:
        return None
    (first, last), (low_first, low_last) = _ends(chosen), _ends(rejected)
    unit = 0.15 * abs(first) if name == "log-probability" else 0.5
    if first - last < max(unit, 3 * chosen.noise()) or low_last >= low_first or trend(chosen) > -0.6:
        return None
    causes = rank(view, likelihood_displacement=0.85, lr_too_high=0.45, margin_without_accuracy=0.1)
    text = f"the {name} of chosen answers falls from {first:.3g} to {last:.3g}, as that of rejected ones does"
    return _finding(
        text,
        causes,
        chosen,
        "warning",
        _crossing(chosen, first - unit, False),
        chosen=[first, last],
        rejected=[low_first, low_last],
    )


def judge_pairs(view: RunView) -> Finding | None:
    """Accuracy 1 and a large margin within the first fifth."""
    accuracy, margin = view.curve("accuracy", LEAST), view.curve("reward_margin", LEAST)
    if accuracy is None or margin is None:
        return None
    early = max(4, len(accuracy) // 5)
    part = accuracy.values[early // 2 : early]
    reached = float(np.median(part))
    size = float(np.median(margin.values[early // 2 : early]))
    final = margin.level(0.2)
    if reached < 0.995 or (size < 5 and final < 10):
        return None
    causes = rank(view, trivial_pairs=0.75, lr_too_high=0.6)
    text = f"accuracy is {reached:.1%} and the margin {size:.3g} after {accuracy.steps[early - 1]} steps"
    return _finding(
        text,
        causes,
        accuracy,
        "warning",
        int(accuracy.steps[early - 1]),
        accuracy=reached,
        margin=size,
        last_margin=final,
    )


def judge_margin(view: RunView) -> Finding | None:
    accuracy, margin = view.curve("accuracy", LEAST), view.curve("reward_margin", LEAST)
    if accuracy is None or margin is None:
        return None
    (first, last), (low, high) = _ends(accuracy), _ends(margin)
    growth = high - low
    if last > 0.6 or last - first > 0.1 or growth < max(0.5, 4 * margin.noise()) or trend(margin) < 0.6:
        return None
    causes = rank(view, margin_without_accuracy=0.8, lr_too_high=0.3, trivial_pairs=0.1)
    text = f"the margin grows to {high:.3g} while accuracy stays at {last:.0%}"
    return _finding(text, causes, margin, "warning", accuracy=[first, last], margin=[low, high])


# --- reinforcement learning


def judge_kl(view: RunView) -> Finding | None:
    kl = view.curve("kl", LEAST)
    if kl is None:
        return None
    last, middle = kl.level(0.1, least=2), float(np.median(kl.values[: max(4, len(kl) // 2)]))
    largest = float(kl.smooth(1).max())
    growth = largest / max(abs(middle), 1e-3)
    if largest < 0.5 or growth < 8:
        return None
    step = _crossing(kl, max(4 * abs(middle), 0.25))
    causes = rank(view, kl_blowup=0.85, lr_too_high=0.5, reward_hacking=0.3, generator_mismatch=0.15)
    text = f"the KL divergence from the reference grows from {middle:.3g} to {largest:.3g}"
    return _finding(
        text, causes, kl, "critical" if largest > 5 else "warning", step, usual=middle, largest=largest, last=last
    )


def judge_entropy(view: RunView) -> Finding | None:
    entropy = view.curve("entropy", LEAST)
    if entropy is None:
        return None
    first, last = _ends(entropy)
    # Sampled tokens of a trained model become more certain anyway: a tenth of the start is too much.
    if first <= 0.02 or last > 0.1 * first or trend(entropy) > -0.5:
        return None
    reward = view.curve("reward", LEAST)
    solved = reward is not None and reward.level(0.1) >= 0.98 * float(reward.values.max()) and reward.level(0.1) >= 0.95
    causes = rank(view, entropy_collapse=0.85, lr_too_high=0.4, flat_groups=0.2)
    step = _crossing(entropy, 0.2 * first, above=False)
    severity = "note" if solved else "warning"
    return _finding(
        f"the entropy falls from {first:.3g} to {last:.2g}", causes, entropy, severity, step, first=first, last=last
    )


def judge_groups(view: RunView) -> Finding | None:
    flat, spread, reward = (
        view.curve("flat_groups", LEAST),
        view.curve("reward_std", LEAST),
        view.curve("reward", LEAST),
    )
    share = flat.level(0.3) if flat is not None else 0.0
    if flat is None and spread is not None and spread.level(0.3) < 0.01 * max(float(spread.values.max()), 1e-3):
        share, flat = 1.0, spread
    if flat is None or share <= 0.5:
        return None
    level = reward.level(0.3) if reward is not None else float("nan")
    top = float(reward.values.max()) if reward is not None else float("nan")
    solved = reward is not None and level >= 0.9 and top <= 1.001 and trend(reward) > 0.3
    causes = rank(view, flat_groups=0.85, entropy_collapse=0.3)
    text = f"{share:.0%} of the groups have equal rewards (mean reward {level:.3g})"
    return _finding(
        text, causes, flat, "note" if solved else "warning", _crossing(flat, 0.5), share=share, reward=level
    )


def judge_cuts(view: RunView) -> Finding | None:
    cut = view.curve("cut_answers", LEAST)
    if cut is None or cut.level(0.3) <= 0.3:
        return None
    grown = cut.level(0.1) > cut.level(0.1, end=False) + 0.2
    causes = rank(view, answers_cut=0.8, length_growth=0.5 if grown else 0.15, reward_hacking=0.15)
    text = f"{cut.level(0.3):.0%} of the answers reach the length limit"
    return _finding(
        text, causes, cut, "warning", _crossing(cut, 0.3), share=cut.level(0.3), limit=view.number("answer_limit")
    )


def judge_ratio(view: RunView) -> Finding | None:
    ratio = view.curve("importance_ratio", LEAST)
    if ratio is None:
        return None
    level = ratio.level(0.5)
    if abs(level - 1) <= 0.05:
        return None
    causes = rank(view, generator_mismatch=0.85, lr_too_high=0.2)
    text = f"the importance ratio of generator and trainer is {level:.3g}, not 1"
    worst = int(ratio.steps[int(np.argmax(np.abs(ratio.values - 1) > 0.05))])
    return _finding(text, causes, ratio, "critical" if abs(level - 1) > 0.3 else "warning", worst, ratio=level)


def judge_reward(view: RunView) -> Finding | None:
    """Reward against held-out scores and length, and rewards that fall for good."""
    reward, length = view.curve("reward", 2 * LEAST), view.curve("answer_length", LEAST)
    if reward is None:
        return None
    (first, last), noise = _ends(reward), max(reward.noise(), 1e-9)
    smooth = reward.smooth(2)
    top = float(smooth.max())
    rises = last - first > 3 * noise / math.sqrt(len(reward) / 10) and trend(reward) > 0.5
    grown = length is not None and _ends(length)[1] > 1.5 * _ends(length)[0] and trend(length) > 0.6
    held_out = next(
        iter(view.curves_like(r"(held_?out|eval|validation|test|judge|gold|true).*(reward|score|accuracy|win)")), None
    )
    evidence = {"reward": [first, last], "answer_length": list(_ends(length)) if length is not None else None}
    if held_out is not None:
        evidence["held_out"] = list(_ends(held_out))
    growth = f"answers grow from {_ends(length)[0]:.0f} to {_ends(length)[1]:.0f} tokens" if length is not None else ""
    score_falls = held_out is not None and _ends(held_out)[1] < _ends(held_out)[0] - 2 * held_out.noise()
    flat_score = held_out is not None and abs(_ends(held_out)[1] - _ends(held_out)[0]) < 2 * held_out.noise() + 0.02
    if rises and (score_falls or (flat_score and grown)):
        causes = rank(view, reward_hacking=0.85, length_growth=0.3, kl_blowup=0.2)
        text = f"the reward rises from {first:.3g} to {last:.3g}, {held_out.name if held_out else ''} does not"
        return _finding(text, causes, reward, "warning", **evidence)
    if grown and length is not None and not rises:
        causes = rank(view, length_growth=0.8, reward_hacking=0.2, answers_cut=0.2)
        text = f"{growth} while the reward stays at {last:.3g}"
        return _finding(text, causes, length, "warning", **evidence)
    span = top - first
    if span > 4 * noise and top - last > max(0.5 * span, 5 * noise):
        step = int(reward.steps[int(np.argmax(smooth))])
        causes = rank(view, reward_collapse=0.75, kl_blowup=0.4, entropy_collapse=0.2)
        return _finding(f"the reward falls from {top:.3g} to {last:.3g}", causes, reward, "critical", step, **evidence)
    if rises and grown and held_out is None and length is not None:
        causes = rank(view, reward_hacking=0.35, length_growth=0.25)
        text = f"{growth} as the reward rises"
        unknown = "Without a held-out score the curves cannot tell better answers from longer ones."
        return make_finding(text, causes, "note", length.steps[-1], evidence, unknown)
    return None
