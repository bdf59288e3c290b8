"""Text to token ids and back: a Hugging Face tokenizer, loaded or trained, with two rules of our own.

A special token stands for itself and nothing else: text that spells one is encoded as plain text. And a long document
may be encoded in pieces: their ids, one after another, are those of the whole.

How a prompt becomes token ids and where an answer ends: by the conventions that the model was trained with.

A run of our own read documents that begin after the end token of another, so that token begins a prompt. A model of
Hugging Face gets what its own tokenizer adds (the post-processor of tokenizer.json, `add_bos_token`), and its answer
ends with the tokens that generation_config.json, config.json and tokenizer_config.json name.
"""

from __future__ import annotations

import array
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

DEFAULT_EOS = "<|endoftext|>"
SMALLEST_VOCAB = 257  # the 256 bytes and the end of a document

_LINE_START = re.compile(r"\n(?=\S)")
# Where the split rules in use (ours, GPT-2's, GPT-4's, o200k's, SentencePiece's) all cut, best first. White space
# before the newline is excluded: GPT-2's rule looks past it to decide where the run is divided.
_PLACES = (re.compile(r"(?<=\S\n)(?=[^\W_])"), re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])"), re.compile(r"(?<=\n)(?=\S)"))
_PLACES_TRIED = 4  # of each kind
_NEIGHBOURHOOD_CHARS = 200
_FAST_CHARS = 1 << 19  # tiktoken gives up on a run of a million spaces

Ids = npt.NDArray[np.uint32]


