"""Text to token ids and back: a Hugging Face `tokenizer.json`, loaded or trained here, with one rule of our own.

The end-of-document id marks the end of a document and nothing else: text that spells it is encoded as plain text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from bessemer.errors import UserError

DEFAULT_EOS = "<|endoftext|>"
_KNOWN_EOS = (DEFAULT_EOS, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")

# Llama 3's split, byte for byte, so that other tools recognise it: words with their leading space, up to three
# digits, punctuation, newlines, and runs of spaces (indentation) as one piece.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SMALLEST_VOCAB = 257  # the 256 bytes and the end of a document

_LINE_START = re.compile(r"\n(?=\S)")


class Tokenizer:
    """Wraps `tokenizers.Tokenizer`. Safe to share between threads.

    `eos_id` ends a document; `vocab_size` is the highest id + 1, which is what an embedding needs.
    """

    def __init__(self, inner: Any, eos: str) -> None:
        self._inner = inner
        self.eos = eos
        self.eos_id: int = inner.token_to_id(eos)
        # A tokenizer.json made for a classifier may cut or pad every text.
        inner.no_truncation()
        inner.no_padding()
        added = inner.get_added_tokens_decoder().get(self.eos_id)
        if added is None or not added.special:
            inner.add_special_tokens([eos])
        inner.encode_special_tokens = True  # the library's name for "a special token in a text is only text"
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, path: str | Path, eos: str | None = None) -> Tokenizer:
        """Reads a tokenizer.json (or the folder that holds one); without `eos`, looks for the usual names."""
        from tokenizers import Tokenizer as Inner

        path = os.path.expanduser(path)
        path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        if not os.path.isfile(path):
            raise UserError(f"tokenizer.path: no file {path}; give a Hugging Face tokenizer.json")
        try:
            inner = Inner.from_file(path)
        except Exception as error:  # the library raises plain Exception for whatever it cannot parse
            raise UserError(f"{path}: not a Hugging Face tokenizer.json ({error})") from error
        names = (eos,) if eos is not None else _KNOWN_EOS
        for name in names:
            if inner.token_to_id(name) is not None:
                return cls(inner, name)
        special = [token.content for token in inner.get_added_tokens_decoder().values()][:12]
        raise UserError(
            f"{path}: no end-of-document token {' or '.join(names)}; "
            f"set tokenizer.eos to one it has ({', '.join(special) or 'it names no special tokens'})"
        )

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int, eos: str = DEFAULT_EOS) -> Tokenizer:
        """A byte-level BPE of at most `vocab` ids, the same for the same texts.

        Any text round-trips, since all 256 bytes are in it. A small corpus may have fewer pairs worth merging.
        """
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Inner

        if vocab < SMALLEST_VOCAB:
            raise UserError(
                f"tokenizer.vocab: {vocab} is too small for 256 bytes and {eos}; give 257 or more"
            )
        inner = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab,
            min_frequency=2,
            special_tokens=[eos],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(iter(texts), trainer)
        return cls(inner, eos)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal definitions, however the file was formatted."""
        definition = [self.eos, json.loads(self._inner.to_str())]
        return xxhash.xxh3_128_hexdigest(
            json.dumps(definition, sort_keys=True, separators=(",", ":")).encode()
        )

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without an end of document. Uses all cores; takes some 50 times the memory of the text."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        for i, text in enumerate(texts):
            if self.eos_id in ids[i]:
                ids[i] = self._encode_around_eos(text)
        return ids

    def _encode_around_eos(self, text: str) -> list[int]:
        """For models that hold the token as an ordinary piece (some Unigram ones do): cut through it."""
        first, *rest = text.split(self.eos)
        pieces = [first]
        for part in rest:
            pieces[-1] += self.eos[:1]
            pieces.append(self.eos[1:] + part)
        encodings = self._inner.encode_batch_fast(pieces, add_special_tokens=False)
        return [i for encoding in encodings for i in encoding.ids if i != self.eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def save(self, path: str | Path) -> None:
        self._inner.save(str(path))


def cut(text: str, size: int) -> Iterator[str]:
    """Pieces of `size` to `2 * size` characters that join to the text.

    A cut falls, where one can be found, between a newline and a character that is not white space: there every
    split rule in use (ours, GPT-2's, GPT-4's) cuts as well, so the tokens of the pieces are those of the text.
    """
    start = 0
    while len(text) - start > 2 * size:
        match = _LINE_START.search(text, start + size, start + 2 * size)
        end = match.end() if match else start + size
        yield text[start:end]
        start = end
    yield text[start:]
