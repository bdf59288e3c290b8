"""Text to token ids and back: a Hugging Face tokenizer, loaded or trained, with two additional rules.

Text that spells a special token is encoded as plain text, and a long document can be encoded in pieces whose ids join
to those of the whole. `PromptFormat` says how a prompt is encoded for a model and which tokens end its answer.
"""

from __future__ import annotations

import array
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bessemer.errors import UserError

DEFAULT_EOS = "<|endoftext|>"
SMALLEST_VOCAB = 257  # the 256 bytes and the end-of-document token

_LINE_START = re.compile(r"\n(?=\S)")
# Where all split rules in use (llama3, GPT-2, GPT-4, o200k, SentencePiece) cut, best first. White space before the
# newline is excluded: GPT-2's rule looks past it to divide the run.
_PLACES = (re.compile(r"(?<=\S\n)(?=[^\W_])"), re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])"), re.compile(r"(?<=\n)(?=\S)"))
_PLACES_TRIED = 4  # of each kind
_NEIGHBOURHOOD_CHARS = 200
_FAST_CHARS = 1 << 19  # tiktoken gives up on a run of a million spaces

Ids = npt.NDArray[np.uint32]


class Tokenizer:
    """Wraps `tokenizers.Tokenizer`. Safe to share between threads.

    `eos_id` ends a document; `special` maps every special token, including that one, to its id; `vocab_size` is the
    highest id + 1, which an embedding needs.
    """

    def __init__(self, inner: Any, eos: str, special: Iterable[str] = ()) -> None:
        # A tokenizer.json made for a classifier may truncate or pad every text.
        inner.no_truncation()
        inner.no_padding()
        check_decodes(inner, declare(inner, [eos, *special]))
        inner.encode_special_tokens = True  # the library's name for encoding special tokens in a text as text
        self._inner = inner
        self.eos = eos
        self.eos_id: int = inner.token_to_id(eos)
        added = sorted(inner.get_added_tokens_decoder().items())
        self.special: dict[str, int] = {token.content: i for i, token in added if token.special}
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self._reachable = reachable_special(inner, self.special)

    @classmethod
    def load(
        cls, path: str | Path, eos: str | None = None, special: Iterable[str] = (), pattern: str | None = None
    ) -> Tokenizer:
        """Reads a tokenizer.json, a SentencePiece model or a file of tiktoken ranks, or the folder that holds one.

        Without `eos`, tries the usual names. `special` tokens that the file lacks get new ids at the end. `pattern` is
        for tiktoken ranks whose file name does not say how text is split.
        """
        from bessemer.data.tokenizer.load import load

        special = list(special)
        inner, eos = load(path, eos, special, pattern)
        return cls(inner, eos, special)

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab: int, eos: str = DEFAULT_EOS, kind: str = "bpe", special: Iterable[str] = ()
    ) -> Tokenizer:
        """Trains a tokenizer of at most `vocab` ids, deterministically. Any text round-trips.

        `kind` is bpe, unigram, wordpiece or char. A small corpus may give fewer tokens.
        """
        from bessemer.data.tokenizer.train import train

        special = [name for name in special if name != eos]
        return cls(train(texts, vocab, [eos, *special], kind), eos, special)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the definition, independent of the file's formatting."""
        # The library changes the last digits of scores when it reads its own file.
        definition = [self.eos, json.loads(self._inner.to_str(), parse_float=lambda text: round(float(text), 6))]
        return xxhash.xxh3_128_hexdigest(json.dumps(definition, sort_keys=True, separators=(",", ":")).encode())

    @property
    def inner(self) -> Any:
        """The wrapped tokenizer of the library. Do not modify it."""
        return self._inner

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], continues: Sequence[bool] | None = None) -> list[list[int]]:
        """Ids of each text, without an end of document. Uses all cores and 50 times the memory of the text.

        If `continues[i]` is true, text i is a later piece of a document (see `cut`).
        """
        ids = [encoding.ids for encoding in self._encodings(texts, continues, fast=True)]
        for i, text in enumerate(texts):
            if self._reachable and not self._reachable.isdisjoint(ids[i]):
                ids[i] = self._encode_around_special(text, bool(continues and continues[i]))[0]
        return ids

    def encode_arrays(self, texts: Sequence[str], continues: Sequence[bool] | None = None) -> list[Ids]:
        """`encode_batch` as arrays: an eighth of the memory of lists.

        With tiktoken installed, it runs a plain byte-level BPE: on one core, but six times as fast.
        """
        if self.fast is not None and all(len(text) <= _FAST_CHARS for text in texts):
            return [self.fast(text) for text in texts]
        # array.array takes half the time of np.array(ids).
        return [np.frombuffer(array.array("I", ids), np.uint32) for ids in self.encode_batch(texts, continues)]

    def encode_with_offsets(
        self, texts: Sequence[str], continues: Sequence[bool] | None = None
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Ids of each text, and the characters [start, stop) of each id."""
        encodings = self._encodings(texts, continues, fast=False)
        results = [(encoding.ids, encoding.offsets) for encoding in encodings]
        for i, text in enumerate(texts):
            if self._reachable and not self._reachable.isdisjoint(results[i][0]):
                results[i] = self._encode_around_special(text, bool(continues and continues[i]))
        return results

    def encode_with_special(self, text: str) -> list[int]:
        """`encode`, but names of special tokens in the text become those tokens."""
        return list(self._parsing.encode(text, add_special_tokens=False).ids)

    def cut(self, text: str, size: int) -> Iterator[str]:
        """Cuts the text into pieces of `size` to `2 * size` characters whose ids join to those of the text.

        Each cut is tested on the text around it. If no cut in reach preserves the ids (a merge may span thousands of
        letters), the piece ends after `size` characters.
        """
        start = 0
        while len(text) - start > 2 * size:
            cuts = (place for place in _places(text, start, size) if self._is_safe_cut(text, place))
            end = next(cuts, start + size)
            yield text[start:end]
            start = end
        yield text[start:]

    def decode(self, ids: Sequence[int], continues: bool = False) -> str:
        """The text of the ids. With `continues` they follow others, so a leading space is kept."""
        inner = self._rest if continues else self._inner
        return inner.decode(list(ids), skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        """Writes a tokenizer.json, special tokens included."""
        self._inner.save(str(path))

    @cached_property
    def fast(self) -> Callable[[str], Ids] | None:
        """Encodes one text with tiktoken; None if it is not installed or not shown to give the same ids."""
        from bessemer.data.tokenizer.load import fast_encoder

        return fast_encoder(self._inner)

    @cached_property
    def _parsing(self) -> Any:
        """A copy of the library's tokenizer that recognizes special tokens in a text."""
        from tokenizers import Tokenizer as Inner

        copy = Inner.from_str(self._inner.to_str())
        copy.encode_special_tokens = False
        return copy

    @cached_property
    def _rest(self) -> Any:
        """The tokenizer for later pieces of a document: it adds no space before the text."""
        return without_prefix(self._inner)

    @cached_property
    def prefixes_after_special(self) -> bool:
        """Whether the tokenizer adds its space also to text after a special token, not only at the beginning of a text
        (Llama 2, Mistral 7B v0.1, TinyLlama)."""
        first, *rest = self._parsing.encode(f"{self.eos}a", add_special_tokens=False).ids
        return first == self.eos_id and rest != self._rest.encode("a", add_special_tokens=False).ids

    def _encodings(self, texts: Sequence[str], continues: Sequence[bool] | None, fast: bool) -> list[Any]:
        rest = self._rest if continues and any(continues) else self._inner
        if rest is self._inner:
            return _encode(self._inner, texts, fast)
        assert continues is not None and len(continues) == len(texts)
        encodings: list[Any] = [None] * len(texts)
        for inner, later in ((self._inner, False), (rest, True)):
            at = [i for i, flag in enumerate(continues) if flag == later]
            for i, encoding in zip(at, _encode(inner, [texts[i] for i in at], fast), strict=True):
                encodings[i] = encoding
        return encodings

    def _encode_around_special(self, text: str, continues: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """For models with a special token among their pieces (some Unigram models): cuts the text inside its name."""
        names = sorted((name for name, i in self.special.items() if i in self._reachable), key=len, reverse=True)
        places = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, names)), text)]
        starts = [0, *places]
        pieces = [text[i:j] for i, j in itertools.pairwise([*starts, len(text)])]
        encodings = self._encodings(pieces, [continues] + [True] * len(places), fast=False)
        plain = [
            (i, (start + offset[0], start + offset[1]))
            for start, encoding in zip(starts, encodings, strict=True)
            for i, offset in zip(encoding.ids, encoding.offsets, strict=True)
            if i not in self._reachable
        ]
        return [i for i, _ in plain], [offset for _, offset in plain]

    def _is_safe_cut(self, text: str, place: int) -> bool:
        """Whether the text around `place` has the same ids if it is cut there."""
        first, last = max(0, place - _NEIGHBOURHOOD_CHARS), place + _NEIGHBOURHOOD_CHARS
        left, right = text[first:place], text[place:last]
        parts = self.encode_batch([left, right, left + right], [first > 0, True, first > 0])
        return parts[0] + parts[1] == parts[2]


