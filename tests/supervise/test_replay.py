"""A past step leads back to its documents, and the text shown is the text in the file."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bessemer.errors import UserError
from bessemer.spec.schema import RunSpec
from bessemer.supervise.replay import documents_of
from bessemer.supervise.session import Session, run_folder


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
