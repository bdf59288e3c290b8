"""Staged causes get their verdicts, the guilty documents are named, and the job is afterwards as it was."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch

from bessemer.trial import trial as trial_module
from bessemer.trial.case import EarlierState, StepScene, Trial
from bessemer.trial.trial import run_trial

VOCAB, CONTEXT, SCENE_AT = 64, 32, 60  # of the staged jobs
BUDGET_S = 60.0
# Without clipping or moments a bad step does its worst; AdamW on this model shrugs most of them off.
PLAIN = {"name": "sgd", "clip": 1e6}


@dataclass
class Staged:
    job: object
    scene: StepScene
    earlier: list[EarlierState]
    verdicts: tuple[str, ...]
    rows: set[int] | None = None  # of the documents that are guilty
    began_at: int | None = None

    def judged_rightly(self, trial: Trial) -> bool:
        named = {accused.row for accused in trial.accused if accused.convicted}
        right = trial.verdict in self.verdicts and trial.confidence > 0.5 and self.accused_rightly(named)
        return right and (self.began_at is None or trial.began_at == self.began_at)

    def accused_rightly(self, named: set[int]) -> bool:
        """No innocent, and every guilty one that is more than a few tokens of the step."""
        step = self.scene.step if self.began_at is None else self.began_at
        tokens = {document.row: document.tokens for document in self.job.data.stream.origins(step)}
        guilty = self.rows or set()
        return named <= guilty and all(row in named for row in guilty if tokens.get(row, 0) >= 8)


def targets(documents, share=0.4):
    """Some of a step's documents, those with enough tokens in it to matter, never all."""
    chosen, tokens = {}, 0
    for document in documents:
        if tokens < share * CONTEXT * 8 and document.tokens >= 16:
            chosen[document.row] = document
            tokens += document.tokens
    return set(chosen)


def random_tokens(stage, documents_at, seed, step=SCENE_AT, **more):
    rng = np.random.default_rng(seed + 100)
    rows = targets(documents_at(seed, step))

    def change(row, tokens):
        return np.append(rng.integers(1, VOCAB, len(tokens) - 1), 0) if row in rows else tokens

    return Staged(*stage(seed, change, data=f"random tokens at {step}", **more), ("data",), rows)


def repeated_pattern(stage, documents_at, seed):
    rng = np.random.default_rng(seed + 200)
    rows, period = targets(documents_at(seed)), 1 + seed % 4
    word = rng.integers(1, VOCAB, period)

    def change(row, tokens):
        return np.append(np.resize(word, len(tokens) - 1), 0) if row in rows else tokens

    return Staged(*stage(seed, change), ("data", "data x state"), rows)


class WrongLabels:
    """A transform that gives some documents' targets to other tokens."""

    identity = {"labels": "wrong"}

    def __init__(self, sequences):
        self.sequences = sequences

    def __call__(self, batch):
        bad = np.isin(batch.sequences, list(self.sequences))
        labels = (batch.targets * 7 + 13) % VOCAB
        return replace(batch, targets=np.where(bad[:, None], labels, batch.targets))


def wrong_labels(stage, documents_at, seed):
    job, scene, _ = stage(seed)
    sequences = [int(s) for batch in scene.batches for s in batch.sequences][: 2 + seed % 3]
    rows = {
        origin.row
        for batch in scene.batches
        for row, _, origin in job.data.stream.locate(batch)
        if batch.sequences[row] in sequences
    }
    return Staged(*stage(seed, transforms=[WrongLabels(sequences)]), ("data",), rows)


def flipped_bit(stage, documents_at, seed):
    """The highest bit of an exponent: a weight becomes 1e38 times as large."""
    rng = np.random.default_rng(seed + 300)
    when = SCENE_AT - int(rng.integers(0, 4))

    def flip(job):
        named = [p for n, p in job.engine.model.named_parameters() if "blocks" in n or n == "norm.weight"]
        bits = named[int(rng.integers(len(named)))].detach().view(-1).view(torch.int32)
        bits[int(rng.integers(bits.numel()))] ^= 1 << 30

    return Staged(*stage(seed, faults={"before": {when: flip}}), ("hardware",), None, when - 1)


