"""The choice of an attention backend: who may enter, who is dropped and why; on a GPU, every backend for real."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer.errors import UserError
from bessemer.model import attention_backends as backends
from bessemer.model.attention import attend
from bessemer.model.attention_backends import (
    TOLERANCE,
    BackendChoice,
    BackendTiming,
    candidates,
    choose,
    compare_backends,
    largest_error,
    set_backend,
    verify_long_rows,
)
from bessemer.model.attention_mask import AttentionMask
from bessemer.model.transformer import Decoder
from bessemer.spec.shape import Mla, ModelShape

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16
Shapes = Callable[..., ModelShape]


@pytest.mark.parametrize(
    ("fields", "packed", "names"),
    [
        ({}, False, ["sdpa", "cudnn", "flash", "efficient", "varlen", "math"]),
        ({}, True, ["sdpa", "cudnn", "efficient", "flex", "varlen", "math"]),
        ({"windows": (0, 256)}, False, ["sdpa", "cudnn", "efficient", "flex", "varlen", "math"]),
        ({"windows": (4096,)}, False, ["sdpa", "cudnn", "flash", "efficient", "varlen", "math"]),
        ({"attention_cap": 50.0}, False, ["flex", "math"]),
        ({"positions": "relative"}, False, ["sdpa", "efficient", "math"]),
        ({"mla": Mla(32, 128, 64, 128)}, False, ["sdpa", "cudnn", "efficient", "math"]),
    ],
)
def test_candidates_are_those_that_can_serve_every_layer(
    shape_of: Shapes, fields: dict[str, Any], packed: bool, names: list[str]
) -> None:
    shape = shape_of(**({"head_dim": 64} | fields))
    assert candidates(shape, CUDA, BF16, packed) == names
    without = candidates(shape, CUDA, BF16, packed, dropout=True)
    assert without == [name for name in names if name not in ("flex", "varlen")]


def test_a_cpu_takes_sdpa_or_the_reference_and_measures_nothing(shape_of: Shapes) -> None:
    plain = choose(shape_of(), 64, 2, torch.float32, CPU, packed=True)
    capped = choose(shape_of(attention_cap=30.0), 64, 2, torch.float32, CPU, packed=True)
    assert (plain.name, plain.times, capped.name) == ("sdpa", {}, "math")
    assert "not measured" in plain.reason and "cpu" in plain.reason


def trial_of(shape: ModelShape, window: int = 0, packed: bool = True, prefix: bool = False) -> BackendTiming:
    return BackendTiming(shape, window, 48, 2, torch.float64, CPU, packed, prefix)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"attention_cap": 5.0}, {"positions": "alibi"}, {"positions": "relative"}, {"causal": False},
        {"blocks": (8, 1)}, {"mla": Mla(8, 4, 4, 6)}, {"attention_scale": 0.7},
    ],
)  # fmt: skip
@pytest.mark.parametrize("window", [0, 7])
def test_the_check_in_chunks_agrees_with_whole_attention(
    shape_of: Shapes, fields: dict[str, Any], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "CHUNK", 10)
    for prefix in (False, True):
        assert trial_of(shape_of(**fields), window, prefix=prefix).error("sdpa") < 1e-12


def with_faults(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor, dict[str, Any]], Tensor]) -> None:
    """A backend `broken`, which does to the output what the test says."""

    def faulty(*args: Any, backend: str, **options: Any) -> Tensor:
        if backend != "broken":
            return attend(*args, backend=backend, **options)
        return fault(attend(*args, **options), {"args": args})

    monkeypatch.setattr(backends, "attend", faulty)


def leak(out: Tensor, call: dict[str, Any]) -> Tensor:
    """A window that is one position too wide."""
    q, k, v, attention_mask, window, *rest = call["args"]
    return attend(q, k, v, AttentionMask(attention_mask.documents_BT), window + 1, *rest)


def ignore_documents(out: Tensor, call: dict[str, Any]) -> Tensor:
    q, k, v, _, *rest = call["args"]
    return attend(q, k, v, AttentionMask(), *rest)


def fail(out: Tensor, call: dict[str, Any]) -> Tensor:
    raise RuntimeError("no kernel for this head\nand a long trace")


def no_gradient_of_one(out: Tensor, call: dict[str, Any]) -> Tensor:
    return torch.cat((out[:, :-1], out[:, -1:].detach()), dim=1)


def poison(out: Tensor, call: dict[str, Any]) -> Tensor:
    return torch.where(torch.arange(out.shape[1])[:, None, None] == 5, torch.nan, out)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (leak, "error "), (ignore_documents, "error "), (no_gradient_of_one, "error "), (poison, "error nan"),
        (fail, "no kernel for this head"),
    ],
)  # fmt: skip
def test_a_wrong_or_failing_backend_is_dropped_with_the_reason(
    shape_of: Shapes, monkeypatch: pytest.MonkeyPatch, fault: Any, why: str
) -> None:
    with_faults(monkeypatch, fault)
    shape = shape_of(windows=(7,))
    choice = compare_backends(["broken", "sdpa"], {7: trial_of(shape, 7)}, Counter({7: 2}), budget_s=0.01)
    assert choice.name == "sdpa" and set(choice.times) == {"sdpa"}
    assert choice.dropped["broken"].startswith(why) and "trace" not in choice.reason
    assert f"broken dropped: {choice.dropped['broken']}" in choice.reason
    assert choice.errors["sdpa"] < 1e-12 and not choice.errors.get("broken", 1.0) < 0.01  # nor NaN
    alone = compare_backends(["broken"], {7: trial_of(shape, 7)}, Counter({7: 2}), budget_s=0.01)
    assert alone.name == "math"


@pytest.mark.parametrize("fields", [{}, {"attention_cap": 5.0}, {"mla": Mla(8, 4, 4, 6)}, {"positions": "alibi"}])
@pytest.mark.parametrize("window", [0, 7])
def test_the_end_of_a_row_is_checked_without_the_rest(
    shape_of: Shapes, fields: dict[str, Any], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "CHUNK", 5)
    monkeypatch.setattr(backends, "LONG", 24)  # so that 48 tokens are long, and chunks of queries smaller
    for prefix in (False, True):
        assert trial_of(shape_of(**fields), window, prefix=prefix).error("sdpa", end=12) < 1e-12
    with_faults(monkeypatch, lambda out, _: torch.cat((out[:, :40], out[:, 40:] * 1.01), dim=1))
    assert trial_of(shape_of(**fields), window).error("broken", end=12) > 5e-3
    with_faults(monkeypatch, lambda out, _: torch.cat((out[:, :20] * 1.01, out[:, 20:]), dim=1))
    assert trial_of(shape_of(**fields), window).error("broken", end=12) < 1e-12  # what is not looked at


def test_the_fastest_on_short_rows_has_to_be_right_on_long_ones(
    shape_of: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fastest() -> BackendChoice:
        return BackendChoice("broken", "", {"broken": 1.0, "sdpa": 2.0}, {}, {"flash": "no kernel"})

    long = [lambda: trial_of(shape_of())]
    with_faults(monkeypatch, poison)
    assert verify_long_rows(fastest(), long, end=12).name == "broken"  # the poison is at the beginning
    choice = verify_long_rows(fastest(), long, end=48)
    assert choice.name == "sdpa" and "broken dropped: error nan at the end of 48 tokens" in choice.reason
    assert "flash dropped: no kernel" in choice.reason
    with_faults(monkeypatch, fail)
    assert verify_long_rows(fastest(), long, end=12).dropped["broken"] == "no kernel for this head"

    def full(out: Tensor, call: dict[str, Any]) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with_faults(monkeypatch, full)
    choice = verify_long_rows(fastest(), long, end=12)
    assert choice.name == "broken" and choice.reason.endswith("not checked at full length (out of memory)")


def test_the_fastest_over_all_layers_wins(shape_of: Shapes, monkeypatch: pytest.MonkeyPatch) -> None:
    # One window is quick with one backend, the other with the other; three of four layers have the second.
    costs = {("sdpa", 0): 1.0, ("sdpa", 7): 4.0, ("math", 0): 6.0, ("math", 7): 2.0}
    monkeypatch.setattr(BackendTiming, "seconds", lambda trial, name, budget_s: costs[name, trial.window])
    shape = shape_of(layers=4, windows=(7, 7, 7, 0))
    trials = {window: trial_of(shape, window) for window in (0, 7)}
    choice = compare_backends(["sdpa", "math"], trials, backends.windows(shape), budget_s=1.0)
    assert choice.name == "math" and choice.times == {"sdpa": 3.25, "math": 3.0}
    assert "math 3000.00 ms, sdpa 3250.00 ms" in choice.reason


def test_a_trial_times_a_few_runs_and_leaves_randomness_alone(shape_of: Shapes) -> None:
    before = torch.get_rng_state()
    trial = trial_of(shape_of())
    assert trial.seconds("sdpa", 0.0) > 0
    assert torch.equal(before, torch.get_rng_state())


def test_errors_are_of_the_worst_position() -> None:
    true = torch.ones(1, 1, 1000, 4)
    found = true.clone()
    found[0, 0, 17] = 1.5
    assert largest_error(found, true).item() == pytest.approx(0.5)


def test_the_tolerance_sees_a_long_window_off_by_one_and_bears_the_noise_of_bfloat16(shape_of: Shapes) -> None:
    shape = shape_of(heads=1, kv_heads=1, head_dim=64)
    trial, wider = (BackendTiming(shape, window, 2048, 1, BF16, CPU, packed=False) for window in (1024, 1025))
    for found, true in zip(wider.run("math"), trial.run("math"), strict=True):
        assert largest_error(found.float().transpose(1, 2), true.float().transpose(1, 2)) > 0.1
    assert trial.error("math") < TOLERANCE[BF16] / 2


def test_a_tie_goes_to_the_backend_that_repeats_its_bits(shape_of: Shapes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackendTiming, "error", lambda trial, name: 0.0)
    for flex_s, winner in ((1.04, "flex"), (1.06, "varlen")):
        monkeypatch.setattr(
            BackendTiming, "seconds", lambda trial, name, budget_s, s=flex_s: s if name == "flex" else 1.0
        )
        assert compare_backends(["flex", "varlen"], {0: trial_of(shape_of())}, Counter({0: 1}), 1.0).name == winner


def test_set_backend_reaches_every_attention_layer(shape_of: Shapes) -> None:
    model = Decoder(shape_of())
    set_backend(model, "flex")
    assert [block.attention.backend for block in model.blocks] == ["flex", "flex"]
    with pytest.raises(UserError, match="'flax' is unknown; write auto, sdpa"):
        set_backend(model, "flax")


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"packed": False},
    "packed": {},
    "packed window": {"window": 100},
    "both ways, packed": {"causal": False},
    "prefix": {"prefix": True},
    "blocks": {"blocks": (64, 1)},
    "cap": {"attention_cap": 5.0},
    "alibi": {"positions": "alibi"},
    "mla": {"mla": Mla(32, 128, 64, 128)},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_equals_the_reference_on_a_gpu(shape_of: Shapes, kind: str) -> None:
    given = dict(KINDS[kind])
    packed, prefix, window = given.pop("packed", True), given.pop("prefix", False), given.pop("window", 0)
    shape = shape_of(**({"heads": 8, "kv_heads": 2, "head_dim": 64, "windows": (window,)} | given))
    names = candidates(shape, CUDA, BF16, packed, 512, prefix)
    trial = BackendTiming(shape, window, 512, 3, BF16, CUDA, packed, prefix)
    errors = {name: trial.error(name) for name in names}
    assert len(names) > 1 and all(error < TOLERANCE[BF16] for error in errors.values()), errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_measures_and_says_so(shape_of: Shapes) -> None:
    shape = shape_of(heads=8, kv_heads=2, head_dim=64)
    choice = choose(shape, 1024, 2, BF16, CUDA, packed=True, budget_s=0.2)
    assert choice.name in choice.times and choice.times[choice.name] == min(choice.times.values())
    assert {"varlen", "flex", "sdpa"} <= set(choice.times) and choice.reason.count(" ms") == len(choice.times)
    # New documents in the next batch need no new compilation, and give their own result.
    first, second = (BackendTiming(shape, 0, 1024, 2, BF16, CUDA, packed=True) for _ in range(2))
    second.attention_mask = AttentionMask(
        (torch.arange(2048, dtype=torch.int32, device="cuda") // 200).unflatten(0, (2, -1))
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert first.error("flex") < TOLERANCE[BF16] and second.error("flex") < TOLERANCE[BF16]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True])
def test_a_long_row_is_chosen_for_in_seconds_and_checked_at_its_end(shape_of: Shapes, packed: bool) -> None:
    shape = shape_of(heads=8, kv_heads=2, head_dim=128)
    began = time.perf_counter()
    choice = choose(shape, 131_072, 1, BF16, CUDA, packed=packed)
    assert choice.name in choice.times and "full length" not in choice.reason, choice.reason
    assert not any("at the end" in why for why in choice.dropped.values()), choice.dropped
    assert time.perf_counter() - began < 60  # flex compiles; one layer of all backends at this length took minutes
    assert BackendTiming(shape, 0, 131_072, 1, BF16, CUDA, packed).error(choice.name, 1024) < TOLERANCE[BF16]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["flex", "varlen"])
def test_under_autocast_wider_queries_and_keys_are_rounded_first(shape_of: Shapes, name: str) -> None:
    trial = BackendTiming(shape_of(heads=8, kv_heads=2, head_dim=64), 0, 512, 2, BF16, CUDA, packed=True)
    q, k, v = (x.detach() for x in trial.inputs)
    expected = attend(q, k, v, trial.attention_mask, 0, trial.scale, backend="math")
    leaves = [q.float().requires_grad_(), k.float().requires_grad_(), v.clone().requires_grad_()]
    with torch.autocast("cuda", BF16):
        out = attend(*leaves, trial.attention_mask, 0, trial.scale, backend=name)
    assert out.dtype == BF16
    assert largest_error(out.float().transpose(1, 2), expected.float().transpose(1, 2)) < TOLERANCE[BF16]
    out.backward(trial.upstream)
    assert [x.grad.dtype for x in leaves] == [torch.float32, torch.float32, BF16]  # type: ignore[union-attr]
