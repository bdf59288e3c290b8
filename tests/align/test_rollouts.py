"""Rounds of rollouts: storage, packing, the objective's loss and gradients, and PPO's advantages by hand."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bessemer.align.policy import PolicyGradient
from bessemer.align.prompts import Prompt, PromptRows, hold_out, read_prompts
from bessemer.align.rollout_maker import RolloutMaker
from bessemer.align.rollout_stream import CurrentRounds, RolloutStream
from bessemer.align.rollouts import Rollout, Round, RoundStore, positions_key, repeated_ngrams, sample_numbers
from bessemer.data.stream.order import BatchPhase, MixturePhase, StepPositions, StreamOrder
from bessemer.errors import UserError
from bessemer.model.transformer import Decoder, build_model
from bessemer.spec.data import SourceSpec
from bessemer.spec.mixture import quantise
from bessemer.spec.model import ModelSpec, model_shape
from bessemer.spec.rl import RlSpec
from bessemer.train.engine import forward_backward

VOCAB, CONTEXT, GROUP = 40, 24, 4
SHAPE = model_shape(ModelSpec(width=32, layers=2, heads=4, kv_heads=2, ffn=64), vocab=VOCAB)


def samples(count: int, seed: int = 0) -> list[Rollout]:
    draw = np.random.default_rng(seed)
    made = []
    for number in range(count):
        prompt, tokens = (draw.integers(1, VOCAB, draw.integers(2, 8)) for _ in range(2))
        sample = Rollout(
            number // GROUP, 0, number // GROUP, prompt, tokens, draw.normal(-3, 0.1, tokens.size).astype(np.float32),
            bool(draw.random() < 0.7), number, f"answer {number}", float(draw.normal()),
            {"a": float(number), "b": np.nan},
        )  # fmt: skip
        made.append(sample)
    return made


def make_round(rl: RlSpec, objective: str = "grpo", prompts: int = 4, first: int = 0) -> Round:
    """A round with random numbers for every array."""
    made = Round(first, samples(prompts * GROUP), GROUP, np.ones(prompts * GROUP, np.bool_))
    draw = np.random.default_rng(1)
    for name in rl.arrays(objective):
        made.arrays[name] = draw.normal(-3 if "logps" in name else 0, 0.3, made.starts[-1]).astype(np.float32)
    made.arrays["generator_logps"] = np.concatenate([sample.logps for sample in made.samples])
    return made


def stream_of(folder: Path, rl: RlSpec, made: Round | None, objective: str = "grpo") -> RolloutStream:
    prompts = [Prompt(f"p{n}", {}, "rows.jsonl", n + 1) for n in range(16)]
    rows = PromptRows(prompts, [np.array([1, 2])] * 16, CONTEXT)
    order = StreamOrder([MixturePhase(0, quantise({"a": 1.0}))], {"a": 16}, seed=0)
    steps = StepPositions([BatchPhase(0, rl.step_positions)])
    rounds = CurrentRounds(RoundStore(folder))
    stream = RolloutStream({"a": rows}, order, CONTEXT, steps, rl, rl.arrays(objective), rounds, VOCAB)
    if made is not None:
        rounds.set(made, positions_key(stream.round_positions(made.first)))
    return stream


def rl_of(**settings: Any) -> RlSpec:
    return RlSpec.model_validate({"prompts": 4, "samples": GROUP, "max_tokens": 10, **settings})


def loss_of(
    model: Decoder, objective: PolicyGradient, stream: RolloutStream, step: int = 0, micro: int = 100, world: int = 1
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Loss, metrics and gradients of a step, added up over the micro-batches of all ranks."""
    model.zero_grad()
    parts = [
        [objective.feed(batch, torch.device("cpu")) for batch in stream.micro_batches(step, micro, rank, world)]
        for rank in range(world)
    ]
    assert len({len(of_rank) for of_rank in parts}) == 1
    assert len({part.tokens_BT.shape for of_rank in parts for part in of_rank}) == 1
    count = sum(part.count for of_rank in parts for part in of_rank)
    loss, sums = 0.0, torch.zeros(len(objective.metrics), 2)
    for of_rank in parts:
        result = forward_backward(model, objective, deque(of_rank), count, "fp32")
        loss += float(result.loss)
        sums += result.metrics_M2
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss, dict(zip(objective.metrics, (sums[:, 0] / sums[:, 1]).tolist(), strict=True)), gradients


