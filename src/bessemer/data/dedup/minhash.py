"""Near-duplicates by MinHash: each document's n-grams become a short signature, and similar documents share buckets.
The share of n-grams that two documents have in common (Jaccard) is the probability that one hash of their signatures
agrees. `rows` hashes make a band; documents with an equal band are candidates (locality-sensitive hashing)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bessemer.data.dedup.clusters import OneOfEach, Resolved
from bessemer.data.dedup.links import about, resolve_by_keys
from bessemer.data.dedup.shingles import shingles
from bessemer.data.document import Document
from bessemer.data.order import chain, mix
from bessemer.data.step import Arrays, Collected, Each, Ints
from bessemer.spec.clean.dedup import DedupMinhashSpec

Words = npt.NDArray[np.uint64]
_EMPTY = np.uint64(2**64 - 1)
_AT_ONCE = 1 << 16  # shingles permuted together: 512 KB, which stays in the second-level cache


class Signer:
    """Signatures of `hashes` 64-bit minima, the same on every machine for the same seed. On one core some 12,000
    documents of 600 shingles a second with 112 hashes, once the shingles are there."""

    def __init__(self, unit: str, ngram: int, hashes: int, seed: int) -> None:
        self.unit, self.ngram, self.hashes = unit, ngram, hashes
        keys = chain(seed, np.arange(2 * hashes))
        # x -> a * x + b modulo 2^64 permutes the words for odd a. The shingles are mixed already, so their order
        # under such a permutation is as good as random; measured in the tests, for every hash.
        self._multiply, self._add = keys[:hashes] | np.uint64(1), keys[hashes:]

    def sign(self, texts: Sequence[str]) -> tuple[Words, Ints]:
        """(a row of minima for each text, numbers of the texts that have one): texts without words have none."""
        minima = np.full((len(texts), self.hashes), _EMPTY, np.uint64)
        seen = np.zeros(len(texts), bool)
        scratch = np.empty(_AT_ONCE, np.uint64)
        for block in shingles(texts, self.unit, self.ngram):
            seen[block.documents] = True
            for some, bounds, rows in block.pieces(_AT_ONCE):
                found = np.empty((self.hashes, rows.size), np.uint64)
                held = scratch[: some.size]
                for i in range(self.hashes):
                    np.multiply(some, self._multiply[i], out=held)
                    np.add(held, self._add[i], out=held)
                    np.minimum.reduceat(held, bounds, out=found[i])
                minima[rows] = np.minimum(minima[rows], found.T)
        return minima, np.flatnonzero(seen)


def band_keys(minima: Words, bands: int, rows: int) -> Words:
    """One key for each band of each signature; bands never share keys with each other, but for chance."""
    grouped = minima.reshape(-1, bands, rows)
    keys = np.broadcast_to(mix(np.arange(bands)), grouped.shape[:2])
    for row in range(rows):
        keys = mix(keys ^ grouped[:, :, row])
    return keys


class DedupMinhash(OneOfEach):
    """Of each cluster of near-duplicates one document stays. Those without a single word take no part."""

    def __init__(self, spec: DedupMinhashSpec, seed: int) -> None:
        self.spec = spec
        unit, ngram, self.bands, self.rows = spec.numbers
        self.signer = Signer(unit, ngram, self.bands * self.rows, spec.seed)

    def collect(self, documents: Sequence[Document], ordinals: Ints) -> Arrays:
        minima, there = self.signer.sign([document.text for document in documents])
        minima = minima[there]
        arrays = about([documents[i] for i in there.tolist()], ordinals[there], self.spec.keep)
        if self.spec.verify is not None:
            arrays["signature"] = minima
        return {**arrays, "key": band_keys(minima, self.bands, self.rows)}

    def resolve(self, collected: Sequence[Collected], scratch: Path, each: Each) -> Resolved:
        keep, least = self.spec.keep, self.spec.verify or 0.0
        size = self.signer.hashes if least else 0
        return resolve_by_keys(collected, scratch, each, self.bands, keep, signature=size, least=least)
