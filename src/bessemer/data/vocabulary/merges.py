"""From pieces ordered by rank to the merges of a BPE model that builds the same pieces."""

from __future__ import annotations

from collections.abc import Iterable


def merges_of(pieces: Iterable[str]) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to a third, in the order of the thirds; `pieces` come best first.

    SentencePiece and tiktoken rank the joined piece, whatever its halves are; `tokenizers` ranks pairs. With all
    pairs of a piece next to each other, both merge alike unless two pairs that make one piece overlap in the text
    (a, aa, a). Merged from the left, text does not come to that; no test found a case.
    """
    ordered = list(pieces)
    known = set(ordered)
    merges = []
    for piece in ordered:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges
