"""Names that no file system takes are files that are not there."""

import pytest

from bessemer.data.curate.filters.content import _model_path
from bessemer.data.curate.scores.user_function import _file_of
from bessemer.data.prepare import chat_template
from bessemer.data.read.files import list_files
from bessemer.data.tokenizer.load import load
from bessemer.errors import UserError
from bessemer.spec.data import SourceSpec, TokenizerSpec

LONG = "y" * 420


def test_a_layout_of_conversations() -> None:
    assert chat_template(TokenizerSpec(chat=LONG)) == LONG


@pytest.mark.parametrize(
    "look",
    [
        lambda: _model_path(LONG),
        lambda: _model_path("~nobody-of-that-name/model"),
        lambda: _file_of(f"{LONG}.py:f", "score"),
        lambda: load(LONG),
        lambda: list_files(SourceSpec(path=[LONG])),
        lambda: list_files(SourceSpec(path=["a\0b"])),
    ],
)
def test_a_file(look) -> None:
    with pytest.raises(UserError):
        look()
