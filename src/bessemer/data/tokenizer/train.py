"""Trains a tokenizer on a sample of text: byte-level BPE, Unigram, WordPiece or single characters.

Any text round-trips with every kind, and the same texts give the same tokenizer on any machine. Memory grows with the
sample's distinct words (its characters for kind: char)."""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bessemer.data.tokenizer.load import (
    BYTE_NAME_CHARACTERS,
    NORMAL,
    SPACE,
    SPLITS,
    SentencePieceModel,
    build_sentencepiece,
    byte_level,
    parse_sentencepiece,
    piece_decoder,
)
from bessemer.data.tokenizer.tokenizer import SMALLEST_VOCAB, check_decodes
from bessemer.errors import UserError

_LONGEST_WORD_CHARS = 64  # WordPiece tries every length from every position of a word


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
        what = "has a token twice or the end of a document"
        raise UserError(f"tokenizer.special: {special} {what}; name each once")
    run, smallest = trainers[kind]
    if vocab < smallest + len(special):
        fixed = f"the {smallest} ids that every {kind} tokenizer has"
        what = "256 bytes" if smallest < SMALLEST_VOCAB else fixed
        all_of_it = f"{what} and {', '.join(special)}; give {smallest + len(special)} or more"
        raise UserError(f"tokenizer.vocab: {vocab} is too small for {all_of_it}")
    inner = run(iter(texts), vocab, special)
    check_decodes(inner, special)
    return inner


def _train_bpe(texts: Iterator[str], vocab: int, special: list[str]) -> Any:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = byte_level(SPLITS["llama3"])
    inner.decoder = decoders.ByteLevel()
    _run(inner, texts, trainers.BpeTrainer, vocab_size=vocab, special_tokens=special)
    return inner


