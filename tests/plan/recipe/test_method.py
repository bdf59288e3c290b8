"""The fine-tuning method: every branch of the choice once."""

from typing import Any

import pytest

from bessemer.errors import UserError
from bessemer.plan.recipe.fine_tuning import choose_method, method_bytes

GB = 1e9
BRANCHES: list[tuple[str, dict[str, Any], str, str, tuple[str, ...]]] = [
    ("text for knowledge", {"goal": "knowledge", "data": "text"}, "continue", "full", ("continue",)),
    ("text for anything else", {"goal": "format", "data": "text"}, "prompting", "none", ("prompting",)),
    ("demonstrations", {"goal": "instructions", "data": "demonstrations"}, "sft", "full", ("sft",)),
    ("very few of them", {"data": "demonstrations", "rows": 20}, "prompting", "none", ("prompting",)),
    ("few of them", {"data": "demonstrations", "rows": 300}, "sft", "lora", ("sft",)),
    ("pairs", {"goal": "preferences", "data": "pairs"}, "dpo", "full", ("sft", "dpo")),
    ("pairs on an aligned model", {"data": "pairs", "aligned": True}, "dpo", "full", ("dpo",)),
    ("few pairs", {"data": "pairs", "rows": 100}, "sft", "lora", ("sft",)),
    ("ratings", {"goal": "preferences", "data": "ratings"}, "kto", "full", ("sft", "kto")),
    ("few ratings", {"data": "ratings", "rows": 100}, "sft", "lora", ("sft",)),
    ("a verifier", {"goal": "reasoning", "data": "verifier", "aligned": True}, "rl", "full", ("rl",)),
    ("few tasks to verify", {"data": "verifier", "rows": 50}, "sft", "lora", ("sft",)),
    ("prompts and a reward", {"goal": "preferences", "data": "prompts", "aligned": True}, "rl", "full", ("rl",)),
    ("prompts alone", {"goal": "knowledge", "data": "prompts"}, "prompting", "none", ("prompting",)),
    ("one 80 GB card", {"memory_bytes": 80 * GB}, "sft", "lora", ("sft",)),
    ("one 12 GB card", {"memory_bytes": 12 * GB}, "sft", "qlora", ("sft",)),
]


@pytest.mark.parametrize(("name", "wish", "objective", "weights", "stages"), BRANCHES, ids=[row[0] for row in BRANCHES])
def test_branch(name: str, wish: dict[str, Any], objective: str, weights: str, stages: tuple[str, ...]) -> None:
    plain = {"goal": "instructions", "data": "demonstrations", "rows": 20_000, "parameters": 7e9,
             "memory_bytes": 8 * 80 * GB}  # fmt: skip
    found = choose_method(**(plain | wish))
    assert (found.value.objective, found.value.weights, found.value.stages) == (objective, weights, stages)
    assert found.reason and found.source
    assert found.value.needed_bytes <= (plain | wish)["memory_bytes"]


def test_facts_from_demonstrations_are_warned_of() -> None:
    found = choose_method("knowledge", "demonstrations", 5000, 7e9, 640 * GB)
    assert found.value.objective == "sft" and "invention" in found.reason


def test_bytes_of_a_parameter() -> None:
    assert method_bytes("sft", "full", 7e9) == pytest.approx(4e9 + 1.2 * 18 * 7e9)
    assert method_bytes("dpo", "full", 7e9) - method_bytes("sft", "full", 7e9) == pytest.approx(1.2 * 2 * 7e9)
    assert method_bytes("sft", "qlora", 70e9) < 80e9  # 70B in 4 bits trains on one 80 GB card


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"goal": "fame"}, "goal"),
        ({"data": "rumours"}, "data"),
        ({"rows": 0}, "rows"),
        ({"parameters": -1}, "parameters"),
        ({"memory_bytes": 1e9}, "QLoRA"),
    ],
)
def test_nonsense_is_one_line(wish: dict[str, Any], said: str) -> None:
    plain = {"goal": "instructions", "data": "demonstrations", "rows": 2000, "parameters": 7e9, "memory_bytes": 80 * GB}
    with pytest.raises(UserError, match=said):
        choose_method(**(plain | wish))
