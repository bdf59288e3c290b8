"""Nothing is dropped in silence: each key of the spec, set on its own, shows in the files or in the notes."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from bessemer.errors import UserError
from bessemer.launch import emit as module
from bessemer.launch.emit import FRAMEWORKS, EmittedFiles, KeyCoverage, RunToEmit, changed_keys, render
from bessemer.session import start as dry
from bessemer.spec.schema import RunSpec

# Say nothing of training, name what is not there, are worth nothing alone, or are done with once data is prepared.
LEFT_OUT = {
    "tokenizer.sample", "data.bad_rows",
    "name", "runs", "objective", "start_from", "model.hf", "model.wrap", "model.preset", "tokenizer.path",
    "data.exclude", "model.mup_width", "tokenizer.pattern", "tokenizer.learn", "data.sources", "data.mix",
    "parallel.threads", "lints.silence",
}  # fmt: skip
SHARED = {"spec.yaml", "plan.json", "settings.json", "data.json", "model.json", "tokenizer.json", "NOTES.md"}
# Values that a tiny run can have, where the example of the reference is too large or the default.
VALUES: dict[str, Any] = {
    "model.width": 64, "model.layers": 3, "model.heads": 8, "model.kv_heads": 4, "model.head_dim": 16, "model.ffn": 96,
    "model.tied": False, "model.causal": False, "model.gated": False, "model.qkv_bias": True, "model.out_bias": True,
    "model.ffn_bias": True, "model.activation": "gelu", "model.norm": "layer", "model.norm_place": "post",
    "model.parallel": "one_norm", "model.positions": "learned", "model.windows": [8, 0], "model.init": "depth",
    "model.mixers": None, "model.norm_eps": 1e-4, "model.rope": {"theta": 500_000.0},
    "model.moe": {"experts": 4, "top_k": 2}, "tokenizer.vocab": 280, "tokenizer.kind": "unigram", "data.context": 16,
    "data.phases": [{"start": 640, "weights": {"words": 1.0}}], "budget.tokens": 2560, "budget.epochs": 1.0,
    "budget.steps": 10, "budget.batch": 512, "budget.micro_batch": 4, "optimizer.name": "sgd", "optimizer.lr": 3e-4,
    "budget.batch_changes": [{"from_step": 10, "batch": 512}], "optimizer.betas": [0.8, 0.9], "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.2, "optimizer.clip": 0.5, "schedule.kind": "linear", "schedule.floor": 0.2,
    "schedule.warmup": 6, "seed": 7, "precision": "bf16", "compile": "block", "parallel.dp_replicate": 2,
    "parallel.dp_shard": 2, "parallel.tp": 2, "parallel.cp": 2, "parallel.pp": 2, "parallel.ep": 2,
    "parallel.deepspeed.zero": 3,
    "tasks": ["prefix"], "checkpoint.every": 7, "checkpoint.asynchronous": True, "checkpoint.keep_last": 5,
    "data.validation": 0.2, "data.packing": "pad", "guard.forget": {"sources": ["words"]}, "parallel.device": "auto",
    "data.clean": ["whitespace"], "data.curriculum.by": "length", "memory.activations": "full",
    "model.mamba": {"heads": 2, "head_dim": 32, "state": 16}, "model.mla": None, "model.local_theta": None,
    "optimizer.lookahead": {"every": 7},
    "dpo.alpha": None,  # of a divergence that is not the default
}  # fmt: skip


def keys_of(kind: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a section with a value that is not its default."""
    for name, field in kind.model_fields.items():
        key = f"{above}{name}"
        inner = field.annotation
        if key in LEFT_OUT or (key in VALUES and VALUES[key] is None):
            continue
        if key not in VALUES and isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{key}.")
            continue
        value = VALUES.get(key, (field.examples or [None])[0])
        default = field.get_default(call_default_factory=True)
        if isinstance(default, bool):
            value = not default
        elif isinstance(default, (int, float)) and default and key not in VALUES:  # examples are often the default
            timed = str(value).endswith(("s", "min", "h"))
            value = f"{default * 2:g}s" if timed else default * 2 if isinstance(default, int) else default * 0.9
        if value is not None and value != default:
            yield key, value


KEYS = dict(keys_of(RunSpec))


# What the scripts read from the shared files: the plan's numbers that they use, and the model.
USED = ("context", "batch_rows", "micro_rows", "total_steps", "peak_lr", "warmup_steps", "mixtures")
OUR_BATCHES = ("accelerate", "deepspeed", "torchtitan")
# Read from spec.yaml by our own stream, and by what makes the first weights.
THROUGH_THE_SPEC = {"seed", "schedule.kind", "schedule.floor", "model.init"}


