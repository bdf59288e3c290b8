"""Averages against torch in fp64, and a soup whose best mixture is known."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer.checkpoint.manifest import verify
from bessemer.checkpoint.store import MODEL, CheckpointStore
from bessemer.checkpoint.tensors import SavedTensors, average, exponential_weights, greedy_soup, save_model
from bessemer.errors import UserError


def models(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"a": 1e4 + torch.randn(50, 3, generator=generator), "b": torch.randn(7, generator=generator).bfloat16()}
        for _ in range(count)
    ]


def test_the_mean_is_that_of_fp64() -> None:
    found = average(models(7))
    for name in ("a", "b"):
        exact = torch.stack([model[name].double() for model in models(7)]).mean(0)
        assert torch.equal(found[name], exact.to(found[name].dtype))
        assert found[name].dtype == models(1)[0][name].dtype
    alone = average(models(1))
    assert all(torch.equal(alone[name], tensor) for name, tensor in models(1)[0].items())


def test_weights_are_relative() -> None:
    found = average(models(3), [1, 2, 5])["a"]
    first, second, third = (model["a"].double() for model in models(3))
    assert torch.equal(found, ((first + 2 * second + 5 * third) / 8).float())


def test_exponential_shares_are_those_of_the_recursion() -> None:
    values = [3.0, -1.0, 4.0, 1.5]
    running = values[0]
    for value in values[1:]:
        running = 0.7 * running + 0.3 * value
    shares = exponential_weights(4, 0.7)
    assert sum(shares) == pytest.approx(1) and sum(s * v for s, v in zip(shares, values, strict=True)) == (
        pytest.approx(running, rel=1e-14)
    )
    assert exponential_weights(3, 0) == [0, 0, 1]


def test_what_cannot_be_averaged_is_refused() -> None:
    a, b = models(2)
    with pytest.raises(UserError, match="b is not in all checkpoints"):
        average([a, {"a": b["a"]}])
    with pytest.raises(UserError, match="not the same model"):
        average([a, {**b, "a": torch.ones(2)}])
    for shares in ([1.0], [1.0, -1.0], [0.0, 0.0]):
        with pytest.raises(UserError, match="one weight >= 0 per"):
            average([a, b], shares)
    with pytest.raises(UserError, match="decay 1"):
        exponential_weights(3, 1)


def at(value: float) -> dict[str, Tensor]:
    return {"x": torch.tensor([value])}


def test_the_greedy_soup_takes_only_what_helps() -> None:
    """The loss is |x|: best alone is 1; -3 makes the average -1, no better; -1.5 makes it -0.25."""
    sources = {"far": at(-3.0), "best": at(1.0), "near": at(-1.5), "away": at(2.0), "broken": at(math.nan)}
    asked = []

    def evaluate(weights: Any) -> float:
        asked.append(weights["x"].item())
        return abs(weights["x"].item())

    soup = greedy_soup(sources, evaluate)
    assert soup.names == ["best", "near"] and soup.loss == 0.25
    assert torch.equal(soup.weights["x"], torch.tensor([-0.25]))
    assert soup.alone["far"] == 3 and math.isnan(soup.alone["broken"])
    assert len(asked) == 5 + 4
    assert [round(x, 4) for x in asked[5:8]] == [-0.25, 0.5, -1.1667]  # near, away, far: the better first


def test_a_soup_may_take_all_of_them() -> None:
    soup = greedy_soup({"a": at(3.0), "b": at(-2.0)}, lambda weights: abs(weights["x"].item()))
    assert sorted(soup.names) == ["a", "b"] and soup.loss == 0.5
    soup = greedy_soup({"a": at(1.0), "b": at(1.0)}, lambda weights: abs(weights["x"].item()))
    assert soup.names == ["a"]  # no better is not better


def test_checkpoints_are_read_a_tensor_at_a_time(
    checkpoint_store: CheckpointStore, manifest_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for step, model in enumerate(models(3)):
        state = {MODEL + name: tensor for name, tensor in model.items()} | {"optimizer.m": torch.ones(3)}
        folders.append(checkpoint_store.save(state, manifest_of(step)))
    reads: list[str] = []
    read = SavedTensors.__getitem__
    monkeypatch.setattr(SavedTensors, "__getitem__", lambda self, name: reads.append(name) or read(self, name))
    found = average([SavedTensors(folder, MODEL) for folder in folders])
    expected = average(models(3))
    assert all(torch.equal(found[name], expected[name]) for name in expected) and set(found) == {"a", "b"}
    assert reads == sorted(reads)  # all of a, then all of b


def test_an_average_is_saved_with_what_it_was_made_of(
    checkpoint_store: CheckpointStore, manifest_of: Callable[..., Any], tmp_path: Path
) -> None:
    made_of = {"averaged_of": ["step-00000007.a1"], "shares": [1.0]}
    folder = save_model(checkpoint_store.folder, at(2.0), made_of, manifest_of(7, 3.0), loss=1.25)
    manifest = verify(folder)
    assert folder.name == "model-00000007.a1" and manifest.progress == {"made_from": made_of}
    assert (manifest.content, manifest.validation_loss, manifest.stream_fingerprint) == ("model", 1.25, "f1")
    assert torch.equal(SavedTensors(folder)["model.x"], torch.tensor([2.0]))
