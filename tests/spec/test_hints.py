"""Keys of other tools lead to ours, and only to keys that exist."""

import pytest
import yaml

from bessemer.spec import hints
from bessemer.spec.document import parse_yaml
from bessemer.spec.load import SpecError, _field, _fields_at, validate
from bessemer.spec.paths import path_problems
from bessemer.spec.schema import RunSpec

GOOD = {"model": "1M", "data": {"sources": {"web": "x.jsonl"}}}


def problems(**more: object) -> list[str]:
    with pytest.raises(SpecError) as refused:
        validate(parse_yaml(yaml.safe_dump(GOOD | more), "run.yaml"))
    return refused.value.problems


@pytest.mark.parametrize("key", hints.FOREIGN)
def test_every_hint_names_a_key_of_the_schema(key: str) -> None:
    assert _field(tuple(key.split("."))) is not None


def test_no_foreign_name_is_listed_twice_or_is_a_section_of_ours() -> None:
    names = [name for foreign, _ in hints.FOREIGN.values() for name in foreign.split()]
    assert len(names) == len(set(names)) > 200
    ours = {key for section in ("", *RunSpec.model_fields) for key in _fields_at((section,) if section else ()) or {}}
    assert ours & set(names) == {
        "deepspeed",
        "max_tokens",
    }  # elsewhere a path and the length of a run, here of the section rl


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("lora", "adapter.kind"),
        ("per_device_train_batch_size", "budget.micro_batch"),
        ("gradient_accumulation_steps", "budget.batch"),
        ("learning_rate", "optimizer.lr"),
        ("Learning-Rate", "optimizer.lr"),
        ("num_train_epochs", "budget.epochs"),
        ("bf16", "precision"),
        ("sequence_len", "data.context"),
        ("output_dir", "runs"),
        ("deepspeed", "parallel.engine"),
        ("warmup_ratio", "schedule.warmup"),
        ("rope_theta", "model.rope.theta"),
    ],
)
def test_a_name_of_another_tool(name: str, key: str) -> None:
    (line,) = problems(**{name: 1})
    assert f": {name}: unknown key; in Bessemer it is {key}" in line


def test_another_tools_name_for_a_required_key_is_one_mistake() -> None:
    with pytest.raises(SpecError) as refused:
        validate(parse_yaml("base_model: x\ndatasets: [y]\n", "run.yaml"))
    assert [line.split(":")[2].strip() for line in refused.value.problems] == ["base_model", "datasets"]


def test_unknown_keys_of_an_optional_section_name_the_known_ones() -> None:
    (line,) = problems(model={"preset": "1M", "rope": {"thetta": 2.0}})
    assert line.endswith("unknown key; did you mean theta?")


def test_of_thousands_of_problems_the_first_are_shown() -> None:
    with pytest.raises(SpecError) as refused:
        validate(parse_yaml(yaml.safe_dump(GOOD | {f"key{i}": 1 for i in range(1000)}), "run.yaml"))
    lines = str(refused.value).splitlines()
    assert len(refused.value.problems) == 1000 and len(lines) == 21
    assert lines[-1] == "and 980 more problems; fix these first"


@pytest.mark.parametrize(
    ("key", "value", "written"),
    [
        ("learning_rate", 2e-5, "lr: 2e-05"),
        ("num_epochs", 3, "epochs: 3"),
        ("max_seq_length", "2K", "context: 2K"),
        ("fp16", "yes", "precision: fp16"),
        ("fp16", False, "precision: auto"),
        ("torch_dtype", "bfloat16", "precision: bf16"),
        ("dp", 2, "dp_replicate: 2"),
        ("tensor_parallel", 4, "tp: 4"),
        ("pipeline_parallel", 4, "pp: 4"),
        ("save_steps", 500, "every: 500"),
    ],
)
def test_the_hint_has_the_users_own_value(key: str, value: object, written: str) -> None:
    for line in (*problems(**{key: value}), *problems(parallel={key: value})):
        assert f"; write {written} (" in line
    (line,) = problems(**{key: ["x"]})
    assert "; write " not in line and "; for example " in line


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "min_lr", "wandb_project", "evals_per_epoch"])
def test_a_value_of_another_unit_or_meaning_is_not_repeated(key: str) -> None:
    (line,) = problems(**{key: 1})
    assert "; write " not in line and "; for example " in line


@pytest.mark.parametrize(
    ("key", "value", "written"),
    [
        ("optimizer", "adamw", "optimizer: {name: adamw}"),
        ("budget", "50M", "budget: {tokens: 50M}"),
        ("tokenizer", "gpt2", "tokenizer: {path: gpt2}"),
        ("guard", "off", "guard: {enabled: false}"),
        (
            "lints",
            "off",
            "keys below it, such as lints: {silence: [no_warmup]} (warnings and checks to silence for this run)",
        ),
    ],
)
def test_a_value_in_the_place_of_a_section_gets_its_key(key: str, value: str, written: str) -> None:
    (line,) = problems(**{key: value})
    assert line.endswith(f"expected a mapping of keys, got '{value}'; write {written}")


def test_a_model_of_the_hub_gets_the_command_that_fetches_it() -> None:
    spec = validate(
        parse_yaml(
            yaml.safe_dump(GOOD | {"model": {"hf": "meta-llama/Llama-3-8B"}, "start_from": "org/base"}), "run.yaml"
        )
    )
    told = dict(path_problems(spec))
    assert "`hf download meta-llama/Llama-3-8B --local-dir Llama-3-8B`" in told["model", "hf"]
    assert "hf download" not in told["start_from",]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("num_generations", "rl.samples"),
        ("max_completion_length", "rl.max_tokens"),
        ("beta", "rl.kl.beta"),
        ("num_iterations", "rl.epochs"),
        ("reward_weights", "rl.rewards"),
    ],
)
def test_names_of_trls_grpo_are_answered_with_ours(name: str, key: str) -> None:
    assert hints.our_key(name, "grpo") == key != hints.our_key(name)
    assert "answers alone" not in hints.note_on(name, key)


def test_every_name_of_rl_leads_to_a_key() -> None:
    assert all(_field(tuple(key.split("."))) is not None for key in hints._OF_RL.values())
    (line,) = problems(objective="grpo", rl={"num_generations": 4, "rewards": {"right": "exact"}})
    assert "rl.samples" in line