def test_a_round_survives_storage(tmp_path: Path) -> None:
    rl = rl_of(minibatches=2)
    made = make_round(rl)
    made.numbers["generate_s"] = 1.5
    made.used[3] = False
    store = RoundStore(tmp_path / "rollouts", keep=2)
    store.save(made, "key", [{"answer": sample.text} for sample in made.samples])
    loaded = store.load(0, "key")
    assert loaded is not None and store.load(0, "other") is None and store.load(1) is None
    assert loaded.numbers == made.numbers and (loaded.used == made.used).all()
    for first, second in zip(made.samples, loaded.samples, strict=True):
        np.testing.assert_equal(vars(first), vars(second))
    for name, array in made.arrays.items():
        assert (loaded.arrays[name] == array).all()
    assert len((tmp_path / "rollouts" / "round-00000000.jsonl").read_text().splitlines()) == 16
    for first in (2, 4):
        later = make_round(rl, first=first)
        store.save(later, "key", [{}] * 16)
    assert store.load(0) is None and store.load(2) is not None
    (tmp_path / "rollouts" / "round-00000004.safetensors").write_bytes(b"half")
    with pytest.raises(UserError, match=r"round-00000004.safetensors: cannot be read"):
        store.load(4)


def test_rows_hold_every_answer_once_with_its_numbers(tmp_path: Path) -> None:
    rl = rl_of(minibatches=2)
    made = make_round(rl)
    made.used[5] = False
    stream = stream_of(tmp_path, rl, made)
    for step, numbers in ((0, [0, 1, 2, 3, 4, 6, 7]), (1, list(range(8, 16)))):
        assert stream.step_samples(step) == numbers
        assert stream.step_count(step) == sum(made.lengths[n] for n in numbers)
        for world in (1, 2, 4):
            batches = [b for rank in range(world) for b in stream.micro_batches(step, 2, rank, world)]
            learned = sum(int(batch.weights.sum()) for batch in batches)
            assert learned == stream.step_count(step)
            found = []
            for batch in batches:
                for row, document, origin in stream.locate(batch):
                    cells = (batch.documents[row] == document) & (batch.weights[row] > 0)
                    found.append((origin.row, batch.targets[row][cells].tolist()))
                    number = next(n for n in numbers if made.samples[n].tokens.tolist() == found[-1][1])
                    np.testing.assert_array_equal(
                        batch.fields["advantages"][row][cells], made.tokens_of(number, "advantages")
                    )
                    assert (batch.fields["lengths"][row][cells] == made.lengths[number]).all()
            expected = [(made.samples[n].sequence + 1, made.samples[n].tokens.tolist()) for n in numbers]
            assert sorted(found) == sorted(expected)
    packed = stream.micro_batches(1, 100)[0]
    assert len(packed.tokens) < 8 and packed.documents.max() > 0  # several answers share a row
    shares = stream.origins(0)
    assert sum(share.tokens for share in shares) == stream.step_count(0)


def test_before_the_run_begins_batches_are_full_rows(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, rl_of(), None)
    batches = stream.micro_batches(0, 3)
    assert [batch.tokens.shape for batch in batches] == [(3, CONTEXT)] * 2
    assert set(batches[0].fields) >= {"advantages", "generator_logps"}
    stream.rounds.synthetic = False
    with pytest.raises(UserError, match=r"step 0: .* holds no rollouts of its prompts"):
        stream.micro_batches(0, 3)


SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {"aggregate": "sequence", "minibatches": 2},
    "dapo": {"clip_high": 0.28, "minibatches": 2},
    "dr_grpo": {"aggregate": "constant", "advantage": "group", "minibatches": 2},
    "gspo": {"loss": "gspo", "clip": 0.2, "aggregate": "sequence", "minibatches": 2},
    "kl": {"kl": {"beta": 0.1}, "minibatches": 2, "temperature": 0.7},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_loss_is_the_same_at_any_accumulation_and_number_of_ranks(name: str, tmp_path: Path) -> None:
    rl = rl_of(**SETTINGS[name])
    made = make_round(rl)
    stream, objective, model = (
        stream_of(tmp_path, rl, made),
        PolicyGradient("grpo", rl),
        build_model(SHAPE, seed=0, device="cpu"),
    )
    loss, metrics, gradients = loss_of(model, objective, stream)
    for micro, world in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 4)):
        other, other_metrics, other_gradients = loss_of(model, objective, stream, micro=micro, world=world)
        assert other == pytest.approx(loss, rel=2e-5, abs=2e-6)
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for key, gradient in gradients.items():
            torch.testing.assert_close(other_gradients[key], gradient, rtol=1e-3, atol=2e-6)


def expected_loss(model: Decoder, made: Round, rl: RlSpec, numbers: list[int], name: str) -> Tensor:
    """TRL's formulas, one answer at a time and with all logits."""
    per_answer, tokens = [], 0
    for number in numbers:
        sample = made.samples[number]
        ids = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens]))
        hidden_TW = model(ids[None, :-1])[0]
        logits_TV = F.linear(hidden_TW, model.head_weight) / rl.temperature
        logps_TV = logits_TV.log_softmax(-1)[sample.prompt.size - 1 :]
        logps = logps_TV.gather(1, torch.from_numpy(sample.tokens)[:, None])[:, 0]
        old, gain, generated = (
            torch.from_numpy(made.tokens_of(number, key)) for key in ("old_logps", "advantages", "generator_logps")
        )
        ratio = (logps - old).exp() if name != "gspo" else (logps - old).mean().exp().expand(logps.shape)
        high = rl.clip_high or 0.2
        loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1 + high) * gain)
        loss = loss * (old - generated).exp().clamp(max=2.0)
        if name == "kl":
            away = torch.from_numpy(made.tokens_of(number, "ref_logps")) - logps
            loss = loss + 0.1 * ratio * (away.exp() - away - 1)
        tokens += len(loss)
        per_answer.append(loss)
    if name in ("grpo", "gspo"):
        return torch.stack([loss.mean() for loss in per_answer]).mean()
    if name == "dr_grpo":
        return torch.cat(per_answer).sum() / (len(per_answer) * rl.max_tokens)
    return torch.cat(per_answer).sum() / tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_values_and_gradients_are_those_of_the_formulas(name: str, tmp_path: Path) -> None:
    rl = rl_of(**SETTINGS[name])
    made = make_round(rl)
    stream, objective, model = (
        stream_of(tmp_path, rl, made),
        PolicyGradient("grpo", rl),
        build_model(SHAPE, seed=0, device="cpu"),
    )
    with torch.no_grad():  # log-ratios near those of a run
        for number, sample in enumerate(made.samples):
            ids = torch.from_numpy(np.concatenate([sample.prompt, sample.tokens]))
            logits_TV = F.linear(model(ids[None, :-1])[0], model.head_weight) / rl.temperature
            now = logits_TV.log_softmax(-1)[sample.prompt.size - 1 :].gather(
                1, torch.from_numpy(sample.tokens)[:, None]
            )
            for key in ("old_logps", "generator_logps", "ref_logps"):
                if key in made.arrays:
                    made.tokens_of(number, key)[:] += now[:, 0].numpy() + 3
    loss, _, gradients = loss_of(model, objective, stream, step=1)
    model.zero_grad()
    expected = expected_loss(model, made, rl, list(range(8, 16)), name)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-5) and abs(loss) > 1e-4
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-4, atol=1e-5)


