"""Reinforcement learning in a run: rounds, records, held-out answers, exact resume and replay, and its errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.align.reward_model import RewardModel
from bessemer.align.rollouts import RoundStore
from bessemer.checkpoint.store import CheckpointStore
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.replay import documents_of, job_of
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import load_spec
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Outcome
from bessemer.trial.replay import replay_to

from .conftest import spec_data, train_until

MODEL = {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 64}
REWARDS = '''
def length(prompts, completions, completion_ids, **columns):
    """Short answers are better; nothing is said of those to prompts with a 9."""
    return [None if "9" in p else 1.0 / len(ids) for p, ids in zip(prompts, completion_ids)]

def raises(completions, **columns):
    return [1 / 0 for _ in completions]

def few(completions, **columns):
    return [1.0]

def nothing(completions, **columns):
    return [None] * len(completions)

def not_a_number(completions, **columns):
    return [float("nan")] * len(completions)
'''


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model that was shown sums, half of them wrong, and the files of prompts and rewards."""
    folder = tmp_path_factory.mktemp("rl")
    sums = [(a, b) for a in range(10) for b in range(10)]
    shown = [
        {"prompt": f"{a}+{b}=", "completion": str(a + b if (a + 3 * b) % 2 else a)} for a, b in sums for _ in range(3)
    ]
    (folder / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(REWARDS)
    sft = spec_data(
        "sft", folder / "shown.jsonl", folder, objective="sft", model=MODEL, tokenizer={"kind": "char", "chat": "none"},
        data={"context": 16}, budget={"steps": 60, "batch": 16 * 32}, checkpoint={"every": 60}, evaluate={"every": 60},
    )  # fmt: skip
    sft["tokenizer"].pop("vocab")
    spec = RunSpec.model_validate(sft)
    assert Session(spec).train().kind == "finished"
    (checkpoint,) = (run_folder(spec) / "checkpoints").glob("step-00000060*")
    return {"folder": folder, "start_from": str(checkpoint)}


ENVIRONMENT = '''
class Digits:
    """Two attempts: 0.25 for an answer of one digit, then 1 for the right one."""

    def reset(self, prompt, answer):
        self.right = answer

    def step(self, text):
        if text == self.right:
            return "", 1.0, True
        return "=", 0.25 * (len(text) == 1), False
'''


Make = Callable[..., RunSpec]


@pytest.fixture
def make(base: dict[str, Any], tmp_path: Path) -> Make:
    """A spec of RL over the sums: make("name", objective="rloo", rl={...})."""

    def spec_of(name: str = "rl", rl: dict[str, Any] | None = None, **parts: Any) -> RunSpec:
        settings = {"prompts": 4, "samples": 4, "max_tokens": 4, "rewards": {"right": "exact"}} | (rl or {})
        source = {"path": [str(base["folder"] / "prompts.jsonl")], "columns": {"prompt": "question"}}
        data = {"sources": {"sums": source}, "context": 12, "validation": 0.1} | parts.pop("data", {})
        return RunSpec.model_validate({
            "name": name, "runs": str(tmp_path / "runs"), "objective": "grpo", "start_from": base["start_from"],
            "model": MODEL, "rl": settings, "data": data, "budget": {"steps": 6}, "optimizer": {"lr": 1e-3},
            "schedule": {"kind": "constant", "warmup": 1}, "precision": "fp32", "checkpoint": {"every": 2},
            "evaluate": {"every": 3, "tokens": 8 * 12}, "parallel": {"device": "cpu", "threads": 1},
            "lints": {"silence": ["continued_at_the_peak"]}, **parts,
        })  # fmt: skip

    return spec_of


def run_of(spec: RunSpec) -> Run:
    return Run.existing(run_folder(spec))


def train(spec: RunSpec) -> Outcome:
    return Session(spec).train()


def numbers(spec: RunSpec, *more: str) -> list[list[Any]]:
    names = ("step", "loss", "grad_norm", "reward", "entropy", *more)
    return [[record[name] for name in names] for record in run_of(spec).metrics()]


def test_a_run_records_rewards_stores_its_rounds_and_answers_held_out_prompts(make: Make, base: Any) -> None:
    length = f"{base['folder'] / 'rewards.py'}:length"
    spec = make(rl={"rewards": {"right": "exact", "short": {"function": length, "weight": 0.5}}})
    assert train(spec).kind == "finished"
    run = run_of(spec)
    records = list(run.metrics())
    wanted = {
        "reward", "reward_right", "reward_short", "reward_std", "equal_groups", "entropy", "ratio_high", "ratio_low",
        "importance", "mismatch", "answer_tokens", "truncated", "repetition", "advantage_mean", "generate_s",
        "reward_s", "score_s",
    }  # fmt: skip
    assert wanted <= records[0].keys() and len(records) == 6
    assert all(record["veto"] is None for record in records)
    made = RoundStore(run.folder / "rollouts").load(3)
    assert made is not None and len(made.samples) == 16 and made.group == 4
    lines = [json.loads(line) for line in (run.folder / "rollouts" / "round-00000003.jsonl").read_text().splitlines()]
    for line in lines:
        a, _, b = line["prompt"][:-1].partition("+")
        right = float(line["answer"] == str(int(a) + int(b)))
        assert line["rewards"]["right"] == right and line["origin"].endswith(f":{int(a) * 10 + int(b) + 1}")
        short = line["rewards"]["short"]
        assert (short is None) == ("9" in line["prompt"])  # the reward does not apply
        assert line["reward"] == pytest.approx(right + (0.5 / line["tokens"] if short is not None else 0))
    assert records[3]["reward"] == pytest.approx(np.mean([line["reward"] for line in lines]), abs=1e-5)
    assert records[3]["answer_tokens"] == pytest.approx(np.mean([line["tokens"] for line in lines]), abs=1e-5)
    # The log-probabilities of generator and trainer are those of one distribution, of the end of an answer too.
    assert max(record["mismatch"] for record in records) < 1e-4
    assert all(sample.logps.size == sample.tokens.size for sample in made.samples)
    validations = list(run.validations())
    assert [record["step"] for record in validations] == [0, 3, 6]
    samples = (run.folder / "samples" / "step-00000006.jsonl").read_text().splitlines()
    assert validations[-1]["loss"] == pytest.approx(
        -np.mean([json.loads(line)["reward"] for line in samples]), abs=1e-5
    )
    held_out = {json.loads(line)["prompt"] for line in samples}
    asked = {json.loads(row)["prompt"] for path in (run.folder / "rollouts").glob("*.jsonl") for row in path.open()}
    assert held_out and not held_out & asked


@pytest.mark.parametrize(
    ("name", "rl", "parts"),
    [
        ("grpo", {"minibatches": 2, "epochs": 2}, {}),
        ("ppo", {"minibatches": 2, "kl": {"beta": 0.1, "target": 1.0}}, {"objective": "ppo"}),
        ("online_dpo", {"minibatches": 2}, {"objective": "online_dpo", "data": {"context": 20}}),
        ("ahead", {"ahead": 1}, {}),
        ("ahead-middle", {"ahead": 1, "minibatches": 2, "overlong": {"buffer": 2}}, {}),
    ],
)
def test_a_killed_run_continues_with_the_same_rewards_and_losses(make: Make, name: str, rl: Any, parts: Any) -> None:
    """Step 4 is in the middle of a round of four steps (grpo), or the first of a round (ppo)."""
    whole, killed = make(f"{name}-whole", rl, **parts), make(f"{name}-killed", rl, **parts)
    assert train(whole).kind == "finished"
    assert train_until(killed, 3).kind == "interrupted"
    assert train(killed).kind == "finished"
    more = {"ppo": ("ratio_high", "kl", "value_loss"), "online_dpo": ("accuracy", "margin")}.get(name, ("ratio_high",))
    assert numbers(whole, *more) == numbers(killed, *more)
    validations = [[(r["step"], r["reward"]) for r in run_of(spec).validations()] for spec in (whole, killed)]
    assert validations[0] == validations[1]
    if name == "ppo":
        betas = [record["beta"] for record in run_of(killed).metrics() if "beta" in record]
        assert len(betas) == 3 and betas[0] == 0.1 and len(set(betas)) > 1


def test_a_round_ahead_is_sampled_with_the_weights_before_the_last_one(make: Make) -> None:
    """The first two rounds have the initial weights; log-probabilities of later ones differ from the trainer's, and
    importance sampling corrects the difference."""
    spec = make("ahead", {"ahead": 1}, optimizer={"lr": 0.01})
    assert train(spec).kind == "finished"
    records = list(run_of(spec).metrics())
    assert [record["weights_step"] for record in records] == [0, 0, 1, 2, 3, 4]
    assert records[0]["mismatch"] < 1e-4 and records[0]["importance"] == pytest.approx(1, abs=1e-4)
    assert all(record["mismatch"] > 1e-3 and record["importance"] != 1 for record in records[1:])
    now = make("now", {"ahead": 0}, optimizer={"lr": 0.01}, budget={"steps": 3})
    assert train(now).kind == "finished"
    rounds = [RoundStore(run_folder(each) / "rollouts") for each in (spec, now)]
    texts = [[[sample.text for sample in store.load(step).samples] for step in range(3)] for store in rounds]  # type: ignore[union-attr]
    assert texts[0][0] == texts[1][0] and texts[0] != texts[1]


def test_a_reward_model_grades_answers(make: Make, base: dict[str, Any], tmp_path: Path) -> None:
    sums = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b + 1}"} for a, b in sums]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = make("judge").model_dump(exclude_unset=True)
    data = {"sources": {"pairs": {"path": [str(tmp_path / "pairs.jsonl")]}}, "context": 32}
    tokenizer = {"path": str(Path(base["start_from"]).parents[1] / "tokenizer.json"), "chat": "none"}
    judge |= {"objective": "reward", "data": data, "budget": {"steps": 3, "batch": 4 * 32}, "tokenizer": tokenizer}
    spec = RunSpec.model_validate({name: part for name, part in judge.items() if name not in ("rl", "start_from")})
    assert train(spec).kind == "finished"
    model = RewardModel.load(run_folder(spec))
    spec = make(rl={"rewards": {"taste": {"model": str(run_folder(spec)), "weight": 2.0}}}, budget={"steps": 2})
    assert train(spec).kind == "finished"
    lines = (run_folder(spec) / "rollouts" / "round-00000000.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    expected = model.score([each["prompt"] for each in answers], [each["answer"] for each in answers])
    assert [each["rewards"]["taste"] for each in answers] == pytest.approx(expected, abs=1e-5)
    assert [each["reward"] for each in answers] == pytest.approx([2 * score for score in expected], abs=1e-5)
    assert len(set(expected)) > 1


def test_every_step_replays_from_the_stored_rollouts(make: Make) -> None:
    spec = make(rl={"minibatches": 2, "rewards": {"right": "exact"}}, checkpoint={"every": 1, "keep_last": 10})
    assert train(spec).kind == "finished"
    folder = run_folder(spec)
    job, _ = job_of(folder)
    records = list(job.recorder.run.metrics())
    for start in (1, 4):  # in the middle of a round and at the beginning of one
        checkpoint = next((folder / "checkpoints").glob(f"step-{start:08}*"))
        CheckpointStore(folder / "checkpoints").load(checkpoint, job.engine.state())
        path = replay_to(job, 6, records, start)
        assert [(step.loss, step.grad_norm) for step in path] == [(r["loss"], r["grad_norm"]) for r in records[start:]]
    documents = documents_of(folder, 4, texts=True)
    lines = [json.loads(line) for line in (folder / "rollouts" / "round-00000004.jsonl").read_text().splitlines()]
    assert {document["prompt"] for document in documents} == {line["prompt"] for line in lines[:8]}
    assert all(document["texts"][0].startswith("reward ") for document in documents)
    (folder / "rollouts" / "round-00000004.safetensors").unlink()
    with pytest.raises(UserError, match=r"step 4: .*round-00000004.safetensors holds no rollouts"):
        documents_of(folder, 4)


def test_the_loss_of_a_stored_round_is_the_same_at_any_accumulation(make: Make) -> None:
    losses = []
    for micro in (1, 2, 4):
        spec = make(f"micro-{micro}", {"prompts": 4}, budget={"steps": 2, "micro_batch": micro})
        assert train(spec).kind == "finished"
        losses.append([[r[k] for k in ("loss", "grad_norm", "entropy")] for r in run_of(spec).metrics()])
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=2e-5, atol=2e-6)
    assert abs(losses[0][0][0]) > 1e-6


