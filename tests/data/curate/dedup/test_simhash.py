"""SimHash: all pairs within the distance and no others, for every distance; the angle between documents; parts."""

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bessemer.data.curate.dedup.near as module
import bessemer.data.curate.dedup.shuffle as shuffle
from bessemer.data.curate.dedup.near import DedupSimhash, simhash, tables
from bessemer.data.curate.dedup.shuffle import note_places
from bessemer.data.curate.step import Collected
from bessemer.data.read.entry import Document
from bessemer.data.stream.order import mix
from bessemer.spec.curate.dedup import DedupSimhashSpec


def dropped(folder: Path, bits: list[int], distance: int, parts: int = 2, each: Any = None) -> list[tuple[int, str]]:
    """What the step drops of documents with these fingerprints, and for the sake of which."""
    collected, edges = [], [len(bits) * i // parts for i in range(parts + 1)]
    for part in range(parts):
        some = bits[edges[part] : edges[part + 1]]
        documents = [Document("", "a.jsonl", edges[part] + i + 1) for i in range(len(some))]
        path = folder / f"{part}.npz"
        with open(path, "wb") as file:
            np.savez(
                file,
                ordinal=np.arange(len(some)),
                key=mix(np.array(some, np.uint64)),
                check=np.array(some, np.uint64),
                **note_places(documents, np.arange(len(some))),
            )
        collected.append(Collected(part, path, "web", len(some)))
    (folder / "scratch").mkdir()
    step = DedupSimhash(DedupSimhashSpec(distance=distance), 0)
    decisions, summary = step.resolve(collected, folder / "scratch", each or (lambda f, tasks: [f(t) for t in tasks]))
    json.dumps(summary)
    return [
        (edges[part] + int(ordinal), step.apply([Document("", "", 1)], np.array([ordinal]), ruled)[0].value)
        for part, ruled in enumerate(decisions)
        for ordinal in ruled["ordinal"]
    ]


def slow_roots(bits: list[int], distance: int) -> list[int]:
    root = list(range(len(bits)))
    for i in range(len(bits)):
        for j in range(i):
            if (bits[i] ^ bits[j]).bit_count() <= distance:
                low, high = sorted((root[i], root[j]))
                root = [low if one == high else one for one in root]
    return root


@pytest.mark.parametrize("distance", range(8))
def test_every_pair_within_the_distance_is_found_and_none_beyond(tmp_path: Path, distance: int) -> None:
    draw = random.Random(distance)
    bits, expected = [], []
    for apart in range(11):
        for _ in range(30):
            first = draw.getrandbits(64)
            flips = sum(1 << at for at in draw.sample(range(64), apart))
            bits += [first, first ^ flips]
            if apart <= distance:
                expected.append((len(bits) - 1, f"a.jsonl:{len(bits) - 1}"))
    assert dropped(tmp_path, bits, distance) == expected


@given(
    st.lists(st.integers(0, 2**10 - 1) | st.integers(0, 2**64 - 1), max_size=25),
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from([50, 10**6]),
)
@settings(max_examples=60)
def test_clusters_are_those_of_all_pairs(
    tmp_path_factory: pytest.TempPathFactory, bits: list[int], distance: int, parts: int, limit: int
) -> None:
    """Small numbers are near each other: chains and crowds."""
    root = slow_roots(bits, distance)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "BUCKET_BYTES", limit)
        patch.setattr(module, "_PAIRS_AT_ONCE", 7)
        found = dropped(tmp_path_factory.mktemp("x"), bits, distance, parts)
    assert found == [(i, f"a.jsonl:{one + 1}") for i, one in enumerate(root) if one != i]


@pytest.mark.parametrize("distance", range(8))
@pytest.mark.parametrize("documents", [10, 10**6, 10**9])
def test_any_few_bits_spare_one_of_the_tables(distance: int, documents: int) -> None:
    masks = [int(mask) for mask in tables(distance, documents)]
    draw = random.Random(0)
    for _ in range(300):
        flips = sum(1 << at for at in draw.sample(range(64), distance))
        assert any(not flips & mask for mask in masks)
    assert len(set(masks)) == len(masks)
    if documents == 10**9:  # keys that tell few of them apart would have them all compared with each other
        assert min(mask.bit_count() for mask in masks) >= 20


def angle(left: str, right: str, n: int) -> float:
    counts = []
    for text in (left, right):
        words = text.split()
        counts.append(Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)))
    dot = sum(count * counts[1][gram] for gram, count in counts[0].items())
    norms = [math.sqrt(sum(count**2 for count in one.values())) for one in counts]
    return math.acos(min(1.0, dot / norms[0] / norms[1]))


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.4, 1.0])
def test_the_distance_follows_the_angle(share: float) -> None:
    """Each bit differs with probability angle / pi; words occur several times, so that weights matter."""
    draw = random.Random(f"{share}")
    pairs, expected = [], []
    for _ in range(150):
        vocabulary = ["".join(draw.choice("abcdefghij") for _ in range(8)) for _ in range(400)]
        words = draw.choices(vocabulary, k=300) + draw.choices(vocabulary[:10], k=100)
        other = [draw.choice(vocabulary) if draw.random() < share else word for word in words]
        pairs.append((" ".join(words), " ".join(other)))
        expected.append(angle(*pairs[-1], n=1) / math.pi)
    left, right = (simhash([one[i] for one in pairs], "word", 1)[0] for i in (0, 1))
    found = np.bitwise_count(left ^ right) / 64
    error = found.std() / math.sqrt(len(pairs)) + 1e-9
    assert abs(found.mean() - np.mean(expected)) < 4 * error + 0.01  # the sum of few votes is not quite normal


def test_bits_are_the_majority_by_hand_in_any_batch() -> None:
    texts = ["a b c a b", "", "x", "a b c a b d", "!?"]
    bits, there = simhash(texts, "word", 2)
    assert there.tolist() == [0, 2, 3]
    from bessemer.data.curate.dedup.near import shingles

    for i in there.tolist():
        [block] = shingles([texts[i]], "word", 2)
        votes = [sum(1 if int(one) >> bit & 1 else -1 for one in block.hashes) for bit in range(64)]
        assert int(bits[i]) == sum(1 << bit for bit, vote in enumerate(votes) if vote > 0)
        assert simhash([texts[i]], "word", 2)[0][0] == bits[i]


def test_a_hundred_thousand_equal_votes_are_all_counted() -> None:
    one, many = (simhash([text], "char", 1)[0] for text in ("a", "a" * 120_000))
    assert one == many


def test_parts_batches_and_workers_make_no_difference(run_step: Any, documents: Any, pool: Any) -> None:
    draw = random.Random(3)
    originals = [[f"w{chr(97 + draw.randrange(26))}{draw.getrandbits(30):x}" for _ in range(400)] for _ in range(20)]
    texts = []
    for _ in range(60):
        words = list(draw.choice(originals))
        words[draw.randrange(400)] = "other"
        texts.append(" ".join(words))
    step = DedupSimhash(DedupSimhashSpec(distance=6), 0)
    ran = run_step(step, documents(texts))
    assert 30 <= len(ran.dropped) <= 40
    for parts, batch, each in ((5, 7, None), (60, 1, None), (4, 20, pool)):
        other = run_step(step, documents(texts), parts, batch, **({"each": each} if each else {}))
        assert (other.outcomes, other.summary) == (ran.outcomes, ran.summary)


def test_a_crowd_of_equal_documents_is_compared_once(tmp_path: Path) -> None:
    assert len(dropped(tmp_path, [5] * 20_000 + [2**63 + 5], 3)) == 20_000
