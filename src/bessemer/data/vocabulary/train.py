"""Trains a tokenizer on a sample of text: byte-level BPE, Unigram, WordPiece or single characters.

Every kind writes any text and reads it back unchanged, and is the same for the same texts on any machine. Memory
grows with the sample: its distinct words for BPE, WordPiece and Unigram, its characters for the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bessemer.data.tokenizer import SMALLEST_VOCAB
from bessemer.data.vocabulary.special import check_decodes
from bessemer.data.vocabulary.split import SPLITS, byte_level
from bessemer.data.vocabulary.unigram import SMALLEST_UNIGRAM, train_unigram
from bessemer.errors import UserError

_LONGEST_WORD_CHARS = 64  # WordPiece tries every length of a word from every place in it


def train(texts: Iterable[str], vocab: int, special: list[str], kind: str = "bpe") -> Any:
    """A `tokenizers.Tokenizer` of at most `vocab` ids, the special tokens among them."""
    trainers: dict[str, tuple[Callable[[Iterator[str], int, list[str]], Any], int]] = {
        "bpe": (_train_bpe, SMALLEST_VOCAB - 1),
        "wordpiece": (_train_wordpiece, SMALLEST_VOCAB),
        "char": (_train_characters, SMALLEST_VOCAB - 1),
        "unigram": (train_unigram, SMALLEST_UNIGRAM),
    }
    if kind not in trainers:
        raise UserError(f"tokenizer.kind: {kind!r}; write one of {', '.join(trainers)}")
    if len(set(special)) < len(special):
        raise UserError(
            f"tokenizer.special: {special} has a token twice or the end of a document; name each once"
        )
    run, smallest = trainers[kind]
    if vocab < smallest + len(special):
        what = (
            "256 bytes"
            if smallest < SMALLEST_VOCAB
            else f"the {smallest} ids that every {kind} tokenizer has"
        )
        raise UserError(
            f"tokenizer.vocab: {vocab} is too small for {what} and {', '.join(special)}; "
            f"give {smallest + len(special)} or more"
        )
    inner = run(iter(texts), vocab, special)
    check_decodes(inner, special)
    return inner


def _train_bpe(texts: Iterator[str], vocab: int, special: list[str]) -> Any:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = byte_level(SPLITS["llama3"])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return inner


def _train_wordpiece(texts: Iterator[str], vocab: int, special: list[str]) -> Any:
    """WordPiece over bytes: the longest token that fits, again and again. Pieces inside a word carry no ## mark:
    a word that itself begins with ## could not be told from one, and text would be lost."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Inner

    inner = Inner(
        models.WordPiece(
            vocab={"[UNK]": 0},
            unk_token="[UNK]",
            continuing_subword_prefix="",
            max_input_chars_per_word=4 * _LONGEST_WORD_CHARS,  # it counts characters that stand for bytes
        )
    )
    short = pre_tokenizers.Split(Regex(rf"(?m:.){{1,{_LONGEST_WORD_CHARS}}}"), behavior="isolated")
    split, to_bytes = byte_level(SPLITS["llama3"])
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, short, to_bytes])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[*special, "[UNK]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        continuing_subword_prefix="",
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return inner


def _train_characters(texts: Iterator[str], vocab: int, special: list[str]) -> Any:
    """The most frequent characters, and the 256 bytes that write all others."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ranked[: vocab - len(tokens)]
    inner = Inner(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True)
    )
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(special)
    return inner
