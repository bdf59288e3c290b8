"""SentencePiece models (tokenizer.model): read without their package, made into a `tokenizers.Tokenizer`. Unigram and
BPE models, with byte fallback or an unknown token, with user-defined and control symbols. The file is a protobuf; the
numbers below are those of sentencepiece_model.proto."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bessemer.data.read.records import as_bytes, as_float, fields
from bessemer.errors import UserError

SPACE = "▁"  # U+2581, how SentencePiece writes a space
NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_UNIGRAM, _BPE, _WORD, _CHAR = range(1, 5)
# A piece that text must never give (a control symbol, a byte) still stands among a Unigram model's pieces; this far
# below the others no text is better off with it.
_NEVER = 1000.0
BYTE_NAME_CHARACTERS = "<0123456789ABCDEFx>"


@dataclass
class SentencePieceModel:
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
    except ValueError as error:
        raise UserError(
            f"{path}: neither a tokenizer.json, a SentencePiece model nor tiktoken's ranks ({error}); "
            "download the file again"
        ) from error
    if not model.pieces or model.kind not in (_UNIGRAM, _BPE, _CHAR):
        raise UserError(f"{path}: not a unigram, BPE or character model of SentencePiece; convert it first")
    if model.space_behind or not model.escape_spaces or (model.kind == _BPE and model.of_type(_UNUSED)):
        what = f"{path}: a model with spaces behind words, unescaped spaces or unused BPE pieces"
        raise UserError(f"{what}; convert it first")
    return build(model)


def parse(data: bytes) -> SentencePieceModel:
    """Reads sentencepiece_model.proto's ModelProto."""
    model = SentencePieceModel()
    for number, value in fields(data):
        part: dict[int, Any] = dict(fields(as_bytes(value))) if number <= 3 else {}
        if number == 1:
            text, score = as_bytes(part.get(1, b"")).decode(), as_float(part.get(2, 0))
            model.pieces.append((text, score, part.get(3, NORMAL)))
        elif number == 2:
            model.kind = part.get(3, _UNIGRAM)
            model.space_behind = bool(part.get(24, 0))
            model.byte_fallback = bool(part.get(35, 0))
        elif number == 3:
            model.charsmap = part.get(2, b"")
            model.dummy_prefix = bool(part.get(3, 1))
            model.remove_extra_spaces = bool(part.get(4, 1))
            model.escape_spaces = bool(part.get(5, 1))
    return model


def build(model: SentencePieceModel) -> Any:
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Inner

    unknown = next((i for i, (_, _, kind) in enumerate(model.pieces) if kind == _UNKNOWN), 0)
    if model.kind == _UNIGRAM:
        never = min((score for _, score, kind in model.pieces if kind == NORMAL), default=0.0) - _NEVER
        # Rounded, since the library reads long numbers from its own file inexactly; ten digits it reads as written.
        scored = [(text, round(score if kind == NORMAL else never, 9)) for text, score, kind in model.pieces]
        inner = Inner(models.Unigram(scored, unk_id=unknown, byte_fallback=model.byte_fallback))
    else:
        ranked = sorted((entry for entry in model.pieces if entry[2] == NORMAL), key=lambda entry: -entry[1])
        vocab = {piece: i for i, (piece, _, _) in enumerate(model.pieces)}
        merges = merges_of(piece for piece, _, _ in ranked) if model.kind == _BPE else []
        name, bytes_too = model.pieces[unknown][0], model.byte_fallback
        inner = Inner(models.BPE(vocab, merges, unk_token=name, fuse_unk=True, byte_fallback=bytes_too))
    defined = model.of_type(_USER_DEFINED)
    inner.normalizer = _normalizer(model, defined)
    inner.pre_tokenizer = _pre_tokenizer(model)
    leading = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
    inner.decoder = decoder(*leading)
    control = model.of_type(_UNKNOWN, _CONTROL)
    inner.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    # Found after normalization, which then sees the text as a whole: spaces at its ends are no symbol's.
    inner.add_tokens([AddedToken(piece, special=False, normalized=True) for piece in defined])
    return inner


def _normalizer(model: SentencePieceModel, defined: list[str]) -> Any:
    """The model's own rules. A rule that begins with \\A is for the beginning of a document alone."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_spaces:
        extra = ((" {2,}", " "), (r"\A ", ""), (r" \z", ""))
        steps += [normalizers.Replace(Regex(found), left) for found, left in extra]
    if model.dummy_prefix:
        # The library normalizes a user-defined symbol to find it in normalized text; it must not get a space.
        symbols = "|".join(map(re.escape, defined))
        steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{symbols})\z)" if defined else r"\A"), SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])


def _pre_tokenizer(model: SentencePieceModel) -> Any:
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


def _cuts_through_names(model: SentencePieceModel, normal: set[str]) -> str:
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


def decoder(*last: Any) -> Any:
    """Pieces back to text, and then some more steps."""
    from tokenizers import decoders

    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last])


def merges_of(pieces: Iterable[str]) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to a third, in the order of the thirds; `pieces` come best first. SentencePiece
    and tiktoken rank the joined piece, whatever its halves are; `tokenizers` ranks pairs. With all pairs of a piece
    next to each other, both merge alike unless two pairs that make one piece overlap in the text (a, aa, a). Merged
    from the left, text does not come to that; no test found a case."""
    ordered = list(pieces)
    known = set(ordered)
    merges = []
    for piece in ordered:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges
