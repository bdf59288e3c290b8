"""The perplexity model is a probability distribution, that of the textbook, and its step keeps the least surprising."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.curate.scores import perplexity as kneser_ney
from bessemer.data.curate.scores.perplexity import (
    _PIECE_BYTES,
    BIT,
    EDGE,
    UNSURE_BITS,
    NgramCounts,
    Perplexity,
    PerplexityModel,
    _count_unique,
    _merge_runs,
    count,
    count_and_smooth,
    estimate_discounts,
    load,
    look_up,
    make_table,
)
from bessemer.data.curate.scores.train import train_perplexity
from bessemer.data.curate.step import Collected, Drop
from bessemer.data.read.entry import Document
from bessemer.errors import UserError
from bessemer.spec.curate.scores import PerplexitySpec


def prose() -> list[str]:
    from pydoc_data.topics import topics

    return list(topics.values())


class Naive:
    """Interpolated modified Kneser-Ney with dictionaries and fp64, by the formulas of Chen and Goodman."""

    def __init__(self, texts: list[str], order: int, min_count: int = 1, pruned_from: int = 4) -> None:
        self.order = order
        raw: list[Counter[bytes]] = [Counter() for _ in range(order + 1)]
        for text in texts:
            data = bytes([EDGE]) + text.encode()
            for end in range(1, len(data)):
                for n in range(1, min(order, end + 1) + 1):
                    raw[n][data[end - n + 1 : end + 1]] += 1
        self.counts: list[dict[bytes, int]] = [{} for _ in range(order + 1)]
        self.counts[order] = dict(raw[order])
        for n in range(1, order):
            before: dict[bytes, set[int]] = {}
            for gram in raw[n + 1]:
                before.setdefault(gram[1:], set()).add(gram[0])
            self.counts[n] = {gram: len(found) for gram, found in before.items()}
            self.counts[n] |= {gram: seen for gram, seen in raw[n].items() if gram[0] == EDGE}
        least = [0] + [min_count if n >= pruned_from else 1 for n in range(1, order + 1)]
        self.kept = [{gram for gram in self.counts[n] if raw[n][gram] >= least[n]} for n in range(order + 1)]
        self.discounts = [(0.0, 0.0, 0.0)] + [self.discount(n) for n in range(1, order + 1)]
        self.followers: list[dict[bytes, list[bytes]]] = [{} for _ in range(order + 1)]
        for n in range(1, order + 1):
            for gram in self.counts[n]:
                self.followers[n].setdefault(gram[:-1], []).append(gram)

    def discount(self, n: int) -> tuple[float, float, float]:
        n1, n2, n3, n4 = (sum(1 for c in self.counts[n].values() if c == k) for k in (1, 2, 3, 4))
        if not (n1 and n2 and n3):
            return 0.5, 1.0, 1.5
        y = n1 / (n1 + 2 * n2)
        found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
        return found if all(0 < d < k for k, d in enumerate(found, 1)) else (0.5, 1.0, 1.5)

    def chance(self, context: bytes, byte: int, n: int | None = None) -> float:
        n = min(self.order, len(context) + 1) if n is None else n
        if n == 0:
            return 1 / 256
        context = context[len(context) - n + 1 :]
        grams = self.followers[n].get(context, [])
        lower = self.chance(context[1:] if n > 1 else b"", byte, n - 1)
        if not grams:
            return lower
        total = sum(self.counts[n][gram] for gram in grams)
        own, left = 0.0, float(total)
        for gram in grams:
            if gram in self.kept[n]:
                c = self.counts[n][gram]
                mass = c - self.discounts[n][min(c, 3) - 1]
                left -= mass
                own = mass if gram[-1] == byte else own
        return (own + left * lower) / total

    def bits(self, text: str) -> float:
        data = bytes([EDGE]) + text.encode()
        return -sum(math.log2(self.chance(data[:end], data[end])) for end in range(1, len(data)))


SMALL = [text[:600] for text in prose()[:12]] + ["", "a", "né", "abab" * 5, "中文"]


@pytest.mark.parametrize(("order", "min_count"), [(3, 1), (5, 1), (5, 2), (8, 1), (6, 3)])
def test_it_is_the_textbook_model(order: int, min_count: int) -> None:
    naive, model = Naive(SMALL, order, min_count), count_and_smooth(SMALL, order, min_count)
    texts = [*SMALL[:3], "The zebra, quoted: é中", "qqqqqqqq", "x", prose()[20][:300]]
    expected = [naive.bits(text) / len(text.encode()) for text in texts]
    np.testing.assert_allclose(model.bits_per_byte(texts), expected, atol=4e-6)


def chances(model: PerplexityModel, context: bytes) -> np.ndarray:
    buffer = b"".join(bytes([EDGE]) + context + bytes([byte]) for byte in range(256))
    costs = model.costs(np.frombuffer(buffer, np.uint8)).reshape(256, -1)[:, -1]
    return 2.0 ** (-costs / BIT)


@pytest.fixture(scope="module")
def model() -> PerplexityModel:
    return count_and_smooth(SMALL, 5, 2)


@settings(max_examples=40)
@given(st.binary(max_size=9) | st.sampled_from([b"the ", b"a", b"", "né".encode(), b"abab", b"The co"]))
def test_probabilities_after_any_context_sum_to_one(model: PerplexityModel, context: bytes) -> None:
    context = bytes(byte for byte in context if byte != EDGE)
    assert chances(model, context).sum() == pytest.approx(1, abs=2e-6)


@pytest.mark.parametrize("order", [3, 4, 8])
def test_they_sum_to_one_for_every_order(order: int) -> None:
    model = count_and_smooth(SMALL, order, 2)
    for context in (b"", b"t", b"th", b"the statement", b"\x00\x01\x02"):
        assert chances(model, context).sum() == pytest.approx(1, abs=2e-6)


@given(st.lists(st.text(max_size=25), min_size=1, max_size=8))
def test_a_text_costs_the_same_in_any_company(model: PerplexityModel, texts: list[str]) -> None:
    together = model.bits_per_byte(texts)
    assert together.tolist() == [model.bits_per_byte([text])[0] for text in texts]


def test_a_long_text_is_cut_without_a_trace(model: PerplexityModel, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "".join(prose())[: _PIECE_BYTES * 2 + 1234]
    whole = model.bits_per_byte(["x", long, "y"])
    monkeypatch.setattr(kneser_ney, "_PIECE_BYTES", 1000)
    assert model.bits_per_byte(["x", long, "y"]).tolist() == whole.tolist()
    monkeypatch.setattr(kneser_ney, "_PIECE_BYTES", 1 << 30)
    assert model.bits_per_byte(["x", long, "y"]).tolist() == whole.tolist()


def test_an_empty_text_is_as_surprising_as_noise(model: PerplexityModel) -> None:
    assert model.bits_per_byte(["", "the value of the expression"])[0] == UNSURE_BITS == 8
    assert model.bits_per_byte([]).size == 0


def test_counts_by_hand() -> None:
    grams = count(["aba", "ab"], 3)
    edge = EDGE << 8
    assert dict(zip(grams[2].keys.tolist(), grams[2].raw.tolist(), strict=True)) == {
        (EDGE << 16) | int.from_bytes(b"ab", "big"): 2,
        int.from_bytes(b"aba", "big"): 1,
    }
    # ab stands twice, always after the edge; ba once; a begins both texts.
    pairs = {key: (raw, seen) for key, raw, seen in zip(*vars(grams[1]).values(), strict=True)}
    assert pairs == {
        int.from_bytes(b"ab", "big"): (2, 1),
        int.from_bytes(b"ba", "big"): (1, 1),
        edge | ord("a"): (2, 2),
    }
    # a was seen after the edge and after b, b after a alone.
    assert dict(zip(grams[0].keys.tolist(), grams[0].counts.tolist(), strict=True)) == {97: 2, 98: 1}


def test_discounts_by_hand() -> None:
    counts = np.array([1] * 8 + [2] * 4 + [3] * 2 + [4] * 1 + [9], np.int64)
    share = 8 / 16
    assert estimate_discounts(counts) == (1 - 2 * share * 4 / 8, 2 - 3 * share * 2 / 4, 3 - 4 * share * 1 / 2)
    assert estimate_discounts(np.array([5, 6, 7])) == (0.5, 1.0, 1.5)
    assert estimate_discounts(np.array([1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3])) == (0.5, 1.0, 1.5)  # would be below 0


@given(st.lists(st.lists(st.integers(0, 20), max_size=10), min_size=1, max_size=9))
def test_blocks_are_merged_to_one_count(blocks: list[list[int]]) -> None:
    keys, counts = _merge_runs(iter([_count_unique(np.array(block, np.uint64)) for block in blocks]))
    expected = Counter(key for block in blocks for key in block)
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == expected
    assert keys.tolist() == sorted(expected)


@given(st.sets(st.integers(0, 2**48), max_size=200), st.sets(st.integers(0, 2**48), max_size=50))
def test_a_table_finds_what_was_put_into_it(inside: set[int], others: set[int]) -> None:
    keys = np.array(sorted(inside), dtype=np.uint64)
    table = make_table(keys, keys + np.uint64(7))
    asked = np.array(sorted(inside | others), dtype=np.uint64)
    found = look_up(table, asked)
    assert found.tolist() == [key + 7 if key in inside else 2**64 - 1 for key in asked.tolist()]


def test_a_table_whose_keys_crowd_at_the_end_is_made_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kneser_ney, "_home", lambda keys, slots: np.full(keys.size, slots - 1))
    keys = np.arange(60, dtype=np.uint64)
    assert look_up(make_table(keys, keys), keys).tolist() == list(range(60))


def write(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("perplexity")
    texts = [text[at : at + 3000] for text in prose() for at in range(0, len(text), 3000)]
    report = train_perplexity([write(root / "good", texts[20:])], root / "model", order=6)
    assert report["min_count"] == 1 and report["n_grams"]["6"] > report["n_grams"]["3"] > 0
    assert 1.2 < report["held_out"]["bits_per_byte"]["50%"] < 2.5
    write(root / "held_out", texts[:20])
    return root


def held_out(trained: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (trained / "held_out" / "t.jsonl").open()]


def test_good_text_is_less_surprising_than_bad(trained: Path) -> None:
    model = load(trained / "model")
    good = held_out(trained)
    chance = random.Random(0)
    mixed = ["".join(chance.sample(text, len(text))) for text in good]
    words = [" ".join(chance.sample(text.split(), len(text.split()))) for text in good]
    noise = ["".join(chr(chance.randrange(32, 127)) for _ in range(2000)) for _ in good]
    medians = [np.median(model.bits_per_byte(texts)) for texts in (good, words, mixed, noise)]
    assert medians[0] < medians[1] - 0.3 < medians[2] - 1.5 < medians[3]
    worst_good = model.bits_per_byte(good).max()
    assert (model.bits_per_byte(mixed) > worst_good).all()


def test_a_saved_model_is_mapped_and_scores_alike(trained: Path, tmp_path: Path) -> None:
    model = load(trained / "model")
    model.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (trained / "model").read_bytes()
    assert not model.tables[-1].flags.writeable
    with pytest.raises(UserError, match="not a perplexity model"):
        load(trained / "good" / "t.jsonl")


def test_training_refuses_what_cannot_work(tmp_path: Path) -> None:
    one = write(tmp_path / "one", ["only one text"])
    with pytest.raises(UserError, match="1 different texts; a perplexity model needs two"):
        train_perplexity([one], tmp_path / "out")
    with pytest.raises(UserError, match=r"order 9: .* runs of 3 to 8 bytes"):
        count_and_smooth(["a", "b"], 9)
    with pytest.raises(UserError, match="no text to count"):
        count_and_smooth(["", ""], 3)


# --- the step ---


def run(step: Perplexity, texts: list[str], tmp_path: Path) -> tuple[list[object], list[Document], dict]:
    documents = [Document(text, "f.jsonl", i + 1) for i, text in enumerate(texts)]
    ordinals = np.arange(len(texts))
    np.savez(tmp_path / "0.npz", **step.collect(documents, ordinals))
    parts = [Collected(0, tmp_path / "0.npz", "web", len(texts))]
    decisions, summary = step.resolve(parts, tmp_path, lambda function, tasks: [function(task) for task in tasks])
    return step.apply(documents, ordinals, next(iter(decisions))), documents, summary


def test_the_step_keeps_the_lowest_and_labels_thirds(trained: Path, tmp_path: Path) -> None:
    texts = [*held_out(trained)[:10], *("".join(reversed(text)) for text in held_out(trained)[10:20])]
    spec = PerplexitySpec(model=str(trained / "model"), keep="best 50%", head=0.2, middle=0.5)
    step = Perplexity(spec, 0)
    outcomes, documents, summary = run(step, texts, tmp_path)
    assert outcomes[:10] == [None] * 10
    dropped = [outcome for outcome in outcomes if isinstance(outcome, Drop)]
    assert len(dropped) == 10 and {outcome.reason for outcome in dropped} == {"perplexity above the best 50 %"}
    bits = step.model.bits_per_byte(texts[:10])
    order = np.argsort(bits)
    parts = [documents[i].labels["perplexity_part"] for i in order]
    assert parts == ["head"] * 4 + ["middle"] * 6
    assert documents[0].labels["perplexity"] == round(float(bits[0]), 6)
    assert summary["kept"] == 10 and summary["threshold"] == bits.max()
    assert summary["head_threshold"] == bits[order[3]]


def test_the_step_with_a_highest_value(trained: Path, tmp_path: Path) -> None:
    texts = held_out(trained)[:6]
    bits = load(trained / "model").bits_per_byte(texts)
    limit = float(np.sort(bits)[2])  # at the limit a document stays
    spec = PerplexitySpec.model_validate({"model": str(trained / "model"), "keep": {"max": limit}})
    outcomes, documents, summary = run(Perplexity(spec, 0), texts, tmp_path)
    assert [outcome is None for outcome in outcomes] == [bool(value <= limit) for value in bits]
    assert summary["kept"] == 3 and summary["threshold"] == limit
    assert {d.labels.get("perplexity_part") for d in documents} <= {"head", "middle", "tail", None}


def test_identity_follows_the_file(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.write_bytes((trained / "model").read_bytes())
    same = [Perplexity(PerplexitySpec(model=str(path)), 0).identity for path in (trained / "model", copy)]
    assert same[0] == same[1] != ""
    count_and_smooth(SMALL, 6, 1).save(copy)
    assert Perplexity(PerplexitySpec(model=str(copy)), 0).identity != same[0]


def test_grams_are_sorted() -> None:
    for grams in count(SMALL, 4):
        assert isinstance(grams, NgramCounts)
        assert (np.diff(grams.keys.astype(object)) > 0).all()
