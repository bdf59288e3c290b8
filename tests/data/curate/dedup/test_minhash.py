"""MinHash against its theory: the catch rate, the estimate of overlap, the hash functions, other implementations."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bessemer.data.curate.dedup.near as module
import bessemer.data.curate.dedup.shuffle as shuffle
from bessemer.data.curate.dedup.near import DedupMinhash, Signer, band_keys
from bessemer.spec.curate.dedup import MINHASH_PRESETS, DedupMinhashSpec

SHINGLES = 100
LEVELS = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def pair(draw: random.Random, unit: str, n: int, overlap: float) -> tuple[str, str, float]:
    """Two texts of SHINGLES different n-grams each, and the exact overlap (Jaccard) of these."""
    common = round(2 * SHINGLES * overlap / (1 + overlap))
    size = SHINGLES + n - 1

    def fresh(count: int) -> list[str]:
        return [draw_word(draw) if unit == "word" else draw.choice(LETTERS) for _ in range(count)]

    shared = fresh(common + n - 1)
    rest = size - len(shared)
    joint = " " if unit == "word" else ""
    # The first unit that differs must differ, also where units are single letters.
    left, right = fresh(rest), fresh(rest)
    while rest and left[0] == right[0]:
        right[0] = fresh(1)[0]
    return joint.join(shared + left), joint.join(shared + right), common / (2 * SHINGLES - common)


def draw_word(draw: random.Random) -> str:
    return "".join(draw.choice(LETTERS) for _ in range(9))


def signed_pairs(preset: str, overlap: float, pairs: int) -> tuple[Any, Any, float]:
    unit, n, bands, rows = MINHASH_PRESETS[preset]
    draw = random.Random(f"{preset} {overlap}")
    made = [pair(draw, unit, n, overlap) for _ in range(pairs)]
    assert len({one[2] for one in made}) == 1
    signer = Signer(unit, n, bands * rows, seed=1)
    left, right = (signer.sign([one[i] for one in made])[0] for i in (0, 1))
    return left, right, made[0][2]


def within(found: float, expected: float, n: int, sigmas: float = 4.0) -> bool:
    """Whether a share of n trials is what chance allows."""
    return abs(found - expected) <= sigmas * math.sqrt(max(expected * (1 - expected), 1 / n) / n)


@pytest.mark.parametrize("preset", [pytest.param("fineweb", marks=pytest.mark.slow), "curator"])
def test_the_catch_rate_is_that_of_theory(preset: str) -> None:
    _, _, bands, rows = MINHASH_PRESETS[preset]
    pairs = 500
    for overlap in LEVELS:
        left, right, exact = signed_pairs(preset, overlap, pairs)
        caught = (band_keys(left, bands, rows) == band_keys(right, bands, rows)).any(axis=1)
        assert within(caught.mean(), 1 - (1 - exact**rows) ** bands, pairs), (overlap, caught.mean())


def test_the_estimate_of_overlap_has_no_bias_and_its_hashes_are_independent() -> None:
    pairs = 500
    for overlap in (0.3, 0.5, 0.8, 0.95):
        left, right, exact = signed_pairs("fineweb", overlap, pairs)
        same = left == right
        assert within(same.mean(), exact, same.size)
        by_hash = same.mean(axis=0)  # no hash function is worse than the others
        assert (abs(by_hash - exact) < 5 * math.sqrt(exact * (1 - exact) / pairs)).all()
        spread = same.mean(axis=1).var() / (exact * (1 - exact) / same.shape[1])
        assert 0.75 < spread < 1.25, spread


def test_documents_that_share_nothing_share_no_bucket() -> None:
    draw = random.Random(5)
    for preset, (unit, n, bands, rows) in MINHASH_PRESETS.items():
        texts = [pair(draw, unit, n, 0.0)[0] for _ in range(1500 if preset == "fineweb" else 300)]
        minima, _ = Signer(unit, n, bands * rows, 1).sign(texts)
        keys = band_keys(minima, bands, rows)
        assert np.unique(keys).size == keys.size
        agree = np.mean([(minima[i] == minima[i + 1]).mean() for i in range(len(texts) - 1)])
        assert agree == 0


def test_minima_are_distributed_like_those_of_random_numbers() -> None:
    """The minimum of n uniform numbers: (1 - minimum)^n is uniform. Kolmogorov and Smirnov, for every hash."""
    draw = random.Random(6)
    n, texts = 60, 800
    minima, _ = Signer("word", 5, 112, 1).sign([" ".join(draw_word(draw) for _ in range(n + 4)) for _ in range(texts)])
    uniform = np.sort((1 - minima / 2.0**64) ** n, axis=0)
    steps = np.arange(1, texts + 1)[:, None] / texts
    distance = np.maximum(abs(uniform - steps), abs(uniform - steps + 1 / texts)).max(axis=0)
    assert distance.max() < 2.2 / math.sqrt(texts)  # one in 8,000 is farther; there are 112
    assert np.median(distance) < 1.0 / math.sqrt(texts)


def test_words_repeated_in_another_measure_change_nothing() -> None:
    signer = Signer("word", 2, 64, 1)
    once, thrice = signer.sign(["a b a", "a b a b a b a"])[0]
    assert (once == thrice).all()  # the same set of 2-grams


def test_any_batch_gives_the_same_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    texts = [" ".join(draw_word(draw) for _ in range(draw.randrange(200))) for _ in range(40)]
    texts[3] = ""
    signer = Signer("word", 3, 24, 1)
    whole, there = signer.sign(texts)
    assert there.tolist() == [i for i, text in enumerate(texts) if text]
    assert (np.concatenate([signer.sign([text])[0] for text in texts]) == whole).all()
    monkeypatch.setattr(module, "_AT_ONCE", 97)  # blocks that end inside a document
    assert (signer.sign(texts)[0] == whole).all()


def test_signatures_are_the_same_on_every_machine() -> None:
    minima, _ = Signer("word", 2, 3, 1).sign(["the quick brown fox jumps over the lazy dog"])
    assert minima.tolist() == [[912105247806634371, 2230267542829583958, 53093535256771878]]
    assert band_keys(minima, 1, 3).tolist() == [[648690277733285985]]
    assert (Signer("word", 2, 3, 2).sign(["the quick brown fox jumps over the lazy dog"])[0] != minima).all()


def near_copies(draw: random.Random, originals: int, copies: int) -> list[str]:
    """Unrelated texts, and copies of some of them with two words of 300 changed: overlap above 0.93."""
    texts = [" ".join(draw_word(draw) for _ in range(300)) for _ in range(originals)]
    for _ in range(copies):
        words = draw.choice(texts[:originals]).split()
        for at in draw.sample(range(300), 2):
            words[at] = draw_word(draw)
        texts.append(" ".join(words))
    draw.shuffle(texts)
    return texts


def slow_clusters(texts: list[str], n: int, least: float) -> list[int]:
    """For each text the first text that it is linked to by an overlap of at least so much."""
    sets = [{tuple(words[i : i + n]) for i in range(len(words) - n + 1)} for words in map(str.split, texts)]
    root = list(range(len(texts)))
    for i in range(len(texts)):
        for j in range(i):
            if len(sets[i] & sets[j]) / len(sets[i] | sets[j]) >= least:
                low, high = sorted((root[i], root[j]))
                root = [low if one == high else one for one in root]
    return root


def test_clusters_of_near_copies_are_found_for_any_parts_and_workers(
    run_step: Any, documents: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = near_copies(random.Random(8), 60, 60)
    expected = slow_clusters(texts, 5, 0.5)
    step = DedupMinhash(DedupMinhashSpec(), 0)
    ran = run_step(step, documents(texts))
    assert ran.dropped == [i for i, root in enumerate(expected) if root != i]
    assert all(ran.outcomes[i].value == f"a.jsonl:{expected[i] + 1}" for i in ran.dropped)
    for parts, batch, each in ((4, 11, None), (120, 1, None), (6, 30, pool)):
        other = run_step(step, documents(texts), parts, batch, **({"each": each} if each else {}))
        assert (other.outcomes, other.summary) == (ran.outcomes, ran.summary)
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 1000)
    other = run_step(step, documents(texts), 5, 9)
    assert (other.outcomes, other.summary) == (ran.outcomes, ran.summary)
    json.dumps(ran.summary)


def test_links_can_be_verified_by_the_whole_signature(run_step: Any, documents: Any, pool: Any) -> None:
    draw = random.Random(9)
    pairs = [pair(draw, "word", 5, overlap)[:2] for overlap in (0.4, 0.95) for _ in range(30)]
    texts = [text for one in pairs for text in one]
    easy = {"preset": "none", "unit": "word", "ngram": 5, "bands": 40, "rows": 2}  # catches nearly all of them
    loose = run_step(DedupMinhash(DedupMinhashSpec(**easy), 0), documents(texts))
    strict = DedupMinhash(DedupMinhashSpec(**easy, verify=0.7), 0)
    ran = run_step(strict, documents(texts))
    assert len(loose.dropped) > 55
    assert ran.dropped == [i for i in range(60, 120) if i % 2]
    assert run_step(strict, documents(texts), 7, 10, each=pool).outcomes == ran.outcomes


def test_texts_without_words_stay_and_short_ones_are_compared_whole(run_step: Any, documents: Any) -> None:
    texts = ["", "!!!", " ", "one two", "One two.", "one two three", "...", "one"]
    assert run_step(DedupMinhash(DedupMinhashSpec(), 0), documents(texts)).dropped == [4]


def test_the_longest_can_stay(run_step: Any, documents: Any) -> None:
    words = [draw_word(random.Random(i)) for i in range(200)]
    texts = [" ".join(words), " ".join([*words, "and"]), " ".join(words[:-1])]
    ran = run_step(DedupMinhash(DedupMinhashSpec(keep="longest"), 0), documents(texts), parts=2)
    assert ran.dropped == [0, 2]


def test_survivors_are_those_of_datasketch(run_step: Any, documents: Any) -> None:
    datasketch = pytest.importorskip("datasketch")
    texts = near_copies(random.Random(10), 150, 150)
    lsh = datasketch.MinHashLSH(num_perm=112, params=(14, 8))
    theirs = []
    for i, text in enumerate(texts):
        words = text.split()
        sketch = datasketch.MinHash(num_perm=112)
        sketch.update_batch([" ".join(words[at : at + 5]).encode() for at in range(len(words) - 4)])
        if lsh.query(sketch):
            theirs.append(i)
        lsh.insert(str(i), sketch)
    ran = run_step(DedupMinhash(DedupMinhashSpec(), 0), documents(texts), parts=3)
    assert ran.dropped == theirs
    assert len(theirs) == 150


def test_what_is_collected_is_small(documents: Any, collect: Any, tmp_path: Path) -> None:
    """14 keys a document and the ordinal; the places of a file's rows cost next to nothing."""
    texts = near_copies(random.Random(11), 200, 0)
    [part] = collect(DedupMinhash(DedupMinhashSpec(), 0), documents(texts), tmp_path)
    assert part.path.stat().st_size < 200 * (14 * 8 + 8) + 4096