def flipped_line(stage, documents_at, seed):
    """A bit of 64 neighbours, weights that become 16 times as large or small: wrong numbers, all of them finite."""
    rng = np.random.default_rng(seed + 350)
    when = SCENE_AT - int(rng.integers(0, 4))

    def flip(job):
        weight = job.engine.model.get_parameter(("blocks.0.ffn.down.weight", "embedding.weight")[seed % 2])
        bits = weight.detach().view(-1).view(torch.int32)
        start = int(rng.integers(bits.numel() - 512))
        bits[start : start + 512] ^= 1 << 25

    faults = {"before": {when: flip}, "guarded": False, "normal_until": when}
    return Staged(*stage(seed, faults=faults), ("hardware",), None, when - 1)


def nan_once(stage, documents_at, seed):
    def spoil(job):
        def hook(_, __, output):
            handle.remove()
            output = output.clone()
            output.view(-1)[seed % 7] = float("nan") if seed % 2 else float("inf")
            return output

        handle = job.engine.model.blocks[seed % 2].ffn.register_forward_hook(hook)

    return Staged(*stage(seed, faults={"before": {SCENE_AT: spoil}}), ("hardware",))


def bad_gradient(stage, documents_at, seed):
    """One element of a gradient is large on the judged step."""

    def spoil(job):
        job.engine.model.blocks[seed % 2].attention.out.weight.grad.view(-1)[seed] = 10.0 ** (2 + seed % 4) * 50

    return Staged(*stage(seed, faults={"gradients": {SCENE_AT: spoil}}), ("hardware",))


def bad_gradient_accepted(stage, documents_at, seed):
    """Gradients with the wrong sign for some steps: their norm is normal, the run climbs until the loss is judged."""
    first = SCENE_AT - 6

    def spoil(job):
        for parameter in job.engine.model.parameters():
            parameter.grad.neg_()

    gradients = dict.fromkeys(range(first, SCENE_AT), spoil)
    faults = {"gradients": gradients, "guarded": False, "normal_until": first}
    return Staged(*stage(seed, faults=faults), ("hardware",), None, first)


def lr_jump(stage, documents_at, seed):
    when = SCENE_AT - 2
    faults = {"rates": {when: 30.0 * (1 + seed % 3)}}
    return Staged(*stage(seed, faults=faults), ("learning rate",), None, when)


def bf16_overflow(stage, documents_at, seed):
    def wrap(job):
        def hook(_, __, output):
            return output * float("inf") if torch.is_autocast_enabled("cpu") else output

        job.engine.model.blocks[seed % 2].attention.register_forward_hook(hook)

    at = 36  # sooner than the others: on a CPU without bf16 a step takes half a second
    staged = stage(seed, faults={"before": {at: wrap}}, precision="bf16", last=at, copies=(20, 28))
    return Staged(*staged, ("numerics",))


def healthy(stage, documents_at, seed):
    return Staged(*stage(seed), ("undetermined",))


def accepted_poison(stage, documents_at, seed):
    """One token over and over in a step before the scene: its loss is low, its gradient large, and the next suffer."""
    first = SCENE_AT - 2
    rows = targets(documents_at(seed, first), share=0.6)
    for peak, word in product((0.5, 0.6), (5, 17, 29)):

        def change(row, tokens, word=word):
            return np.append(np.full(len(tokens) - 1, word), 0) if row in rows else tokens

        faults = {"guarded": False, "normal_until": first}
        job, scene, earlier = stage(seed, change, faults=faults, peak=peak, optimizer=PLAIN)
        normal = scene.normal  # most words do no lasting harm, and some runs are near divergence without them
        if normal.loss < 3 and scene.loss > normal.loss + 12 * normal.loss_scale:
            return Staged(job, scene, earlier, ("data",), rows, first)
    return None


def too_fast(stage, documents_at, seed):
    """A warm-up to a peak that is far too high: nothing jumps, at some point the loss climbs."""
    settings = {"peak": 40.0, "warmup": 600, "optimizer": PLAIN, "copies": (8, 10)}
    return Staged(*stage(seed, faults={"guarded": False, "normal_until": 12}, last=17, **settings), ("learning rate",))


CAUSES = {
    f.__name__: f
    for f in (
        random_tokens, repeated_pattern, wrong_labels, flipped_bit, flipped_line, nan_once, bad_gradient,
        bad_gradient_accepted, lr_jump, bf16_overflow, healthy, accepted_poison, too_fast,
    )
}  # fmt: skip