OBJECTIVES: dict[str, dict[str, Any]] = {
    "rloo": {"kl": {"beta": 0.05}},
    "reinforce": {"kl": {"beta": 0.01}},
    "raft": {"raft": {"top": 2}},
    "grpo": {
        "dynamic_sampling": True, "clip_high": 0.28, "mask_truncated": True, "overlong": {"buffer": 2},
        "advantage": "group", "aggregate": "constant", "kl": {"beta": 0.1},
    },
    "ppo": {},
    "online_dpo": {"samples": 16},
}  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_train(make: Make, objective: str) -> None:
    parts = {"data": {"context": 20}} if objective == "online_dpo" else {}
    settings, ends = OBJECTIVES[objective], {"budget": {"steps": 2}, "evaluate": {"every": 2}}
    spec = make(objective, settings, objective=objective, **ends, **parts)
    assert train(spec).kind == "finished"
    records = list(run_of(spec).metrics())
    assert all(np.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in records)
    if objective == "ppo":
        assert records[1]["value_loss"] > 0 and records[0]["explained_variance"] < 0.5
    if OBJECTIVES[objective].get("kl") or objective == "online_dpo":
        # Before the first update the model is its reference.
        assert records[0]["kl"] == pytest.approx(0, abs=1e-5) and records[1]["kl"] > 0
        assert "kl" in list(run_of(spec).validations())[-1]
    if objective == "raft":
        made = RoundStore(run_folder(spec) / "rollouts").load(0)
        assert made is not None
        best = np.sort([sample.reward for sample in made.samples]).reshape(-1)
        chosen = made.used.reshape(4, 4)
        rewards = np.array([sample.reward for sample in made.samples]).reshape(4, 4)
        assert (chosen.sum(1) == 2).all() and best.size == 16
        assert all(rewards[p][chosen[p]].min() >= rewards[p][~chosen[p]].max() for p in range(4))
        assert records[0]["loss"] == pytest.approx(records[0]["entropy"], rel=1e-4)  # plain cross-entropy
    if objective == "online_dpo":
        made = RoundStore(run_folder(spec) / "rollouts").load(0)
        assert made is not None
        for group in range(4):
            numbers = [n for n in range(16 * group, 16 * group + 16) if made.used[n]]
            rewards = [sample.reward for sample in made.samples[16 * group : 16 * group + 16]]
            assert len(numbers) == 2 * (max(rewards) > min(rewards))
            for number in numbers:
                extreme = max(rewards) if made.tokens_of(number, "advantages")[0] > 0 else min(rewards)
                assert made.samples[number].reward == extreme
        assert records[0]["loss"] == pytest.approx(np.log(2), abs=1e-6) and records[0]["accuracy"] == 0.5
    if objective == "grpo":
        assert records[0]["prompts_drawn"] >= 4


