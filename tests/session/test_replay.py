"""A past step leads back to its documents, and the text shown is the text in the file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bessemer.checkpoint.archive import pack
from bessemer.checkpoint.store import CheckpointStore
from bessemer.errors import UserError
from bessemer.run.directory import Run
from bessemer.session.replay import documents_of, packed_losses
from bessemer.session.session import Session, run_folder
from bessemer.spec.schema import RunSpec


def test_the_documents_of_a_step_are_those_in_the_file(make_spec: Callable[..., RunSpec], corpus: Path) -> None:
    spec = make_spec(budget={"steps": 12, "batch": 128})
    Session(spec).train()
    lines = corpus.read_text().splitlines()
    for step in (0, 7, 11):
        documents = documents_of(run_folder(spec), step, texts=True)
        assert sum(document["tokens"] for document in documents) == 128
        for document in documents:
            assert document["file"] == str(corpus)
            whole = json.loads(lines[document["row"] - 1])["text"] + "<|endoftext|>"
            assert all(text in whole for text in document["texts"])


def test_a_step_that_the_run_does_not_have_is_refused(make_spec: Callable[..., RunSpec]) -> None:
    spec = make_spec(budget={"steps": 12, "batch": 128})
    Session(spec).train()
    with pytest.raises(UserError, match="steps 0 to 11"):
        documents_of(run_folder(spec), 12)


def test_text_from_a_file_that_is_not_utf8_is_not_said_to_stand_in_it(
    make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("une façade, un été, ".encode("latin-1") * 200)
    spec = make_spec(
        budget={"steps": 2, "batch": 128},
        data={"sources": {"words": {"path": [str(path)]}}, "context": 32, "validation": 0},
    )
    Session(spec).train()
    assert {document["in_file"] for document in documents_of(run_folder(spec), 0, texts=True)} == {
        "the file is not UTF-8 (byte 6): U+FFFD was trained on for its invalid bytes"
    }
    (note,) = Run(run_folder(spec)).events("data_note")
    assert f"{path}: not UTF-8 (byte 6)" in note["reason"]


def test_the_loss_of_a_pack_that_rounds(make_spec: Callable[..., RunSpec], tmp_path: Path) -> None:
    """8 bits change the loss a little, and the loss of an exact pack is that of the checkpoint."""
    spec = make_spec(budget={"steps": 20, "batch": 128})
    Session(spec).train()
    (*_, (folder, manifest)) = CheckpointStore(run_folder(spec) / "checkpoints").committed()
    losses: dict[str, Any] = {}
    for rounding in ("same", "int8"):
        pack(folder, tmp_path / "store", rounding, rounding=rounding)
        losses[rounding] = packed_losses(folder, tmp_path / "store", rounding)
    assert losses["same"][0] == losses["same"][1] == pytest.approx(manifest.validation_loss, rel=1e-5)
    assert losses["int8"][0] == losses["same"][0] and 0 < abs(losses["int8"][1] - losses["int8"][0]) < 0.01
    assert "not in a run's folder" in str(packed_losses(tmp_path / "x" / "y" / "z", tmp_path / "store", "int8"))