def test_ppo_advantages_by_hand() -> None:
    """Two answers: rewards 1 and 0, values and log-probabilities such that every number can be checked on paper."""
    rl = RlSpec.model_validate({
        "prompts": 1, "samples": 2, "max_tokens": 3, "kl": {"beta": 0.5},
        "ppo": {"gamma": 1.0, "lam": 0.5, "whiten": False},
    })  # fmt: skip
    pair = samples(2)
    pair[0].tokens, pair[1].tokens = np.array([1, 2, 3]), np.array([4])
    pair[0].reward, pair[1].reward = 1.0, 0.0
    made = Round(0, pair, 2, np.ones(2, np.bool_))
    made.arrays = {
        "old_logps": np.array([-1, -1, -1, -2], np.float32), "ref_logps": np.array([-1, -1.2, -1, -1.6], np.float32),
        "values": np.array([0.5, 0.4, 0.2, 0.3], np.float32),
    }  # fmt: skip
    maker = RolloutMaker("ppo", rl, None, {}, None)  # type: ignore[arg-type]
    maker._add_advantages(made, 0.5)
    # Rewards of tokens: minus 0.5 * k1 = 0, 0.1, 0; the last one has the answer's: [0, -0.1, 1] and [0.2].
    # Errors: 1 - 0.2 = 0.8; -0.1 + 0.2 - 0.4 = -0.3; 0 + 0.4 - 0.5 = -0.1. And 0.2 - 0.3 = -0.1.
    # Advantages: 0.8; -0.3 + 0.5 * 0.8 = 0.1; -0.1 + 0.5 * 0.1 = -0.05.
    np.testing.assert_allclose(made.arrays["advantages"], [-0.05, 0.1, 0.8, -0.1], atol=1e-6)
    np.testing.assert_allclose(made.arrays["returns"], [0.45, 0.5, 1.0, 0.2], atol=1e-6)
    assert made.numbers["answer_kl"] == pytest.approx((0.2 - 0.4) / 2, abs=1e-6)


def test_numbers_of_answers() -> None:
    assert repeated_ngrams(np.array([1, 2, 3, 4, 1, 2, 3, 4])) == pytest.approx(1 / 5)
    assert repeated_ngrams(np.array([1, 2, 3])) == 0 and repeated_ngrams(np.full(9, 7)) == pytest.approx(5 / 6)
    group = samples(8)
    for sample, reward in zip(group, [1, 1, 1, 1, 0, 2, 0, 2], strict=True):
        sample.reward = reward
    numbers = sample_numbers(group, 4)
    assert numbers["reward"] == 1 and numbers["equal_groups"] == 0.5 and numbers["reward_a"] == 3.5
    assert numbers["reward_std"] == pytest.approx(np.std([0, 2, 0, 2], ddof=1) / 2) and np.isnan(numbers["reward_b"])
    assert numbers["truncated"] == np.mean([not sample.finished for sample in group])


def test_prompts_are_rows_of_any_format_with_their_columns(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    turns = [{"role": "user", "content": "2+2?"}]
    pq.write_table(pa.Table.from_pylist([{"q": turns, "answer": "4", "level": 3}]), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("q,answer\n1+1?,2\n")
    (tmp_path / "c.jsonl").write_text('{"q": "0+0?", "answer": "0", "tests": ["x"]}\n{"question": "9"}\n')
    source = SourceSpec(path=[str(tmp_path / "*")], columns={"prompt": "q"})
    with pytest.raises(UserError, match=r"c.jsonl:2: no column 'q'; it has 'question': name it.*\(1 of 4 rows"):
        list(read_prompts("a", source, 0.01))
    prompts = list(read_prompts("a", source, 0.5))
    assert [prompt.content for prompt in prompts] == [turns, "1+1?", "0+0?"]
    assert prompts[0].columns["level"] == 3 and prompts[2].columns["tests"] == ["x"]
    assert [Path(prompt.place).name for prompt in prompts] == ["a.parquet:1", "b.csv:1", "c.jsonl:1"]


def test_equal_prompts_are_held_out_together() -> None:
    prompts = [Prompt(f"p{n % 20}", {"n": n}, "f", n) for n in range(60)]
    training, held_out = hold_out(prompts, 0.2, seed=0)
    assert len(held_out) % 3 == 0 and 0 < len(held_out) < 30 and len(training) + len(held_out) == 60
    assert not {p.content for p in training} & {p.content for p in held_out}
    assert hold_out(prompts, 0.0, seed=0) == (prompts, [])
    assert [len(side) for side in hold_out(prompts[:2], 0.001, seed=0)] == [1, 1]
