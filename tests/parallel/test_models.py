"""Further models of a run on several processes: the numbers are those of one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint  # before the fork, once for all

from bessemer.checkpoint.store import CheckpointStore
from bessemer.run.directory import Run
from bessemer.session.session import run_folder, train
from bessemer.spec.schema import RunSpec

Ranks, Spec = Callable[..., list[Any]], Callable[..., RunSpec]
OBJECTIVE = '''
import torch.nn.functional as F
from bessemer.train.objective import ElementLosses, Objective

class Both(Objective):
    """A frozen reference and a trained critic: the critic predicts the gap to the reference."""

    needs_models = ("reference", "critic")
    metrics = ("error",)

    def counts(self, batch):
        return {"values": batch.count}

    def element_losses(self, model, inputs, hidden_BTW):
        def nll(network, hidden_BTW):
            logits_BTV = self.logits(network, hidden_BTW)
            losses_R = F.cross_entropy(logits_BTV.flatten(0, 1), inputs.targets_BT.flatten(), reduction="none")
            return losses_R.view_as(inputs.targets_BT)

        nll_BT = nll(model, hidden_BTW)
        reference_BT = nll(self.models["reference"], self.other_hidden("reference", inputs))
        assert not reference_BT.requires_grad
        value_BT = self.logits(self.models["critic"], self.other_hidden("critic", inputs))[..., 0]
        error = ((value_BT - (nll_BT.detach() - reference_BT)).square() * inputs.weights_BT).sum()
        metrics = {"error": (error.detach(), inputs.weights_BT.sum())}
        return ElementLosses(nll_BT + 0.1 * (nll_BT - reference_BT).square(), metrics, {"values": error})
'''


@pytest.mark.parametrize(
    "layout", [{"dp_shard": 2}, pytest.param({"dp_replicate": 2}, marks=pytest.mark.slow)], ids=["shards", "replicas"]
)
def test_two_processes_compute_what_one_does(ranks: Ranks, tiny_spec: Spec, tmp_path: Path, layout: dict[str, int]):
    (tmp_path / "both.py").write_text(OBJECTIVE)
    first = tiny_spec("first", budget={"steps": 4, "batch": 256})
    assert ranks(1, lambda: train(first).kind) == ["finished"]
    base = str(CheckpointStore(run_folder(first) / "checkpoints").committed()[-1][0])
    models = {"reference": base, "critic": {"path": base, "train": True, "head": "score"}}

    tokenizer = {"path": str(run_folder(first) / "tokenizer.json"), "vocab": "auto"}

    def spec_of(name: str, steps: int, degrees: dict[str, int]) -> RunSpec:
        return tiny_spec(
            name, objective=f"{tmp_path / 'both.py'}:Both", models=models, checkpoint={"every": "4 steps"},
            budget={"steps": steps, "batch": 256, "micro_batch": 2}, seed=3, tokenizer=tokenizer,
            parallel={"device": "cpu", "threads": 1, **degrees}, schedule={"kind": "constant", "warmup": "2 steps"},
        )  # fmt: skip

    def curve(spec: RunSpec) -> torch.Tensor:
        keys = ("loss", "error", "grad_norm")
        return torch.tensor([[record[key] for key in keys] for record in Run(run_folder(spec)).metrics()])

    alone = spec_of("alone", 8, {})
    assert ranks(1, lambda: train(alone).kind) == ["finished"]
    for steps in (4, 8):  # with a resumption
        several = spec_of("several", steps, layout)
        assert ranks(2, lambda several=several: train(several).kind) == ["finished"] * 2
    torch.testing.assert_close(curve(several), curve(alone), rtol=3e-4, atol=1e-5)