def _run(inner: Any, texts: Iterator[str], trainer: Any, **settings: Any) -> None:
    from tokenizers import pre_tokenizers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made = trainer(**settings, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(texts, made)


def _train_wordpiece(texts: Iterator[str], vocab: int, special: list[str]) -> Any:
    """WordPiece over bytes. Pieces inside a word have no ## mark: a word that begins with ## would be ambiguous, and
    text would be lost."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Inner

    most = {"max_input_chars_per_word": 4 * _LONGEST_WORD_CHARS}  # it counts characters that stand for bytes
    model = models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]", continuing_subword_prefix="", **most)
    inner = Inner(model)
    short = pre_tokenizers.Split(Regex(rf"(?m:.){{1,{_LONGEST_WORD_CHARS}}}"), behavior="isolated")
    split, to_bytes = byte_level(SPLITS["llama3"])
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, short, to_bytes])
    inner.decoder = decoders.ByteLevel()
    settings = {"special_tokens": [*special, "[UNK]"], "continuing_subword_prefix": ""}
    _run(inner, texts, trainers.WordPieceTrainer, vocab_size=vocab, **settings)
    return inner


def _train_characters(texts: Iterator[str], vocab: int, special: list[str]) -> Any:
    """The most frequent characters, and the 256 bytes for all others."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ranked[: vocab - len(tokens)]
    numbers = {token: i for i, token in enumerate(tokens)}
    inner = Inner(models.BPE(vocab=numbers, merges=[], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(special)
    return inner


SMALLEST_UNIGRAM = 256 + len(BYTE_NAME_CHARACTERS) + 3  # bytes, their names' letters, <unk>, space, newline

_ESCAPE = "\ue000"
_ESCAPED = ((_ESCAPE, _ESCAPE + "b"), (SPACE, _ESCAPE + "a"))
_WORD = re.compile(r"\n+| *[^ \n]+| +")
_TAB = "\ue001"  # stands for a tab in training, where a tab comes before a word's count
_MOST_NEWLINES = 8  # in one piece
_MOST_WORDS = 300_000  # the most frequent; the trainer visits each some fifty times (40 s on two cores)
_COVERAGE = 0.9995  # of the sample's characters; the rest is written in bytes
_THREADS = 16  # the result depends on it, so it is not the machine's number


def train_unigram(texts: Iterator[str], vocab: int, special: list[str]) -> Any:
    """Unigram by SentencePiece's trainer, over counted words. The trainer of `tokenizers` is not deterministic: sums of
    floats follow the order of a hash map. SentencePiece's is, for a fixed number of threads. Spaces become U+2581,
    characters outside the vocabulary become bytes; nothing is normalized, and U+2581 itself is escaped with a private
    character. Special tokens come after the model's pieces, where no text can reach them."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    pieces = _pieces(texts, vocab - len(special))
    inner = build_sentencepiece(
        SentencePieceModel(pieces, byte_fallback=True, dummy_prefix=False, remove_extra_spaces=False)
    )
    replaced = (*_ESCAPED, (" ", SPACE))
    inner.normalizer = normalizers.Sequence([normalizers.Replace(a, b) for a, b in replaced])
    words = Regex(rf"\n+|{SPACE}*[^{SPACE}\n]+|{SPACE}+")
    inner.pre_tokenizer = pre_tokenizers.Split(words, behavior="isolated")
    inner.decoder = piece_decoder(*(decoders.Replace(b, a) for a, b in reversed(_ESCAPED)))
    inner.add_special_tokens(special)
    return inner


def _pieces(texts: Iterator[str], vocab: int) -> list[tuple[str, float, int]]:
    """At most `vocab` pieces with their scores: <unk>, the bytes, runs of newlines, and the trainer's pieces."""
    words = Counter(word for text in texts for word in _WORD.findall(text))
    lines = {word: words.pop(word) for word in list(words) if word[0] == "\n"}
    total = sum(words.values()) + sum(lines.values())
    newlines = _newline_runs(lines, total)[: 1 + (vocab - SMALLEST_UNIGRAM) // 4]
    trained = parse_sentencepiece(_run_trainer(words, vocab - len(newlines)))
    return [*((piece.replace(_TAB, "\t"), score, kind) for piece, score, kind in trained.pieces), *newlines]


def _newline_runs(counts: dict[str, int], total: int) -> list[tuple[str, float, int]]:
    """Pieces for runs of newlines, the single one first, then by frequency. The trainer makes no white-space pieces but
    spaces, so they are scored here, by their share of all words, and omitted if shorter runs score better."""
    best = [0.0]  # score of the best pieces for a run of each length
    scores: dict[int, float] = {}
    for length in range(1, _MOST_NEWLINES + 1):
        count = counts.get("\n" * length, 0)
        score = math.log((count or 1) / (total + 1))
        others = max((best[i] + best[length - i] for i in range(1, length)), default=-math.inf)
        if length == 1 or (count > 1 and score > others):
            scores[length] = score
        best.append(max(others, scores.get(length, -math.inf)))
    order = sorted(scores, key=lambda length: (length > 1, -scores[length], length))
    return [("\n" * length, scores[length], NORMAL) for length in order]


def _run_trainer(words: Counter[str], vocab: int) -> bytes:
    try:
        import sentencepiece
    except ImportError as error:
        what = "tokenizer.kind: unigram is trained by sentencepiece"
        raise UserError(f"{what}; pip install 'bessemer[data]'") from error
    rows = _rows(words, most_characters=max(0, (vocab - SMALLEST_UNIGRAM) // 2))
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(rows), input_format="tsv", model_writer=model, model_type="unigram",
            vocab_size=vocab, hard_vocab_limit=False, character_coverage=1.0, required_chars=BYTE_NAME_CHARACTERS,
            byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, max_sentence_length=1 << 30,
            bos_id=-1, eos_id=-1, pad_id=-1, num_threads=_THREADS, minloglevel=2,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        what = f"tokenizer.vocab: {vocab} cannot be trained on this text ({error})"
        raise UserError(f"{what}; use kind: bpe") from error
    return model.getvalue()


def _rows(words: Counter[str], most_characters: int) -> list[str]:
    """The words with their counts, as the trainer reads them; rare characters split a word."""
    frequent = sorted(words, key=lambda word: (-words[word], word))[:_MOST_WORDS]
    characters: Counter[str] = Counter()
    for word in frequent:
        for character in word:
            characters[character] += words[word]
    ranked = sorted(characters, key=lambda character: (-characters[character], character))
    covered, needed = 0, _COVERAGE * characters.total()
    alphabet = set(BYTE_NAME_CHARACTERS + " ")
    for character in ranked:
        if covered >= needed or len(alphabet) >= most_characters + len(BYTE_NAME_CHARACTERS) + 1:
            break
        covered += characters[character]
        alphabet.add(character)
    alphabet -= {SPACE, _ESCAPE, _TAB, "\0"}
    table = {ord(character): "\n" for character in characters if character not in alphabet} | {ord("\t"): _TAB}
    rows = Counter({" ": 1})  # the space is always a piece: written in bytes it would come back as U+2581
    for word in frequent:
        for part in word.translate(table).split("\n"):
            rows[part] += words[word]
    rows.pop("", None)
    return [f"{row}\t{rows[row]}" for row in sorted(rows)]
