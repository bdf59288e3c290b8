"""LoRA's arithmetic, and settings of tuning as they were released."""

import pytest

from bessemer.errors import UserError
from bessemer.plan.recipe import fine_tuning as tuning
from bessemer.plan.recipe.fine_tuning import lora, lora_parameters
from bessemer.spec.shape import preset, with_vocab

LLAMA_2, LLAMA_3 = (with_vocab(preset(name), vocab) for name, vocab in (("7B", 32_000), ("8B", 128_256)))  # type: ignore[arg-type]


def test_parameters_of_seven_modules_at_rank_64() -> None:
    assert lora_parameters(LLAMA_2, 64) == 159_907_840  # 160M, 2.4 %
    assert lora_parameters(LLAMA_3, 64) == 167_772_160  # 168M, 2.1 %
    assert lora_parameters(LLAMA_2, 64) / LLAMA_2.parameters == pytest.approx(0.024, abs=5e-4)
    assert lora_parameters(LLAMA_2, 8, ("q", "v")) == 32 * 8 * 2 * 2 * 4096


def test_rank_grows_with_what_is_to_be_learnt() -> None:
    few, many, most = (lora(LLAMA_3, "instructions", 1e-5, tokens).value for tokens in (1e6, 5e8, 1e12))
    assert (few.rank, most.rank) == (32, 256) and few.rank < many.rank <= 256
    assert few.alpha == 2 * few.rank and few.learning_rate == pytest.approx(1e-4)
    assert "full fine-tuning" in lora(LLAMA_3, "instructions", 1e-5, 1e12).reason
    assert lora(LLAMA_3, "rl", 1e-6, 1e12).value.rank == 8


def test_released_rates() -> None:
    assert tuning.sft(8e9).value.settings["learning_rate"] == 5e-6
    assert tuning.sft(70e9).value.settings["learning_rate"] == 2e-6
    assert tuning.dpo(8e9).value.settings["learning_rate"] == 5e-7
    assert tuning.dpo(70e9, lora=True).value.settings["learning_rate"] == 2e-6
    assert 2e-7 < tuning.dpo(30e9).value.settings["learning_rate"] < 5e-7
    assert tuning.simpo(8e9).value.settings["gamma"] == 1.375
    assert tuning.ppo().value.settings["kl"] == 0.05


def test_rl_against_a_learned_reward_has_a_kl_term() -> None:
    assert tuning.grpo(8e9, verifiable=False).value.settings["kl"] >= 0.05
    assert tuning.grpo(8e9).value.settings["kl"] > 0


@pytest.mark.parametrize(("good", "bad"), [(1000, 4000), (4000, 1000), (500, 500)])
def test_kto_weights_lie_in_the_paper_s_band(good: int, bad: int) -> None:
    found = tuning.kto(8e9, good, bad).value.settings
    ratio = found["desirable_weight"] * good / (found["undesirable_weight"] * bad)
    assert 1 <= ratio <= 4 / 3 and min(found["desirable_weight"], found["undesirable_weight"]) == 1


def test_nonsense_is_one_line() -> None:
    with pytest.raises(UserError, match="rank"):
        lora_parameters(LLAMA_2, 0)
    with pytest.raises(UserError, match="use"):
        lora(LLAMA_2, "speed", 1e-5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="some of both"):
        tuning.kto(8e9, 10, 0)
    with pytest.raises(UserError, match="parameters"):
        tuning.dpo(0)
