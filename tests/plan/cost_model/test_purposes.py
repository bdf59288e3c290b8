"""Memory of adapters, preferences, PPO and inference, against the arithmetic of the papers done by hand."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from bessemer.errors import UserError
from bessemer.plan.cost_model.memory import Passes, rank_needs
from bessemer.plan.cost_model.purposes import Use, fit_purpose, purpose_json, purpose_lines, purpose_needs
from bessemer.plan.search.layout import ONE_PROCESS, Layout
from bessemer.spec.optimizer import MemorySpec, OptimizerSpec, optimizer_bytes
from bessemer.spec.shape import PRESETS, with_vocab

SMALL, LARGE = with_vocab(PRESETS["7B"], 32_000), with_vocab(PRESETS["70B"], 128_256)
ROW = Passes(2048, 1, "bf16", "selective", True)
EACH = optimizer_bytes(OptimizerSpec(), MemorySpec(), "bf16")


def test_training_is_the_memory_of_a_rank() -> None:
    found = purpose_needs("training", SMALL, ONE_PROCESS, ROW)
    assert found.total == rank_needs(SMALL, ONE_PROCESS, EACH, ROW).total
    assert found.parts["moments"] == 8 * SMALL.parameters and found.parts["weights"] == 4 * SMALL.parameters


def test_lora_has_states_for_its_adapters_alone() -> None:
    """Rank 64 on seven matrices of 7B: 32 layers x 64 x (4 x 2 x 4096 + 3 x (4096 + 11008)) = 160M parameters."""
    found = purpose_needs("lora", SMALL, ONE_PROCESS, ROW, rank=64)
    adapters = 32 * 64 * (4 * 2 * 4096 + 3 * (4096 + 11_008))
    assert adapters == 159_907_840
    assert found.parts["weights"] == 2 * SMALL.parameters
    assert found.parts["gradients"] == found.parts["moments"] == 0
    assert found.parts["adapters"] == (4 + 4 + 8 + 2) * adapters
    assert "160M parameters (2.4%)" in found.notes[0]
    full = purpose_needs("training", SMALL, ONE_PROCESS, ROW)
    assert found.total < full.total / 5
    assert found.parts["the rest"] < full.parts["the rest"]  # no gradient of the head


def test_qlora_keeps_layers_in_half_a_byte() -> None:
    """70B in 4 bits is about 36 GB and its two embeddings in 16 bits 4.2: one card of 80 GB."""
    found = purpose_needs("qlora", LARGE, ONE_PROCESS, ROW)
    ends = 2 * 128_256 * 8192
    assert found.parts["weights"] == pytest.approx(0.516 * (LARGE.parameters - ends) + 2 * ends, rel=1e-3)
    assert 38e9 < found.parts["weights"] < 40e9
    assert fit_purpose("qlora", LARGE, "A100-80GB", 2048).fits
    assert not fit_purpose("lora", LARGE, "A100-80GB", 2048).fits


def test_dpo_is_training_on_pairs_beside_a_reference() -> None:
    found = purpose_needs("dpo", SMALL, ONE_PROCESS, ROW)
    both = rank_needs(SMALL, ONE_PROCESS, EACH, replace(ROW, rows=2))
    assert found.parts["reference"] == 2 * SMALL.parameters
    assert found.total == both.total + 2 * SMALL.parameters


def test_ppo_holds_four_models() -> None:
    """Two that learn (weights and moments 12 bytes each, one of them with gradients and casts, 6 more), two read."""
    found = purpose_needs("ppo", SMALL, ONE_PROCESS, ROW)
    parts, size = found.parts, SMALL.parameters
    assert found.moment == "at the loss"
    assert parts["critic"] == 12 * size and parts["reference"] == parts["reward model"] == 2 * size
    models = parts["weights"] + parts["gradients"] + parts["moments"] + parts["gathered"]
    assert models == 18 * size
    many = purpose_needs("ppo", SMALL, Layout(dp_shard=64), replace(ROW, rows=64, activations="full"))
    assert many.moment == "during a rollout" and many.parts["cache"] == 64 * 2048 * 2 * 32 * 4096 * 2


def test_inference_is_weights_and_cache() -> None:
    """A token of 7B keeps 2 x 32 layers x 4096 x 2 bytes: half a megabyte; of 70B with 8 KV heads 320 KiB."""
    found = purpose_needs("inference", SMALL, ONE_PROCESS, replace(ROW, rows=8))
    assert found.parts["weights"] == 2 * SMALL.parameters
    assert found.parts["cache"] == 8 * 2048 * 524_288
    split = purpose_needs("inference", LARGE, Layout(tp=16), replace(ROW, rows=8))
    assert split.parts["weights"] == pytest.approx(2 * LARGE.parameters / 16)
    assert split.parts["cache"] == 8 * 2048 * 327_680 // 8  # keys and values of 8 heads are on two GPUs each
    fewer = purpose_needs("inference", LARGE, ONE_PROCESS, ROW, served="fp8")
    assert fewer.parts["weights"] == LARGE.parameters


@pytest.mark.parametrize("use", get_args(Use))
def test_more_gpus_never_hold_less(use: Use) -> None:
    one, eight = (fit_purpose(use, SMALL, gpus, 2048) for gpus in ("A100-80GB", "8xA100-80GB"))
    assert eight.fits and (eight.rows >= one.rows or not one.fits)
    assert eight.needs.total <= 0.94 * eight.cluster.gpu.memory_bytes
    assert sum(purpose_json(eight)["memory_bytes"].values()) == 2 * eight.needs.total


def test_what_does_not_fit_says_by_how_much_and_what_to_take() -> None:
    found = fit_purpose("training", SMALL, "A100-80GB", 2048)
    assert not found.fits and found.rows == 1 and found.activations == "full"
    assert any(line.startswith("  short   by ") and "use lora" in line for line in purpose_lines(found))


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("nonsense", "--model", "7b", "--gpus", "A100"), "memory nonsense: write training, lora"),
        (("lora", "--model", "7b", "--gpus", "A100", "--rank", "0"), "rank: 0"),
        (("inference", "--model", "7b", "--gpus", "A100", "--precision", "bf8"), "--precision bf8"),
    ],
)
def test_nonsense_is_one_line(words: tuple[str, ...], fault: str, monkeypatch: Any) -> None:
    from bessemer.cli.main import app

    with pytest.raises(UserError, match=fault) as caught:
        app(["plan", "memory", *words], standalone_mode=False)
    assert "\n" not in str(caught.value)


def test_on_the_command_line(capsys: Any) -> None:
    from bessemer.cli.main import app

    app(
        ["plan", "memory", "qlora", "--model", "70b", "--gpus", "A100-80GB", "--context", "2048"], standalone_mode=False
    )
    said = capsys.readouterr().out
    assert "for qlora on 1 x A100-80GB" in said and "NF4" in said and "short" not in said