def test_a_kl_limit_ends_the_run(make: Make) -> None:
    spec = make("limit", {"kl": {"limit": 1e-9}}, optimizer={"lr": 0.05})
    outcome = train(spec)
    assert outcome.kind == "finished" and "rl.kl.limit: answers are" in outcome.reason and outcome.step < 6


@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_episodes_of_several_turns_train_and_replay(make: Make, tmp_path: Path, objective: str) -> None:
    (tmp_path / "digits.py").write_text(ENVIRONMENT)
    rl = {"environment": f"{tmp_path / 'digits.py'}:Digits", "turns": 2, "max_tokens": 7, "rewards": {}}
    parts = {"data": {"context": 20}, "checkpoint": {"every": 1, "keep_last": 10}, "budget": {"steps": 4}}
    spec = make(f"episodes-{objective}", rl, objective=objective, **parts)
    assert train(spec).kind == "finished"
    folder, records = run_folder(spec), list(run_of(spec).metrics())
    assert all(np.isfinite(record["loss"]) and record["mismatch"] < 1e-4 for record in records)
    assert 1 < records[0]["turns"] <= 2 and records[0]["reward"] == records[0]["reward_environment"]
    made = RoundStore(folder / "rollouts").load(0)
    assert made is not None and any(sample.observed for sample in made.samples)
    for sample in made.samples:
        assert sample.reward == pytest.approx(sum(sample.turn_rewards))
        assert all(end - begin == 1 for begin, end in sample.observed)  # the "=" of a tokenizer of characters
    job, _ = job_of(folder)
    checkpoint = next((folder / "checkpoints").glob("step-00000002*"))
    CheckpointStore(folder / "checkpoints").load(checkpoint, job.engine.state())
    path = replay_to(job, 4, list(job.recorder.run.metrics()), 2)
    assert [(step.loss, step.grad_norm) for step in path] == [(r["loss"], r["grad_norm"]) for r in records[2:]]
    assert list(run_of(spec).validations())[-1]["reward_environment"] >= 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", r"rl.rewards.own: .*rewards.py:raises.*prompts.jsonl:\d+.*ZeroDivisionError"),
        ("few", r"rl.rewards.own gave 1 rewards for \d+ answers"),
        ("not_a_number", r"rl.rewards.own gave nan for an answer to .*prompts.jsonl:\d+"),
        ("nothing", r"rl.rewards: no reward"),
    ],
)
def test_wrong_rewards_are_one_line(make: Make, base: dict[str, Any], function: str, message: str) -> None:
    spec = make("wrong", {"rewards": {"own": f"{base['folder'] / 'rewards.py'}:{function}"}})
    with pytest.raises(UserError, match=message) as error:
        train(spec)
    assert "\n" not in str(error.value)


