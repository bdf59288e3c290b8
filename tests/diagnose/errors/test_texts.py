"""Each text of an error gives its cause first; texts that only resemble errors give none."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bessemer.diagnose.errors.read import judge_text
from bessemer.diagnose.errors.rule import error_rules

FOLDER = Path(__file__).parent
TEXTS = yaml.safe_load((FOLDER / "texts.yaml").read_text())
LOOK_ALIKES = yaml.safe_load((FOLDER / "look_alikes.yaml").read_text())


def test_there_are_forty_distinct_causes() -> None:
    assert len({entry["cause"] for entry in TEXTS}) >= 40


@pytest.mark.parametrize("entry", TEXTS, ids=lambda entry: entry["cause"])
def test_cause_comes_first(entry: dict[str, str]) -> None:
    findings = judge_text(entry["text"])
    assert findings, "nothing recognised"
    assert findings[0].rule == entry["cause"], [finding.rule for finding in findings]
    assert findings[0].cause and findings[0].check and not re.search(r"\{\w+\}", findings[0].symptom + findings[0].fix)


UNPREFIXED = [entry for entry in TEXTS if not re.search(r"\[rank|NVRM|\[0\]:", entry["text"])]


@pytest.mark.parametrize("entry", UNPREFIXED, ids=lambda entry: entry["cause"])
def test_cause_comes_first_with_prefixes_colours_and_a_healthy_log_around(entry: dict[str, str]) -> None:
    lines = "".join(f"[rank3]: {line}\n" for line in entry["text"].splitlines())
    log = f"\x1b[32mstep 7 loss 2.0\x1b[0m\n{lines}\x1b[31mbye\x1b[0m\n"
    first = judge_text(log)[0]
    assert first.rule == entry["cause"]
    assert first.evidence["rank"] == 3 and first.evidence["line"] >= 2
    if first.evidence["line"] == 2:
        assert first.step == 7


@pytest.mark.parametrize("entry", TEXTS, ids=lambda entry: entry["cause"])
def test_every_text_has_a_hint_for_long_logs(entry: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bessemer.diagnose.errors.log_text.REDUCED_BYTES", 1000)
    healthy = "".join(f"step {step} loss 2.0\n" for step in range(1000))
    first = judge_text(healthy + entry["text"] + healthy)[0]
    assert first.rule == entry["cause"]
    assert first.evidence["line"] > 1000
    assert first.step in (999, 500) or "xid" in first.evidence


@pytest.mark.parametrize("text", LOOK_ALIKES)
def test_look_alikes(text: str) -> None:
    assert [finding.symptom for finding in judge_text(text) if finding.severity != "note"] == []


def test_damaged_texts_are_read() -> None:
    """Logs are cut, mixed and overwritten: reading them never fails, and what they give can be written as JSON."""
    chance = random.Random(5)
    for _ in range(200):
        text = "".join(entry["text"] for entry in chance.sample(TEXTS, 3))
        for _ in range(6):
            start = chance.randrange(len(text) + 1)
            filler = chance.choice(["", "\n", "0", "|", "[rank1]: ", " : ", "é", "nan", "-"])
            text = text[:start] + filler + text[start + chance.randrange(30) :]
        json.dumps([finding.to_json() for finding in judge_text(text)])


def test_rules_are_complete() -> None:
    for rule in error_rules():
        assert rule.causes and rule.severity in ("warning", "critical")
        for cause in rule.causes:
            assert cause.text and 0 < cause.confidence <= 1, cause


def _raise_resume() -> None:
    model = torch.nn.Embedding(8, 4)
    model.load_state_dict({"weight": torch.zeros(9, 4)})


def _embed_mismatch() -> None:
    model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(8, 4)})
    model.load_state_dict({"embed_tokens.weight": torch.zeros(9, 4)})


def _prefix() -> None:
    torch.nn.Linear(2, 2).load_state_dict({"module.weight": torch.zeros(2, 2), "module.bias": torch.zeros(2)})


def _missing() -> None:
    torch.nn.Linear(2, 2).load_state_dict({"weight": torch.zeros(2, 2)})


def _backward_twice() -> None:
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    loss.backward()
    loss.backward()


def _in_place() -> None:
    x = torch.ones(2, requires_grad=True)
    y = torch.sigmoid(x)
    y += 1
    y.sum().backward()


def _pickled(path: Path) -> None:
    torch.save({"args": FOLDER}, path / "x.pt")
    torch.load(path / "x.pt")


def _truncated(path: Path) -> None:
    torch.save({"w": torch.zeros(4096)}, path / "x.pt")
    content = (path / "x.pt").read_bytes()
    (path / "x.pt").write_bytes(content[:300])
    torch.load(path / "x.pt")


def _truncated_safetensors(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({"w": torch.zeros(4096)}, path / "x.safetensors")
    content = (path / "x.safetensors").read_bytes()
    (path / "x.safetensors").write_bytes(content[: len(content) // 2])
    load_file(path / "x.safetensors")


LIVE: dict[str, Callable[[], Any]] = {
    "token_id_out_of_range": lambda: torch.nn.Embedding(8, 4)(torch.tensor([8])),
    "label_out_of_range": lambda: torch.nn.functional.cross_entropy(torch.zeros(2, 4), torch.tensor([1, 4])),
    "dtype_mismatch": lambda: torch.nn.Linear(2, 2)(torch.zeros(1, 2, dtype=torch.bfloat16)),
    "shape_mismatch": lambda: torch.nn.Linear(3, 2)(torch.zeros(1, 2)),
    "unpadded_batch": lambda: torch.stack([torch.zeros(2), torch.zeros(3)]),
    "graph_reused": _backward_twice,
    "inplace_change": _in_place,
    "frozen_inputs_checkpointing": lambda: torch.zeros(2).sum().backward(),
    "config_differs": _raise_resume,
    "vocabulary_differs": _embed_mismatch,
    "wrapper_prefix": _prefix,
    "architecture_differs": _missing,
}
LIVE_FILES = {"pickled_objects": _pickled, "truncated_file": _truncated}


@pytest.mark.parametrize("cause", LIVE)
def test_errors_that_torch_raises_here(cause: str) -> None:
    with pytest.raises(Exception) as raised:
        LIVE[cause]()
    assert judge_text(f"{type(raised.value).__name__}: {raised.value}\n")[0].rule == cause


@pytest.mark.parametrize("cause", LIVE_FILES)
def test_errors_of_files(cause: str, tmp_path: Path) -> None:
    with pytest.raises(Exception) as raised:
        LIVE_FILES[cause](tmp_path)
    assert judge_text(f"{type(raised.value).__name__}: {raised.value}\n")[0].rule == cause


def test_truncated_safetensors(tmp_path: Path) -> None:
    with pytest.raises(Exception) as raised:
        _truncated_safetensors(tmp_path)
    assert judge_text(f"SafetensorError: {raised.value}\n")[0].rule == "truncated_file"


RAISED = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 88, in main\n    x = batch["labels"]\n'
    "KeyError: 'labels'\n"
)


@pytest.mark.parametrize(
    "before",
    [
        " 50%|#####     | 500/1000 [10:11<09:58,  1.20s/it]",
        " 50%|█████     | 500/1000 [10:11<09:58,  3.20it/s]",
        "\r  4%|4 | 43/1000 [00:43<09:58,  1.20s/it]\r  4%|4 | 44/1000 [00:44<09:58,  1.20s/it]",
        " 50%|#####     | 500/1000 [10:11<09:58,  1.20s/it][rank0]: ",
        "Epoch 0:  50%|##### | 5/10 [00:11<00:10,  1.20s/it, loss=2.1]",
        "saving... ",
    ],
)
def test_a_traceback_that_is_glued_to_a_line_is_recognised(before: str) -> None:
    if "rank0" in before:
        text = before + RAISED.replace("\n", "\n[rank0]: ").removesuffix("[rank0]: ")
    else:
        text = before + RAISED
    finding = judge_text("{'loss': 1.82, 'epoch': 0.5}\n" + text)[0]
    assert (finding.severity, finding.evidence["at"]) == ("critical", "/home/me/train.py:88")
    assert finding.evidence["line"] == 2


@pytest.mark.parametrize("head", ["", "Traceback (most recent call last):\n  5%|5 | 5/100 [00:05<01:00,  1.2s/it]\n"])
def test_the_end_of_a_traceback_without_its_head_is_a_finding(head: str) -> None:
    finding = judge_text("step 3 loss 2.0\n" + head + RAISED.partition("\n")[2])[0]
    assert finding.severity == "critical" and finding.evidence["error"] == "KeyError"


def test_an_error_behind_a_bar_is_read_as_a_line_of_its_own() -> None:
    entry = next(entry for entry in TEXTS if entry["text"].startswith(("RuntimeError", "ValueError", "OSError")))
    assert judge_text(" 5%|5 | 5/100 [00:05<01:00,  1.2s/it]" + entry["text"])[0].rule == entry["cause"]


def test_a_run_that_was_interrupted_is_not_called_healthy() -> None:
    assert judge_text(RAISED.replace("KeyError: 'labels'", "KeyboardInterrupt"))
