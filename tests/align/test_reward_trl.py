"""A reward model computes what TRL's RewardTrainer computes: the loss and the gradient of every weight, of the same
rows and weights. Offline, on the CPU, in fp32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.session.conftest import Faults, spec_data
from tests.session.trl_reference import MARKED, write_folder
from torch import Tensor

from bessemer.align.reward_model import RewardModel
from bessemer.model.classifier import read_model
from bessemer.model.families.folder import HfFolder, load_weights
from bessemer.model.transformer import build_model
from bessemer.run.directory import Run
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec
from bessemer.train.job import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
METALS = ["iron", "copper", "zinc", "lead", "tin", "nickel", "cobalt", "silver"]
PLAIN = [
    {"prompt": f"What is {metal}?", "chosen": f" A metal{', heavy' * (i % 4)}.", "rejected": f" A fish{'!' * i}",
     "margin": i / 4}
    for i, metal in enumerate(METALS)
]  # fmt: skip
CHAT = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        **{side: [{"role": "assistant", "content": str(row[side]).strip()}] for side in ("chosen", "rejected")},
        "margin": row["margin"],
    }
    for row in PLAIN
]


class Gradients(Faults):
    """Keeps the gradients of the first step."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def after_backward(self, job: Job, step: int) -> None:
        for name, parameter in job.engine.model.named_parameters():
            assert parameter.grad is not None, name
            self.gradients[name] = parameter.grad.clone()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny Llamas with a score head: with a pad token of their own, with the end token as padding, and one whose
    tokenizer begins texts with a token."""
    import transformers

    place, texts = tmp_path_factory.mktemp("folders"), [json.dumps(row) for row in PLAIN]
    folders = {}
    for name in ("own_pad", "end_pad", "begins"):
        base = write_folder(place / f"{name}-base", texts, bos=name == "begins")
        model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        torch.manual_seed(1)
        torch.nn.init.normal_(model.score.weight, std=0.3)
        tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        if name != "own_pad":
            tokenizer.pad_token, model.config.pad_token_id = "</s>", 2
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
        folders[name] = place / name
    return folders


def trl_step(folder: Path, rows: list[dict[str, Any]], work: Path, center: float | None) -> tuple[Any, dict[str, Any]]:
    """The loss, the rewards of the pairs and the gradients under Bessemer's names."""
    import datasets
    import transformers
    import trl

    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = trl.RewardConfig(
        output_dir=str(work), gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none",
        center_rewards_coefficient=center,
    )  # fmt: skip
    data = datasets.Dataset.from_list(rows)
    trainer = trl.RewardTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer)
    columns = [c for c in ("chosen_ids", "rejected_ids", "margin") if c in trainer.train_dataset.column_names]
    inputs = trainer.data_collator([{name: row[name] for name in columns} for row in trainer.train_dataset])
    loss, outputs = trainer.compute_loss(trainer.model, inputs, return_outputs=True)
    loss.backward()
    gradients = {name: each.grad for name, each in trainer.model.named_parameters()}
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.copy_(gradients[name])
    trainer.model.save_pretrained(work)
    family, shape = read_model(json.loads((work / "config.json").read_text()))
    native = build_model(shape, "cpu", 0)
    load_weights(native, HfFolder(work), family)
    return (float(loss.detach()), outputs.logits[:, 0].detach()), dict(native.named_parameters())


@pytest.mark.parametrize(
    ("folder", "chat", "margin", "center"),
    [
        ("own_pad", False, False, None), ("end_pad", False, True, None), ("begins", False, True, 0.05),
        ("own_pad", True, True, 0.05), ("end_pad", True, False, 0.05),
    ],
)  # fmt: skip
def test_loss_scores_and_gradients_are_those_of_trl(
    folders: dict[str, Path], tmp_path: Path, folder: str, chat: bool, margin: bool, center: float | None
) -> None:
    pytest.importorskip("trl", reason="pip install -c constraints.txt 'bessemer[bench]'")
    rows = [{k: v for k, v in row.items() if margin or k != "margin"} for row in (CHAT if chat else PLAIN)]
    (loss, rewards), gradients = trl_step(folders[folder], rows, tmp_path / "trl", center)
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = tmp_path / "template.jinja"
    template.write_text(MARKED)
    data = {"sources": {"pairs": {"path": str(path)}}, "context": 144, "validation": 0}
    spec = spec_data("own", path, tmp_path / "runs", objective="reward", data=data)
    spec |= {
        "model": {"hf": str(folders[folder])}, "reward": {"center_rewards_coefficient": center or 0.0},
        "tokenizer": {"chat": str(template) if chat else "none"}, "precision": "fp32",
        "budget": {"steps": 1, "batch": len(rows) * 144, "micro_batch": 4}, "optimizer": {"lr": 1e-9, "clip": 1e9},
    }  # fmt: skip
    own, ready = Gradients(), RunSpec.model_validate(spec)
    Session(ready, faults=own).train()
    (record,) = Run.existing(run_folder(ready)).metrics()
    assert record["loss"] == pytest.approx(loss, abs=1e-5)
    chosen, rejected = rewards.chunk(2)
    assert record["margin"] == pytest.approx(float((chosen - rejected).mean()), abs=1e-5)
    assert own.gradients.keys() == gradients.keys()
    for name, gradient in own.gradients.items():
        torch.testing.assert_close(gradient, gradients[name].detach(), rtol=1e-4, atol=1e-5, msg=name)
    model, prompts = RewardModel.load(run_folder(ready), device="cpu"), [row["prompt"] for row in rows]
    for side, expected in (("chosen", chosen), ("rejected", rejected)):
        scores = torch.tensor(model.score(prompts, [row[side] for row in rows]))
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
