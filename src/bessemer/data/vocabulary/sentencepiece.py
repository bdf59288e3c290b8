"""SentencePiece models (tokenizer.model): read without their package, made into a `tokenizers.Tokenizer`.

Unigram and BPE models, with byte fallback or an unknown token, with user-defined and control symbols. The file is a
protobuf; the numbers below are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bessemer.data.vocabulary.merges import merges_of
from bessemer.errors import UserError

SPACE = "▁"  # U+2581, how SentencePiece writes a space
NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE, _WORD, _CHAR = range(1, 5)
# A piece that text must never give (a control symbol, a byte) still stands among a Unigram model's pieces; this far
# below the others no text is better off with it.
_NEVER = 1000.0
BYTE_NAME_CHARACTERS = "<0123456789ABCDEFx>"


@dataclass
class Model:
    """What a model file says, as far as encoding needs it."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)  # text, score, type
    kind: int = _UNIGRAM
    byte_fallback: bool = False
    space_behind: bool = False
    charsmap: bytes = b""
    dummy_prefix: bool = True
    remove_extra_spaces: bool = True
    escape_spaces: bool = True

    def of_type(self, *types: int) -> list[str]:
        return [piece for piece, _, kind in self.pieces if kind in types]


def from_sentencepiece(path: str) -> Any:
    """A `tokenizers.Tokenizer` with the model's ids; control symbols are its special tokens."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        model = parse(data)
    except (IndexError, struct.error, UnicodeDecodeError, ValueError) as error:
        raise UserError(
            f"{path}: neither a tokenizer.json, a SentencePiece model nor tiktoken's ranks ({error}); "
            "download the file again"
        ) from error
    if not model.pieces or model.kind not in (_UNIGRAM, _BPE, _CHAR):
        raise UserError(f"{path}: not a unigram, BPE or character model of SentencePiece; convert it first")
    if model.space_behind or not model.escape_spaces or (model.kind == _BPE and model.of_type(_UNUSED)):
        raise UserError(
            f"{path}: a model with spaces behind words, unescaped spaces or unused BPE pieces; convert it first"
        )
    return build(model)


def parse(data: bytes) -> Model:
    """Reads sentencepiece_model.proto's ModelProto."""
    model = Model()
    for number, value in _fields(data):
        if number == 1:
            piece, score, kind = "", 0.0, NORMAL
            for key, part in _fields(value):
                if key == 1:
                    piece = part.decode()
                elif key == 2:
                    score = struct.unpack("<f", part)[0]
                elif key == 3:
                    kind = part
            model.pieces.append((piece, score, kind))
        elif number == 2:
            trainer = dict(_fields(value))
            model.kind = trainer.get(3, _UNIGRAM)
            model.space_behind = bool(trainer.get(24, 0))
            model.byte_fallback = bool(trainer.get(35, 0))
        elif number == 3:
            normalizer = dict(_fields(value))
            model.charsmap = normalizer.get(2, b"")
            model.dummy_prefix = bool(normalizer.get(3, 1))
            model.remove_extra_spaces = bool(normalizer.get(4, 1))
            model.escape_spaces = bool(normalizer.get(5, 1))
    return model


def build(model: Model) -> Any:
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Inner

    unknown = next((i for i, (_, _, kind) in enumerate(model.pieces) if kind == _UNKNOWN), 0)
    if model.kind == _UNIGRAM:
        never = min((score for _, score, kind in model.pieces if kind == NORMAL), default=0.0) - _NEVER
        # Rounded, since the library reads long numbers from its own file inexactly; ten digits it reads as written.
        scored = [
            (piece, round(score if kind == NORMAL else never, 9)) for piece, score, kind in model.pieces
        ]
        inner = Inner(models.Unigram(scored, unk_id=unknown, byte_fallback=model.byte_fallback))
    else:
        ranked = sorted((entry for entry in model.pieces if entry[2] == NORMAL), key=lambda entry: -entry[1])
        inner = Inner(
            models.BPE(
                vocab={piece: i for i, (piece, _, _) in enumerate(model.pieces)},
                merges=merges_of(piece for piece, _, _ in ranked) if model.kind == _BPE else [],
                unk_token=model.pieces[unknown][0],
                fuse_unk=True,
                byte_fallback=model.byte_fallback,
            )
        )
    defined = model.of_type(_USER_DEFINED)
    inner.normalizer = _normalizer(model, defined)
    inner.pre_tokenizer = _pre_tokenizer(model)
    leading = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
    inner.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *leading]
    )
    inner.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in model.of_type(_UNKNOWN, _CONTROL)]
    )
    # Found after normalization, which then sees the text as a whole: spaces at its ends are no symbol's.
    inner.add_tokens([AddedToken(piece, special=False, normalized=True) for piece in defined])
    return inner


def _normalizer(model: Model, defined: list[str]) -> Any:
    """The model's own rules. A rule that begins with \\A is for the beginning of a document alone."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_spaces:
        steps += [
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Replace(Regex(r"\A "), ""),
            normalizers.Replace(Regex(r" \z"), ""),
        ]
    if model.dummy_prefix:
        # The library normalizes a user-defined symbol to find it in normalized text; it must not get a space.
        symbols = "|".join(map(re.escape, defined))
        steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{symbols})\z)" if defined else r"\A"), SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _pre_tokenizer(model: Model) -> Any:
    """Words with the spaces before them, where no piece reaches across: shorter stretches are encoded faster, and
    a long document can be cut. With none, a text is one stretch, as SentencePiece sees it."""
    from tokenizers import Regex, pre_tokenizers

    normal = model.of_type(NORMAL)
    steps: list[Any] = []
    if model.kind == _UNIGRAM and (cuts := _cuts_through_names(model, set(normal))):
        steps.append(pre_tokenizers.Split(Regex(cuts), behavior="isolated"))
    across = re.compile(f"[^{SPACE}]{SPACE}")
    if not any(across.search(piece) for piece in normal):
        steps.append(pre_tokenizers.Split(Regex(f"{SPACE}*[^{SPACE}]+|{SPACE}+"), behavior="isolated"))
    return pre_tokenizers.Sequence(steps) if steps else None


def _cuts_through_names(model: Model, normal: set[str]) -> str:
    """Where to cut text that spells <s> or <0x41>. Only for names with characters that are no pieces: the others are
    better off with their characters' pieces, as the score of a name is so low."""
    names = [piece for piece in model.of_type(_UNKNOWN, _CONTROL, _UNUSED) if not set(piece) <= normal]
    cuts = []
    for name in names:
        # Unknown characters in a row are one unknown token: not between two of them.
        at = next((i for i in range(1, len(name)) if name[i - 1] in normal or name[i] in normal), 1)
        cuts.append(f"(?<={re.escape(name[:at])})(?={re.escape(name[at:])})")
    if model.of_type(_BYTE) and not set(BYTE_NAME_CHARACTERS) <= normal:
        cuts.append("(?<=<)(?=0x[0-9A-F]{2}>)")
    return "|".join(cuts)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: its number, and an int or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def take(size: int) -> bytes:
        nonlocal at
        if at + size > len(data):
            raise ValueError("the file ends in the middle of a field")
        at += size
        return data[at - size : at]

    while at < len(data):
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
        elif wire in (1, 5):
            yield number, take(8 if wire == 1 else 4)
        elif wire == 2:
            yield number, take(varint())
        else:
            raise ValueError(f"field {number} has no known type")