def code(framework: str, made: EmittedFiles) -> dict[str, Any]:
    """What the framework goes by: its files without comments, which repeat the notes, and what is read of ours."""
    found: dict[str, Any] = {
        name: "\n".join(line.split("  # ")[0] for line in text.splitlines() if not line.startswith("#"))
        for name, text in made.files.items()
        if name not in SHARED
    }
    if framework in OUR_BATCHES:
        settings = json.loads(made.files["settings.json"])
        found["settings"] = {key: settings[key] for key in USED}
    if framework != "megatron":
        found["model"] = made.files["model.json"]
    return found | {"tokenizer": made.files["tokenizer.json"]}


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return dict(value)


@pytest.fixture(scope="module", autouse=True)
def _one_measurement() -> Iterator[None]:
    """The machine is measured once for all these runs."""
    kept = dry.measure_machine
    dry.measure_machine = functools.cache(kept)  # type: ignore[assignment]
    yield
    dry.measure_machine = kept


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return base | {
        k: merged(base[k], v) if isinstance(v, dict) and isinstance(base.get(k), dict) else v for k, v in over.items()
    }


def with_key(tiny: Callable[..., RunSpec], key: str, value: Any) -> RunSpec:
    data = merged(tiny().model_dump(exclude_defaults=True), nested(key, value))
    if key in ("budget.tokens", "budget.epochs"):
        del data["budget"]["steps"]
    try:
        return RunSpec.model_validate(data)
    except ValidationError as error:
        raise AssertionError(f"{key}: no value of its own in VALUES: {error}") from None


def check(tiny: Callable[..., RunSpec], base: dict[str, dict[str, Any]], key: str, value: Any) -> list[str]:
    """The frameworks that say nothing of a key."""
    spec, silent = with_key(tiny, key, value), []
    if not any(found == key or found.startswith(f"{key}.") for found in changed_keys(spec)):
        return ["nobody: the value is the default, give it another in VALUES"]
    try:
        run = module.resolve(spec, Path("out"))
    except UserError:  # refused before any framework was asked
        return []
    for framework in FRAMEWORKS:
        try:
            made = render(framework, run)
        except UserError as error:
            if key.split(".")[-1] not in str(error) and "no family" not in str(error):
                silent.append(f"{framework} refuses it without its name: {error}")
            continue
        named = (note.split(": ")[0] for note in made.notes)
        noted = any(name in (key, key.rpartition(".")[0]) or name.startswith(f"{key}.") for name in named)
        ours = framework in OUR_BATCHES and (key.startswith("data.") or key in THROUGH_THE_SPEC)
        ours |= framework == "accelerate" and key.startswith("schedule.")  # its rates are those of `run_schedule`
        if not noted and not ours and code(framework, made) == base[framework]:
            silent.append(framework)
    return silent


@pytest.fixture(scope="module")
def base(tiny: Callable[..., RunSpec]) -> dict[str, dict[str, Any]]:
    run = module.resolve(tiny(), Path("out"))
    return {framework: code(framework, render(framework, run)) for framework in FRAMEWORKS}


def test_the_walk_meets_most_of_the_spec() -> None:
    assert len(KEYS) > 110
    assert {"guard.window", "loss.z", "optimizer.ema", "data.noise.replace", "model.attention_cap"} <= set(KEYS)


@pytest.mark.parametrize(
    "key", ["guard.window", "loss.z", "optimizer.ema", "optimizer.clip", "precision", "parallel.tp"]
)
def test_a_key_is_said_or_noted(tiny: Callable[..., RunSpec], base: dict[str, dict[str, Any]], key: str) -> None:
    assert check(tiny, base, key, KEYS[key]) == []


@pytest.mark.slow
def test_every_key_is_said_or_noted(tiny: Callable[..., RunSpec], base: dict[str, dict[str, Any]]) -> None:
    silent = {key: found for key, value in KEYS.items() if (found := check(tiny, base, key, value))}
    assert not silent, "\n" + "\n".join(f"{key}: {found}" for key, found in silent.items())


def test_a_key_that_nobody_speaks_of_becomes_a_note(tiny: Callable[..., RunSpec]) -> None:
    ledger = KeyCoverage(with_key(tiny, "optimizer.ema", 0.99), "somewhere")
    ledger.cover("data", "model")
    line = "optimizer.ema: 0.99 has no counterpart in somewhere: weights are not averaged"
    assert line in ledger.notes()
    assert not any(note.startswith("model.width") for note in ledger.notes())
    ledger.cover("optimizer")
    assert line not in ledger.notes()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_secret_and_no_notes_are_lost(resolved: Callable[..., RunToEmit], framework: str) -> None:
    made = render(framework, resolved(optimizer={"ema": 0.99}))
    for note in made.notes:
        assert note in made.files["NOTES.md"]
    assert made.command in made.files["NOTES.md"]