def declare(inner: Any, names: Iterable[str]) -> list[str]:
    """Makes every name a special token with one id; new names are added at the end of the vocabulary and returned."""
    new = []
    for name in names:
        if not name or name != name.strip():
            raise UserError(f"special token {name!r}: write a name without spaces around it")
        token_id = inner.token_to_id(name)
        added = inner.get_added_tokens_decoder().get(token_id) if token_id is not None else None
        if added is not None and added.special:
            continue
        taken = set(inner.get_vocab(with_added_tokens=True).values())
        inner.add_special_tokens([name])
        new += [name] if token_id is None else []
        if token_id is None and inner.token_to_id(name) in taken:
            raise UserError(
                f"special token {name!r}: the tokenizer's ids have gaps, so {inner.token_to_id(name)} would stand for "
                "two tokens; give a tokenizer that has the token already"
            )
    return new


def check_decodes(inner: Any, names: Iterable[str]) -> None:
    """Refuses names with letters that a byte-level decoder takes for bytes."""
    for name in names:
        shown = inner.decode([inner.token_to_id(name)], skip_special_tokens=False)
        if shown != name:
            raise UserError(f"special token {name!r}: it would be shown as {shown!r}; use ASCII characters")


def reachable_special(inner: Any, special: Mapping[str, int]) -> frozenset[int]:
    """Special ids that the model may give to plain text, because their names are among its pieces."""
    model = inner.model
    held = {name: i for name, i in special.items() if model.token_to_id(name) == i}
    if not held:
        return frozenset()
    kind, definition = type(model).__name__, json.loads(inner.to_str())["model"]
    # The unknown token is the only way to encode some text.
    held.pop(definition.get("unk_token"), None)
    held = {name: i for name, i in held.items() if i != definition.get("unk_id")}
    if kind == "BPE" and not model.ignore_merges:
        merged = {a + b for a, b in definition["merges"]}
        return frozenset(i for name, i in held.items() if name in merged or len(name) == 1)
    if kind == "Unigram":
        # If other pieces are better for the name alone, they are better in every text.
        return frozenset(i for name, i in held.items() if i in [token.id for token in model.tokenize(name)])
    return frozenset(held.values())


