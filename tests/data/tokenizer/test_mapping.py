"""Common tokens and aligned positions of two tokenizers, checked against decoded text."""

import pytest

from bessemer.data.tokenizer.mapping import TokenMap
from bessemer.data.tokenizer.tokenizer import Tokenizer
from bessemer.errors import UserError

TEXTS = ["the blast furnace melts iron ore with coke", "slag floats on iron; steel is poured at 1600 °C — hot ✓"] * 30


def trained(kind: str, vocab: int, special: list[str] | None = None) -> Tokenizer:
    return Tokenizer.train(TEXTS, vocab, kind=kind, special=special or [])


@pytest.mark.parametrize("kinds", [("bpe", "unigram"), ("unigram", "bpe"), ("bpe", "bpe")])
def test_aligned_inputs_have_read_the_same_text(kinds: tuple[str, str]) -> None:
    student, teacher = trained(kinds[0], 330, ["<|end|>"]), trained(kinds[1], 360, ["<|end|>"])
    mapping = TokenMap(student, teacher, (teacher.eos_id,))
    end = student.special["<|end|>"]
    aligned = 0
    for text in (TEXTS[0], TEXTS[1], "Bürger ✓✓ unseen 数"):
        ids = [student.eos_id, *student.encode(text), end, *student.encode(" more ore"), student.eos_id]
        result = mapping.align(ids)
        assert len(result.after) == len(ids)
        for column, index in enumerate(result.after):
            if index >= 0:
                both = student.decode(ids[1 : column + 1]), teacher.decode(result.ids[1 : index + 1])
                ours, theirs = (text.strip(" �") for text in both)  # characters may be read in part
                assert ours == theirs
                aligned += 1
        assert result.after[0] == 0, "the first token of a text is predicted"
        assert result.ids.count(teacher.special["<|end|>"]) == 1
    assert aligned > 20


def test_common_tokens_stand_for_the_same_text() -> None:
    student, teacher = trained("bpe", 330), trained("unigram", 360)
    ours, theirs = TokenMap(student, teacher, ()).pairs.tolist()
    assert len(set(ours)) == len(ours) == len(set(theirs)) > 100
    for one, other in zip(ours, theirs, strict=True):
        texts = student.decode([one], continues=True), teacher.decode([other], continues=True)
        assert texts[0] == texts[1] or (one, other) == (student.eos_id, teacher.eos_id)


def test_a_row_that_begins_inside_a_character_is_aligned_after_it() -> None:
    student, teacher = trained("bpe", 257), trained("bpe", 330)
    ids = student.encode("é iron ore")[1:]  # one byte a token: the second byte of é begins the row
    result = TokenMap(student, teacher, (teacher.eos_id,)).align(ids)
    assert result.after[0] == -1
    assert teacher.decode(result.ids[1:]) == " iron ore"
    assert result.after[-1] == len(result.ids) - 1


def test_tokens_of_words_cannot_be_mapped() -> None:
    with pytest.raises(UserError, match=r"models\.teacher: its tokens are neither byte-level nor SentencePiece"):
        TokenMap(trained("bpe", 300), trained("wordpiece", 300), ())