def bits(job):
    found = {name: tensor.clone() for name, tensor in job.state().items()}
    return {**found, "random": torch.get_rng_state()}


def same(a, b):
    def raw(tensor):
        return tensor.reshape(-1).view(torch.uint8)

    return a.keys() == b.keys() and all(torch.equal(raw(a[name]), raw(b[name])) for name in a)


FAST = ("random_tokens", "flipped_bit", "nan_once", "lr_jump")


@pytest.mark.parametrize("cause", [*FAST, pytest.param("bf16_overflow", marks=pytest.mark.slow)])
def test_every_cause_gets_its_verdict(stage, documents_at, cause):
    staged = CAUSES[cause](stage, documents_at, 0)
    before = bits(staged.job)
    trial = run_trial(staged.job, staged.scene, staged.earlier, BUDGET_S)
    assert staged.judged_rightly(trial), trial
    assert not trial.cut_short
    assert same(before, bits(staged.job))


@pytest.mark.parametrize("cause", ["flipped_bit", "lr_jump"])
def test_steps_that_others_computed_are_not_compared_digit_by_digit(stage, documents_at, cause):
    """Other processes round otherwise: weights that a replay misses by a little say nothing, damaged ones still do."""
    staged = CAUSES[cause](stage, documents_at, 0)
    nudged = {name: tensor for name, tensor in staged.job.state().items() if name.startswith("model.")}
    for tensor in nudged.values():
        tensor.mul_(1 + 1e-6)
    trial = run_trial(staged.job, staged.scene, staged.earlier, BUDGET_S, alike_from=10**9)
    assert trial.verdict in staged.verdicts, trial


@pytest.mark.slow
@pytest.mark.parametrize("cause", list(CAUSES))
def test_verdicts_over_seeds(stage, documents_at, cause):
    right = []
    for seed in range(6):
        if staged := CAUSES[cause](stage, documents_at, seed):
            trial = run_trial(staged.job, staged.scene, staged.earlier, BUDGET_S)
            right.append(staged.judged_rightly(trial))
    assert right and sum(right) >= len(right) - 1, right