class Tokenizer:
    """Wraps `tokenizers.Tokenizer`. Safe to share between threads.

    `eos_id` ends a document; `special` has the id of every special token, the end of a document among them;
    `vocab_size` is the highest id + 1, which is what an embedding needs.
    """

    def __init__(self, inner: Any, eos: str, special: Iterable[str] = ()) -> None:
        from bessemer.data.tokenizer.load import check_decodes, declare, reachable

        # A tokenizer.json made for a classifier may cut or pad every text.
        inner.no_truncation()
        inner.no_padding()
        check_decodes(inner, declare(inner, [eos, *special]))
        inner.encode_special_tokens = True  # the library's name for "a special token in a text is only text"
        self._inner = inner
        self.eos = eos
        self.eos_id: int = inner.token_to_id(eos)
        added = sorted(inner.get_added_tokens_decoder().items())
        self.special: dict[str, int] = {token.content: i for i, token in added if token.special}
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self._reachable = reachable(inner, self.special)

    @classmethod
    def load(
        cls, path: str | Path, eos: str | None = None, special: Iterable[str] = (), pattern: str | None = None
    ) -> Tokenizer:
        """Reads a tokenizer.json, a SentencePiece model or a file of tiktoken ranks, or the folder that holds one.

        Without `eos`, looks for the usual names. `special` tokens that the file has not get new ids at the end.
        `pattern` is for tiktoken ranks whose file name does not tell how text is split (see vocabulary.load).
        """
        from bessemer.data.tokenizer.load import load

        special = list(special)
        inner, eos = load(path, eos, special, pattern)
        return cls(inner, eos, special)

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab: int, eos: str = DEFAULT_EOS, kind: str = "bpe", special: Iterable[str] = ()
    ) -> Tokenizer:
        """A tokenizer of at most `vocab` ids, the same for the same texts. Any text round-trips.

        `kind` is bpe, unigram, wordpiece or char. A small corpus may have fewer tokens worth an id.
        """
        from bessemer.data.tokenizer.train import train

        special = [name for name in special if name != eos]
        return cls(train(texts, vocab, [eos, *special], kind), eos, special)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal definitions, however the file was formatted."""
        # The library changes the last digits of a score when it reads its own file.
        definition = [self.eos, json.loads(self._inner.to_str(), parse_float=lambda text: round(float(text), 6))]
        return xxhash.xxh3_128_hexdigest(json.dumps(definition, sort_keys=True, separators=(",", ":")).encode())

    @property
    def inner(self) -> Any:
        """The library's own tokenizer, for what this class does not offer. Not to be changed."""
        return self._inner

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], continues: Sequence[bool] | None = None) -> list[list[int]]:
        """Ids of each text, without an end of document. Uses all cores; takes some 50 times the memory of the text.

        Where `continues` is true, the text is the next piece of the document before it (see `cut`).
        """
        ids = [encoding.ids for encoding in self._encodings(texts, continues, fast=True)]
        for i, text in enumerate(texts):
            if self._reachable and not self._reachable.isdisjoint(ids[i]):
                ids[i] = self._encode_around_special(text, bool(continues and continues[i]))[0]
        return ids

    def encode_arrays(self, texts: Sequence[str], continues: Sequence[bool] | None = None) -> list[Ids]:
        """As `encode_batch`, as arrays: an eighth of the memory of lists.

        With tiktoken installed, a plain byte-level BPE is run by it: on one core, but six times as fast.
        """
        if self.fast is not None and all(len(text) <= _FAST_CHARS for text in texts):
            return [self.fast(text) for text in texts]
        # By way of array it takes about half the time of np.array(ids).
        return [np.frombuffer(array.array("I", ids), np.uint32) for ids in self.encode_batch(texts, continues)]

    def encode_with_offsets(
        self, texts: Sequence[str], continues: Sequence[bool] | None = None
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of each text, and the characters [start, stop) that each id stands for."""
        encodings = self._encodings(texts, continues, fast=False)
        found = [(encoding.ids, encoding.offsets) for encoding in encodings]
        for i, text in enumerate(texts):
            if self._reachable and not self._reachable.isdisjoint(found[i][0]):
                found[i] = self._encode_around_special(text, bool(continues and continues[i]))
        return found

    def encode_with_special(self, text: str) -> list[int]:
        """As `encode`, but the name of a special token in the text is that token."""
        return list(self._parsing.encode(text, add_special_tokens=False).ids)

    def encode_pieces(self, text: str, size: int) -> list[int]:
        """The ids of the text, encoded in pieces of `size` to `2 * size` characters: memory for one piece."""
        ids: list[int] = []
        for number, piece in enumerate(self.cut(text, size)):
            ids += self.encode_batch([piece], [number > 0])[0]
        return ids

    def cut(self, text: str, size: int) -> Iterator[str]:
        """Pieces of `size` to `2 * size` characters whose ids join to those of the text.

        Each cut is tried on the text around it. Where no cut in reach leaves the ids as they are (a merge may run on
        through thousands of letters), the piece ends after `size` characters all the same.
        """
        start = 0
        while len(text) - start > 2 * size:
            tried = (place for place in _places(text, start, size) if self._parts_at(text, place))
            end = next(tried, start + size)
            yield text[start:end]
            start = end
        yield text[start:]

    def decode(self, ids: Sequence[int], continues: bool = False) -> str:
        """The text of the ids. `continues`: they follow others, so a leading space is kept where one would be cut."""
        inner = self._rest if continues else self._inner
        return inner.decode(list(ids), skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        """Writes a tokenizer.json, special tokens included."""
        self._inner.save(str(path))

    @cached_property
    def fast(self) -> Callable[[str], Ids] | None:
        """Encodes one text with tiktoken; None where that is not installed or not shown to give the same ids."""
        from bessemer.data.tokenizer.load import fast_encoder

        return fast_encoder(self._inner)

    @cached_property
    def _parsing(self) -> Any:
        """A copy of the library's tokenizer that finds special tokens in a text."""
        from tokenizers import Tokenizer as Inner

        copy = Inner.from_str(self._inner.to_str())
        copy.encode_special_tokens = False
        return copy

    @cached_property
    def _rest(self) -> Any:
        """The tokenizer for what follows the first piece of a document: without a space put before the text."""
        from bessemer.data.tokenizer.load import without_prefix

        return without_prefix(self._inner)

    def _encodings(self, texts: Sequence[str], continues: Sequence[bool] | None, fast: bool) -> list[Any]:
        rest = self._rest if continues and any(continues) else self._inner
        if rest is self._inner:
            return _encode(self._inner, texts, fast)
        assert continues is not None and len(continues) == len(texts)
        found: list[Any] = [None] * len(texts)
        for inner, later in ((self._inner, False), (rest, True)):
            at = [i for i, here in enumerate(continues) if here == later]
            for i, encoding in zip(at, _encode(inner, [texts[i] for i in at], fast), strict=True):
                found[i] = encoding
        return found

    def _encode_around_special(self, text: str, continues: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """For models that hold a special token as an ordinary piece (some Unigram ones do): cut through it."""
        names = sorted((name for name, i in self.special.items() if i in self._reachable), key=len, reverse=True)
        places = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, names)), text)]
        starts = [0, *places]
        pieces = [text[i:j] for i, j in itertools.pairwise([*starts, len(text)])]
        found = self._encodings(pieces, [continues] + [True] * len(places), fast=False)
        kept = [
            (i, (start + offset[0], start + offset[1]))
            for start, encoding in zip(starts, found, strict=True)
            for i, offset in zip(encoding.ids, encoding.offsets, strict=True)
            if i not in self._reachable
        ]
        return [i for i, _ in kept], [offset for _, offset in kept]

    def _parts_at(self, text: str, place: int) -> bool:
        """Whether the text around `place` has the same ids when it is cut there."""
        first, last = max(0, place - _NEIGHBOURHOOD_CHARS), place + _NEIGHBOURHOOD_CHARS
        left, right = text[first:place], text[place:last]
        parts = self.encode_batch([left, right, left + right], [first > 0, True, first > 0])
        return parts[0] + parts[1] == parts[2]