def without_prefix(inner: Any) -> Any:
    """The same tokenizer without the space that it adds before a text (or removes): for text that continues. The
    tokenizer itself if it does neither."""
    from tokenizers import Tokenizer as Inner

    definition = json.loads(inner.to_str())
    plain = {part: _plain(definition[part]) for part in ("normalizer", "pre_tokenizer", "decoder")}
    if all(definition[part] == plain[part] for part in ("normalizer", "pre_tokenizer")):
        return inner
    rest = Inner.from_str(json.dumps(definition | plain))
    rest.encode_special_tokens = inner.encode_special_tokens
    return rest


def _plain(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer, pre-tokenizer or decoder that treats the beginning of a text like any other position."""
    if part is None:
        return None
    for name in ("normalizers", "pretokenizers", "decoders"):
        if name in part:
            children = [plain for child in part[name] if (plain := _plain(child)) is not None]
            return {**part, name: children}
    kind = part["type"]
    if kind == "Prepend" or (kind == "Replace" and part["pattern"].get("Regex", "").startswith(r"\A")):
        return None
    plain = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    if kind == "Strip":
        return {**part, **({"strip_left": False} if "strip_left" in part else {"start": 0})}
    return {**part, **plain.get(kind, {})}


def _encode(inner: Any, texts: Sequence[str], fast: bool) -> list[Any]:
    encode = inner.encode_batch_fast if fast else inner.encode_batch
    return encode(list(texts), add_special_tokens=False)


def _places(text: str, start: int, size: int) -> Iterator[int]:
    """Candidate cuts, best first: at ends of lines, between words, and at regular intervals."""
    for pattern in _PLACES:
        matches = pattern.finditer(text, start + size, start + 2 * size)
        yield from (match.start() for match in itertools.islice(matches, _PLACES_TRIED))
    step = max(1, size // 16)
    yield from range(start + size, start + 2 * size, step)


def cut(text: str, size: int) -> Iterator[str]:
    """Cuts the text into pieces of `size` to `2 * size` characters, at the start of a line if possible. Pieces to be
    encoded come from `Tokenizer.cut`."""
    start = 0
    while len(text) - start > 2 * size:
        match = _LINE_START.search(text, start + size, start + 2 * size)
        end = match.end() if match else start + size
        yield text[start:end]
        start = end
    yield text[start:]


_BOS_BY_DEFAULT = ("llama", "gemma", "codellama", "mistral")  # tokenizer classes that begin texts with BOS


@dataclass(frozen=True)
class PromptFormat:
    """The ids before and after a prompt, the id of an empty prompt, and the ids that end an answer."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    start: int
    ends: frozenset[int]

    def encode(self, tokenizer: Tokenizer, prompt: str, parse_special: bool = False) -> list[int]:
        """The ids that the model reads; never empty. With `parse_special`, names of special tokens in the prompt become
        those tokens."""
        text = tokenizer.encode_with_special(prompt) if parse_special else tokenizer.encode(prompt)
        return [*self.prefix, *text, *self.suffix] or [self.start]


def native_prompt_format(tokenizer: Tokenizer) -> PromptFormat:
    """For models trained by Bessemer: the end token of the previous document begins a prompt."""
    return PromptFormat((tokenizer.eos_id,), (), tokenizer.eos_id, frozenset({tokenizer.eos_id}))


def hf_prompt_format(folder: Path, tokenizer: Tokenizer, trained_here: bool = False) -> PromptFormat:
    """For a Hugging Face folder. With `trained_here` the tokenizer's own end token ends an answer too.

    As in transformers, a tokenizer.json defines what is added (its post-processor); flags such as `add_bos_token` count
    only for a tokenizer.model. Answers end with the tokens that generation_config.json, config.json and
    tokenizer_config.json name.
    """
    config, tokenizer_config, generation = (
        _read(folder / name) for name in ("config.json", "tokenizer_config.json", "generation_config.json")
    )
    eos, bos = (_token_id(tokenizer, tokenizer_config.get(f"{role}_token")) for role in ("eos", "bos"))
    if (folder / "tokenizer.json").is_file():
        prefix, suffix = added_tokens(tokenizer)
    else:
        kind = str(tokenizer_config.get("tokenizer_class", "")).lower()
        begins = tokenizer_config.get("add_bos_token", kind.startswith(_BOS_BY_DEFAULT)) and bos is not None
        prefix = (bos,) if begins and bos is not None else ()
        suffix = (eos,) if tokenizer_config.get("add_eos_token") and eos is not None else ()
    text_config = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    named = _ids(generation, "eos_token_id") or _ids(config, "eos_token_id") or _ids(text_config, "eos_token_id")
    ends = {*named, *([eos] if eos is not None else ())}
    if trained_here or not ends:
        ends.add(tokenizer.eos_id)
    starts = [*_ids(generation, "bos_token_id"), *_ids(config, "bos_token_id"), *([bos] if bos is not None else ())]
    return PromptFormat(prefix, suffix, next(iter(starts), tokenizer.eos_id), frozenset(ends))


def end_token(folder: Path) -> str | None:
    """The name of the end token in tokenizer_config.json, if it is there."""
    return named_tokens(folder).get("eos")


def named_tokens(folder: Path) -> dict[str, str]:
    """The names of the bos, eos and pad tokens in tokenizer_config.json, as far as they are there."""
    config = _read(folder / "tokenizer_config.json")
    tokens = {role: config.get(f"{role}_token") for role in ("bos", "eos", "pad")}
    names = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
    return {role: name for role, name in names.items() if isinstance(name, str)}


def pad_token_id(folder: Path, tokenizer: Tokenizer) -> int:
    """The id that transformers skips at the end of a row: that of config.json, else of the tokenizer's pad token, else,
    as in TRL, the end token."""
    named = _ids(_read(folder / "config.json"), "pad_token_id")
    pad = _token_id(tokenizer, named_tokens(folder).get("pad"))
    return next(iter([*named, *([pad] if pad is not None else ())]), tokenizer.eos_id)


def added_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor adds before and after a text."""
    plain = tokenizer.inner.encode("a", add_special_tokens=False).ids
    complete = tokenizer.inner.encode("a").ids
    at = next((i for i in range(len(complete) - len(plain) + 1) if complete[i : i + len(plain)] == plain), 0)
    return tuple(complete[:at]), tuple(complete[at + len(plain) :])


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if the file is missing or invalid."""
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
    token_id: int | None = tokenizer.inner.token_to_id(name) if isinstance(name, str) else None
    return token_id
