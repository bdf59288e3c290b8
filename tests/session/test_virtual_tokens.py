"""Runs with prompt and prefix tuning: exact resume, generation with the trained tokens, PEFT's format, no merging."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bessemer.checkpoint.tensors import SavedTensors
from bessemer.cli.main import app
from bessemer.errors import UserError
from bessemer.model.adapters import adapters_off
from bessemer.run.directory import Run
from bessemer.session.session import run_folder
from bessemer.train.trained import load_model

from .conftest import train_until
from .test_adapters import columns, last, rhymes, train  # noqa: F401  fixtures
from .test_frozen import Hold
from .test_qlora import make, trained  # noqa: F401  fixtures

pytest.importorskip("transformers")
TOKENS = torch.arange(24)[None] % 300


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_they_resume_exactly_generate_and_are_written_for_peft(make: Any, tmp_path: Path, kind: str) -> None:  # noqa: F811
    adapter, hold = {"kind": kind, "virtual_tokens": 6}, Hold()
    whole, broken = (make(name, adapter, guard={"copies": "off"}) for name in ("whole", "broken"))
    assert train(whole, hold) == "finished"
    assert train_until(broken, 7).kind == "interrupted" and train(broken) == "finished"
    assert columns(broken) == columns(whole) and columns(whole)[-1][1] < columns(whole)[0][1]
    saved = SavedTensors(last(whole), "model.")
    assert {name.rpartition(".")[2] for name in saved._entries} == {"virtual"}
    model = hold.job.engine.model.eval()
    with torch.no_grad():
        expected = model.logits(model(TOKENS))
        with adapters_off(model):
            assert (model.logits(model(TOKENS)) - expected).abs().max() > 1e-3
    runner, run = CliRunner(), str(run_folder(whole))
    result = runner.invoke(app, ["export", run, "--to", "peft", "--out", str(tmp_path / "peft")])
    assert result.exit_code == 0 and "read back with the same bits" in result.output, result.output
    for folder in (run, tmp_path / "peft"):
        loaded = load_model(folder, device="cpu").model
        with torch.no_grad():
            assert (loaded.logits(loaded(TOKENS)) - expected).abs().max() < 1e-5 * expected.abs().max()
    with pytest.raises(UserError, match="virtual tokens of prompt or prefix tuning cannot be merged"):
        runner.invoke(app, ["export", run, "--to", "hf", "--out", str(tmp_path / "hf")], catch_exceptions=False)
    begun = Hold()
    further = make("further", {"path": str(tmp_path / "peft")})
    assert train(further, begun) == "finished" and begun.job.spec.adapter.kind == "lora"
    assert next(Run(run_folder(further)).metrics())["loss"] < columns(whole)[0][1]