@pytest.mark.gpu
@pytest.mark.parametrize("cause", ["random_tokens", "flipped_bit", "nan_once", "lr_jump", "healthy"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_verdicts_on_a_gpu(stage, documents_at, cause, precision):
    def on_gpu(*given, **settings):
        return stage(*given, **settings, device="cuda", precision=precision)

    for seed in range(3):
        staged = CAUSES[cause](on_gpu, documents_at, seed)
        before = bits(staged.job)
        trial = run_trial(staged.job, staged.scene, staged.earlier, BUDGET_S)
        assert staged.judged_rightly(trial), trial
        assert same(before, bits(staged.job))


def test_convicted_documents_are_named_with_their_numbers_and_text(stage, documents_at):
    staged = random_tokens(stage, documents_at, 0)
    trial = run_trial(staged.job, staged.scene, staged.earlier, BUDGET_S, decode=lambda ids: "word " * len(ids))
    normal = staged.scene.normal
    for accused in trial.accused:
        assert accused.convicted and accused.file == "a.jsonl" and accused.row == accused.document
        assert accused.mean_loss > 2 * normal.loss and accused.excerpt.startswith("word ")
        assert len(accused.excerpt) <= 400
    assert sum(accused.loss_share for accused in trial.accused) > 0.5
    assert sum(accused.grad_share for accused in trial.accused) > 0.5
    assert trial.state_healthy and trial.began_at is None


@pytest.mark.slow
def test_an_accepted_poison_that_did_its_damage_later_is_found_by_replay(stage, documents_at):
    staged = accepted_poison(stage, documents_at, 0)
    trial = run_trial(staged.job, staged.scene, staged.earlier, BUDGET_S)
    assert staged.judged_rightly(trial), trial
    assert not trial.state_healthy and "1-token pattern" in trial.reason + trial.accused[0].excerpt


def test_a_flipped_bit_names_its_tensor(stage, documents_at):
    job, scene, earlier = stage(0)
    name = "blocks.1.ffn.up.weight"
    job.engine.model.get_parameter(name).detach().view(-1)[7] = 1e30
    scene.loss = scene.grad_norm = float("nan")
    trial = run_trial(job, scene, earlier, BUDGET_S)
    assert trial.verdict == "hardware" and not trial.state_healthy
    assert f"{name} (1 of 2048 elements, largest change 1e+30)" in trial.reason
    assert trial.began_at == SCENE_AT - 1
    assert any(layer.name.startswith("blocks.1.ffn") and layer.quantity != "gradient norm" for layer in trial.layers)


def test_weights_that_are_not_numbers_are_named(stage):
    job, scene, earlier = stage(0)
    job.engine.model.blocks[0].ffn.gate.weight.detach()[3, :5] = float("nan")
    scene.loss = scene.grad_norm = float("nan")
    trial = run_trial(job, scene, earlier, BUDGET_S)
    found = [(layer.name, layer.value) for layer in trial.layers if layer.quantity == "non-finite weights"]
    assert trial.verdict == "hardware" and found == [("blocks.0.ffn.gate.weight", 5.0)]


@pytest.mark.parametrize("fails", [["try_documents", "try_earlier_weights", "replays"], ["replays"]])
def test_an_experiment_that_raises_is_named_and_leaves_nothing_behind(stage, documents_at, monkeypatch, fails):
    staged = (random_tokens if len(fails) > 1 else flipped_bit)(stage, documents_at, 0)

    def break_things(context):
        with torch.no_grad():
            for parameter in context.job.engine.model.parameters():
                parameter.zero_()
                parameter.grad = torch.ones_like(parameter)
        torch.rand(3)
        raise RuntimeError("out of memory")

    for name in fails:
        monkeypatch.setattr(trial_module, name, break_things)
    before = bits(staged.job)
    trial = run_trial(staged.job, staged.scene, staged.earlier, BUDGET_S)
    assert sum("RuntimeError: out of memory" in line for line in trial.cut_short) == len(fails)
    assert same(before, bits(staged.job))
    assert all(parameter.grad is None for parameter in staged.job.engine.model.parameters())


def test_an_interrupt_leaves_nothing_behind_either(stage, documents_at, monkeypatch):
    staged = flipped_bit(stage, documents_at, 0)
    before = bits(staged.job)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("bessemer.trial.trial.tensor_differences", stop)
    with pytest.raises(KeyboardInterrupt):
        run_trial(staged.job, staged.scene, staged.earlier, BUDGET_S)
    assert same(before, bits(staged.job))


def test_without_time_it_says_what_it_left_out_and_claims_nothing(stage, documents_at):
    staged = random_tokens(stage, documents_at, 0)
    trial = run_trial(staged.job, staged.scene, staged.earlier, budget_s=0.0)
    assert (trial.verdict, trial.confidence) == ("undetermined", 0.0)
    assert {"other batches", "documents", "earlier weights", "replay"} <= set(trial.cut_short)
    assert not any(accused.convicted for accused in trial.accused)


def test_without_earlier_states_a_jump_of_the_rate_is_circumstantial(stage, documents_at):
    staged = lr_jump(stage, documents_at, 0)
    trial = run_trial(staged.job, staged.scene, [], BUDGET_S)
    assert (trial.verdict, trial.confidence) == ("learning rate", 0.5)
    assert trial.cut_short == ["replay: no earlier state"]
    assert any("learning rate" in line and "schedule says" in line for line in trial.changes)


def test_a_jump_that_the_schedule_itself_makes_is_found(stage, documents_at):
    job, scene, earlier = stage(0, faults={"rates": {SCENE_AT - 2: 60.0}})
    planned = job.lr
    job.lr = lambda step: planned(step) * (60.0 if step == SCENE_AT - 2 else 1.0)
    trial = run_trial(job, scene, earlier, BUDGET_S)
    assert (trial.verdict, trial.began_at) == ("learning rate", SCENE_AT - 2)


def test_a_healthy_step_is_not_accused(stage, documents_at):
    staged = healthy(stage, documents_at, 0)
    trial = run_trial(staged.job, staged.scene, staged.earlier, BUDGET_S)
    assert trial.state_healthy and not trial.accused and "no fault" in trial.reason
    assert trial.spread == 0.0