def _encode(inner: Any, texts: Sequence[str], fast: bool) -> list[Any]:
    encode = inner.encode_batch_fast if fast else inner.encode_batch
    return encode(list(texts), add_special_tokens=False)


def _places(text: str, start: int, size: int) -> Iterator[int]:
    """Where to try a cut, best first: at ends of lines, between words, and at some places of no kind."""
    for pattern in _PLACES:
        matches = pattern.finditer(text, start + size, start + 2 * size)
        yield from (match.start() for match in itertools.islice(matches, _PLACES_TRIED))
    step = max(1, size // 16)
    yield from range(start + size, start + 2 * size, step)


def cut(text: str, size: int) -> Iterator[str]:
    """Pieces of `size` to `2 * size` characters that join to the text, cut at the start of a line if one is in reach.

    For work on any text; pieces to be encoded come from `Tokenizer.cut`.
    """
    start = 0
    while len(text) - start > 2 * size:
        match = _LINE_START.search(text, start + size, start + 2 * size)
        end = match.end() if match else start + size
        yield text[start:end]
        start = end
    yield text[start:]


_BOS_BY_DEFAULT = ("llama", "gemma", "codellama", "mistral")  # classes whose tokenizer.model begins texts with BOS


@dataclass(frozen=True)
class PromptFormat:
    """Ids before and after a prompt, what an empty prompt begins with, and the ids that end an answer."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    start: int
    ends: frozenset[int]

    def encode(self, tokenizer: Tokenizer, prompt: str, parse_special: bool = False) -> list[int]:
        """The ids that the model reads. With `parse_special`, names of special tokens in the prompt are those tokens;
        without it they are plain text. Never empty."""
        text = tokenizer.encode_with_special(prompt) if parse_special else tokenizer.encode(prompt)
        return [*self.prefix, *text, *self.suffix] or [self.start]


def own_format(tokenizer: Tokenizer) -> PromptFormat:
    """Of models trained here."""
    return PromptFormat((tokenizer.eos_id,), (), tokenizer.eos_id, frozenset({tokenizer.eos_id}))


def folder_format(folder: Path, tokenizer: Tokenizer, trained_here: bool = False) -> PromptFormat:
    """Of a Hugging Face folder. `trained_here`: the model was trained on, so the tokenizer's own end token counts too.

    As in transformers, a tokenizer.json says by itself what is added; flags count for a tokenizer.model alone.
    """
    config, about, generation = (
        _read(folder / name) for name in ("config.json", "tokenizer_config.json", "generation_config.json")
    )
    eos, bos = (_token_id(tokenizer, about.get(f"{role}_token")) for role in ("eos", "bos"))
    if (folder / "tokenizer.json").is_file():
        prefix, suffix = _added(tokenizer)
    else:
        kind = str(about.get("tokenizer_class", "")).lower()
        begins = about.get("add_bos_token", kind.startswith(_BOS_BY_DEFAULT)) and bos is not None
        prefix = (bos,) if begins and bos is not None else ()
        suffix = (eos,) if about.get("add_eos_token") and eos is not None else ()
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    named = _ids(generation, "eos_token_id") or _ids(config, "eos_token_id") or _ids(text_config, "eos_token_id")
    ends = {*named, *([eos] if eos is not None else ())}
    if trained_here or not ends:
        ends.add(tokenizer.eos_id)
    starts = [*_ids(generation, "bos_token_id"), *_ids(config, "bos_token_id"), *([bos] if bos is not None else ())]
    return PromptFormat(prefix, suffix, next(iter(starts), tokenizer.eos_id), frozenset(ends))


def end_token(folder: Path) -> str | None:
    """The name of the end token in tokenizer_config.json, where it is written."""
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def _added(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    plain = tokenizer.inner.encode("a", add_special_tokens=False).ids
    whole = tokenizer.inner.encode("a").ids
    at = next((i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain), 0)
    return tuple(whole[:at]), tuple(whole[at + len(plain) :])


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _ids(config: Any, key: str) -> list[int]:
    """One id or a list of them."""
    value = config.get(key) if isinstance(config, dict) else None
    values = value if isinstance(value, list) else [value]
    return [id for id in values if isinstance(id, int) and not isinstance(id, bool)]


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """Older files write a token as an object with its content."""
    name = token.get("content") if isinstance(token, dict) else token
    found: int | None = tokenizer.inner.token_to_id(name) if isinstance(name, str) else None
    return found