def test_a_missing_column_is_told_before_anything_is_sampled(make: Make) -> None:
    spec = make("columns", {"rewards": {"right": {"verifier": "exact", "column": "solution"}}})
    message = r"rl.rewards.right.column: .*prompts.jsonl:\d+ has no column 'solution' \(it has question, answer"
    with pytest.raises(UserError, match=message):
        train(spec)
    assert not (run_folder(spec) / "rollouts").exists()


def test_a_prompt_that_leaves_no_room_is_named(make: Make) -> None:
    spec = make("long", {"max_tokens": 8})
    with pytest.raises(UserError, match=r"prompts.jsonl:\d+: its prompt of 5 tokens and rl.max_tokens 8 exceed"):
        train(spec)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("objective: grpo", "rl.rewards: no reward: write for example"),
        ("objective: grpo\nrl: {rewards: {a: exact}, prompts: 5, minibatches: 2}", "5 prompts are not a multiple of"),
        ("objective: grpo\nrl: {rewards: {a: exact}, samples: 1}", "advantage compares the answers to a prompt"),
        ("objective: grpo\nrl: {rewards: {a: exact}, advantage: gae}", "gae needs the critic of objective: ppo"),
        ("objective: {grpo: {rewards: {a: exact}}}\nbudget: {batch: 4K}", "follows from rl.prompts"),
        ("objective: sft", "a prompt needs completion, both chosen and rejected, or answers"),
        ("objective: pretrain\nrl: {prompts: 8}", "rl: has no effect with objective: pretrain"),
        ("objective: {grpo: {rewards: {a: exakt}}}", "did you mean exact"),
        ("objective: {online_dpo: {rewards: {a: exact}, clip: 0.1}}", "clip: has no effect with objective: online_dpo"),
        ("objective: {online_dpo: {rewards: {a: exact}}}\ndpo: {loss: orpo}", "online_dpo adds no cross-entropy"),
        ("objective: {rloo: {rewards: {a: exact}}}\nmodels: {critic: runs/x}", "uses no model of this name"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, yaml: str, message: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(f"model: 1M\ndata: {{sources: {{a: {{path: x.jsonl, columns: {{prompt: q}}}}}}}}\n{yaml}\n")
    with pytest.raises(UserError, match=message):
        load_spec(path)


@pytest.mark.slow
def test_answers_become_what_the_reward_asks_for(make: Make, base: dict[str, Any]) -> None:
    """Answers of one character are rare at first, and nearly all answers are after 40 steps."""
    function = "def one(completion_ids, **c):\n    return [float(len(ids) == 2) for ids in completion_ids]\n"
    (base["folder"] / "one.py").write_text(function)
    rl = {"prompts": 32, "samples": 8, "rewards": {"one": f"{base['folder'] / 'one.py'}:one"}}
    spec = make(
        "learns", rl, budget={"steps": 40}, optimizer={"lr": 1e-3}, evaluate={"every": 40}, checkpoint={"every": 40}
    )
    assert train(spec).kind == "finished"
    rewards = [record["reward"] for record in run_of(spec).metrics()]
    assert rewards[-1] > 0.95 > rewards[0] + 0.1
    assert list(run_of(spec).validations())[-1]["reward"] > 0.95
