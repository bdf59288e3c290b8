"""The classifier learns from real text, scores a document alike wherever it stands, and says how good it is."""

from __future__ import annotations

import ast
import itertools
import json
import math
import random
import struct
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.data.curate.scores import classifier as features
from bessemer.data.curate.scores import classifier as linear
from bessemer.data.curate.scores.classifier import ONE, PIECE_BYTES, FeatureShape, LinearModel, hash_texts
from bessemer.data.curate.scores.train import (
    LEAST_TEXTS,
    FeatureRows,
    _Descent,
    _importance,
    area_under_curve,
    calibration,
    make_rows,
    sample,
    split_texts,
    train_classifier,
)
from bessemer.data.stream.order import mix
from bessemer.errors import UserError


def prose() -> list[str]:
    """The language reference, as it stands in pydoc."""
    from pydoc_data.topics import topics

    return [text[at : at + 1500] for text in topics.values() for at in range(0, len(text), 1500)]


def code() -> list[str]:
    """Functions of the standard library without their docstrings."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:90]:
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 3:
                node.body = node.body[1:] if ast.get_docstring(node) else node.body
                found.append(ast.unparse(node)[:1500])
    return found


def shuffled(texts: list[str]) -> list[str]:
    chance = random.Random(0)
    found = []
    for text in texts:
        words = text.split()
        chance.shuffle(words)
        found.append(" ".join(words))
    return found


def write(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "texts.jsonl").write_text(rows)
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("corpus")
    good = prose()
    return {
        "prose": write(root / "prose", good[::2]),
        "shuffled": write(root / "shuffled", shuffled(good[1::2])),
        "code": write(root / "code", code()),
    }


def all_hashes(texts: list[str], words: int = 2, chars: int = 0) -> list[list[list[int]]]:
    """For each text, for each kind of n-gram, the hashes."""
    kinds = 1 + (words > 1) + bool(chars)
    found: list[list[list[int]]] = [[[] for _ in range(kinds)] for _ in texts]
    for chunk in hash_texts(texts, words, chars):
        for kind, (values, starts, stops) in enumerate(chunk.kinds):
            for owner, start, stop in zip(chunk.owners, starts, stops, strict=True):
                found[owner][kind] += values[start:stop].tolist()
    return found


def words_of(text: str) -> list[bytes]:
    """The same words by another way: one byte after another."""
    data = text.encode()
    words: list[bytes] = []
    kind, at = "space", 0
    while at < len(data):
        byte = data[at]
        if 0xE3 <= byte <= 0xED:
            words.append(data[at : at + 3])
            kind, at = "wide", at + 3
            continue
        letter = chr(byte)
        if byte >= 128 or letter.isalnum() or letter == "_":
            now = "word"
        else:
            now = "space" if byte <= 32 or byte == 127 else "mark"
        if now == "word" and kind == "word":
            words[-1] += data[at : at + 1]
        elif now != "space":
            words.append(data[at : at + 1])
        kind, at = now, at + 1
    return [bytes(48 if 48 <= b <= 57 else b for b in word.lower()) for word in words]


def polynomial(word: bytes) -> int:
    values = mix(np.arange(256, dtype=np.uint64) + np.uint64(1 << 32)).tolist()
    total = sum(values[byte] * pow(features._RATIO, k, 2**64) for k, byte in enumerate(word)) % 2**64
    return int(mix(np.uint64(total)))


@given(st.text(st.sampled_from("abAB 09.,_\n\té中文한ñ{}'"), max_size=60))
def test_words_are_those_of_a_plain_reading(text: str) -> None:
    single, pairs = all_hashes([text])[0]
    expected = [polynomial(word) for word in words_of(text)]
    assert single == expected
    both = [int(mix(np.uint64((a * int(features._PAIR) + b) % 2**64))) for a, b in itertools.pairwise(expected)]
    assert pairs == both


def test_case_and_digits_do_not_count_and_marks_stand_alone() -> None:
    assert all_hashes(["The Year 1984"]) == all_hashes(["the YEAR 2024"])
    assert all_hashes(["a.b"])[0][0] == all_hashes(["a . b"])[0][0]
    assert all_hashes(["ab"])[0][0] != all_hashes(["ba"])[0][0]
    assert all_hashes(["", " \n\t "]) == [[[], []], [[], []]]


def test_runs_of_bytes_are_counted_where_they_stand() -> None:
    a, b = all_hashes(["abcd", "xbcd"], words=1, chars=3)
    assert len(a[1]) == len(b[1]) == 2
    assert a[1][1] == b[1][1] and a[1][0] != b[1][0]


@given(st.lists(st.text(max_size=40), min_size=1, max_size=8), st.integers(0, 3))
def test_a_text_has_the_same_hashes_in_any_company(texts: list[str], chars: int) -> None:
    together = all_hashes(texts, 2, chars)
    assert together == [all_hashes([text], 2, chars)[0] for text in texts]


def test_long_texts_are_cut_at_fixed_places(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "word " * (PIECE_BYTES // 5 + 1000) + "end"
    alone = all_hashes([long])[0]
    assert alone == all_hashes(["short", long, "x" * 100])[1]
    # One word lies across the cut and counts as two; nothing else is lost.
    assert len(alone[0]) == len(long.split()) + 1
    assert len(all_hashes(["a " * PIECE_BYTES])[0][0]) == PIECE_BYTES
    wide = "中" * (PIECE_BYTES // 2)
    assert all_hashes(["a b", wide, "hello"])[2] == all_hashes(["hello"])[0]


def small_model(columns: int = 1, seed: int = 0) -> LinearModel:
    random_ = np.random.default_rng(seed)
    weights = random_.integers(-5 * ONE, 5 * ONE, (columns, 1 << 10)).astype(np.int32)
    labels = ["good", "other"] if columns == 1 else [f"class {k}" for k in range(columns)]
    return LinearModel(labels, FeatureShape(2, 0, 10), weights, np.full(columns, ONE // 3, np.int64), {})


@pytest.mark.parametrize("columns", [1, 3])
def test_scores_are_the_logistic_of_the_mean_weight(columns: int) -> None:
    model = small_model(columns)
    texts = ["the quick brown fox", "fox", "", "{ x = 1; }", "word " * 30_000]
    expected = []
    for text, kinds in zip(texts, all_hashes(texts), strict=True):
        buckets = [value >> 54 for kind in kinds for value in kind]
        logits = []
        for column in range(columns):
            total = sum(int(model.weights[column, bucket]) for bucket in buckets)
            logits.append((total / max(len(buckets), 1) + int(model.bias[column])) / ONE)
        logits = [*logits, 0.0] if columns == 1 else logits
        powers = [math.exp(logit) for logit in logits]
        expected.append([power / sum(powers) for power in powers])
        assert text or np.allclose(expected[-1][0], 1 / (1 + math.exp(-1 / 3)) if columns == 1 else 1 / 3, atol=1e-4)
    np.testing.assert_allclose(model.probabilities(texts), expected, rtol=1e-12)
    np.testing.assert_array_equal(model.scores(texts), model.probabilities(texts)[:, 0])


@settings(max_examples=30)
@given(st.lists(st.text(max_size=30), min_size=2, max_size=10))
def test_scores_do_not_depend_on_the_batch(texts: list[str]) -> None:
    for model in (small_model(), small_model(3)):
        alone = [model.probabilities([text])[0] for text in texts]
        np.testing.assert_array_equal(model.probabilities(texts), alone)


def test_exp_is_as_good_as_the_library() -> None:
    x = -np.abs(np.random.default_rng(0).normal(size=20_000)) * 100
    exact = np.array([math.exp(max(value, -700.0)) for value in x])
    assert np.abs(linear.exp(x) / exact - 1).max() < 4.5e-16
    assert linear.exp(np.array([0.0, -1e9])).tolist() == [1.0, linear.exp(np.array([-700.0]))[0]]


def test_no_texts_are_no_scores() -> None:
    assert small_model().scores([]).shape == (0,)


# --- training ---


def test_one_step_is_adagrad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the textbook, written out with dictionaries."""
    rows = FeatureRows(
        np.array([0, 2, 4]), np.array([0, 1, 1, 3], np.int32), np.array([0.5, 0.5, 0.25, 0.75]), np.array([0, 1])
    )
    descent = _Descent(np.zeros((1, 4)), np.zeros(1), rate=2.0)
    weights, squares = [0.0] * 4, [0.0] * 4
    bias = bias_square = 0.0
    for _ in range(3):
        gradient, slope_sum = [0.0] * 4, 0.0
        for row, label in ((0, 1.0), (1, 0.0)):
            entries = range(rows.starts[row], rows.starts[row + 1])
            logit = bias + sum(rows.shares[e] * weights[rows.buckets[e]] for e in entries)
            slope = (0.7, 0.2)[row] * (1 / (1 + math.exp(-logit)) - label)
            slope_sum += slope
            for e in entries:
                gradient[rows.buckets[e]] += slope * rows.shares[e]
        for k in range(4):
            squares[k] += gradient[k] ** 2
            weights[k] -= 2.0 * gradient[k] / (math.sqrt(squares[k]) + 1e-12)
        bias_square += slope_sum**2
        bias -= 0.1 * slope_sum / (math.sqrt(bias_square) + 1e-12)
        descent.step(rows, np.array([0.7, 0.2]))
    np.testing.assert_allclose(descent.weights[0], weights, rtol=1e-9)
    np.testing.assert_allclose(descent.bias, [bias], rtol=1e-9)


def test_it_tells_prose_from_shuffled_prose_and_code(corpus: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "quality.safetensors"
    report = train_classifier({"good": [corpus["prose"]], "other": [corpus["shuffled"], corpus["code"]]}, out, bits=18)
    held_out = report["held_out"]
    assert held_out["auc"]["good"] > 0.97
    assert held_out["accuracy"] > 0.9
    assert held_out["texts"] == sum(sum(row.values()) for row in held_out["confusion"].values())
    assert set(report["strongest_words"]) == {"good", "other"}
    # From the file alone, and as hard as can be: texts whose words it knows only shuffled, and the other way round.
    model = linear.load(out)
    assert model.report == report and model.labels == ("good", "other")
    good = model.scores(prose()[1::2][:200])
    bad = model.scores(shuffled(prose()[::2])[:200])
    above = np.mean([(a > bad).mean() + (a == bad).mean() / 2 for a in good])
    assert above > 0.9


def test_three_classes_and_the_same_bits_again(corpus: dict[str, Path], tmp_path: Path) -> None:
    folders = {name: [path] for name, path in corpus.items()}
    report = train_classifier(folders, tmp_path / "a", seed=3, bits=16, epochs=4, most_chars=400_000)
    assert report["held_out"]["accuracy"] > 0.85
    assert min(report["held_out"]["auc"].values()) > 0.95
    assert "self" in report["strongest_words"]["code"] and "self" not in report["strongest_words"]["prose"]
    train_classifier(folders, tmp_path / "b", seed=3, bits=16, epochs=4, most_chars=400_000)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    train_classifier(folders, tmp_path / "c", seed=4, bits=16, epochs=4, most_chars=400_000)
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_classes_count_alike_whatever_their_size() -> None:
    assert _importance(np.array([0, 0, 0, 1])).tolist() == [4 / 6, 4 / 6, 4 / 6, 2.0]
    texts = {"many": [f"a b c {i} x{i}" for i in range(400)], "few": [f"d e f {i} y{i}" for i in range(20)]}
    from bessemer.data.curate.scores.train import fit

    model, epochs = fit(split_texts(texts), FeatureShape(1, 0, 12), 0)
    assert epochs >= 1
    assert 0.3 < model.scores([""])[0] < 0.7
    assert model.scores(["a b c"])[0] > 0.9 and model.scores(["d e f"])[0] < 0.1


def test_texts_held_out_are_in_no_other_part() -> None:
    texts = {"a": [f"a{i}" for i in range(50)], "b": [f"b{i}" for i in range(LEAST_TEXTS)]}
    parts = split_texts(texts)
    for label, found in texts.items():
        three = [*parts.judge[label], *parts.stop[label], *parts.train[label]]
        assert sorted(three) == sorted(found) and len(parts.judge[label]) >= 2 <= len(parts.stop[label])


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    good, few = (write(tmp_path / "good", [f"text {i}" for i in range(30)]), write(tmp_path / "few", ["x", "y", "x"]))
    with pytest.raises(UserError, match="class 'few' has 2 different texts; give at least 20"):
        train_classifier({"good": [good], "few": [few]}, tmp_path / "out")
    with pytest.raises(UserError, match="name two or more"):
        train_classifier({"good": [good]}, tmp_path / "out")
    with pytest.raises(UserError, match="use 1 or 2 words"):
        train_classifier({"good": [good], "few": [few]}, tmp_path / "out", words=3)
    assert not (tmp_path / "out").exists()


def test_a_sample_does_not_depend_on_order_and_is_bounded() -> None:
    texts = [f"{i} " * (i % 50 + 1) for i in range(500)]
    some = sample(texts, 5000, 0)
    assert some == sample(texts[::-1] + texts, 5000, 0)
    assert 4500 < sum(map(len, some)) <= 5000
    assert some != sample(texts, 5000, 1)
    assert sorted(sample(texts, 10**9, 0)) == sorted(texts)


def test_rows_hold_shares_of_all_n_grams() -> None:
    rows = make_rows({"a": ["x x y"], "b": ["z", ""]}, FeatureShape(1, 0, 20))
    assert rows.shares.tolist() in ([2 / 3, 1 / 3, 1.0], [1 / 3, 2 / 3, 1.0])
    assert rows.starts.tolist() == [0, 2, 3, 3] and rows.classes.tolist() == [0, 1, 1]


# --- the report ---


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_area_under_the_curve_is_the_share_of_pairs(pairs: list[tuple[int, bool]]) -> None:
    right = [score for score, is_right in pairs if is_right]
    wrong = [score for score, is_right in pairs if not is_right]
    found = area_under_curve(np.array([float(score) for score, _ in pairs]), np.array([r for _, r in pairs]))
    if not right or not wrong:
        assert math.isnan(found)
    else:
        wins = sum((a > b) + (a == b) / 2 for a in right for b in wrong)
        assert found == pytest.approx(wins / (len(right) * len(wrong)))


def test_calibration_by_hand() -> None:
    scores = np.array([0.05, 0.06, 0.95, 1.0])
    assert calibration(scores, np.array([False, True, True, True])) == [
        {"from": 0.0, "texts": 2, "predicted": 0.055, "found": 0.5},
        {"from": 0.9, "texts": 2, "predicted": 0.975, "found": 1.0},
    ]


# --- files ---


def test_a_saved_model_scores_alike_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    model = small_model()
    model.save(path)
    texts = ["one two", "three"]
    np.testing.assert_array_equal(linear.load(path).scores(texts), model.scores(texts))
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole[:100], b"", b"\x80\x04" + whole):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"m\.safetensors: not a classifier"):
            linear.load(path)
    with pytest.raises(UserError, match=r"nothing: no such file; train one"):
        linear.load(tmp_path / "nothing")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    about = json.dumps({"kind": "perplexity model", "version": 1})
    header = json.dumps({"__metadata__": {"bessemer": about}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UserError, match="it holds a perplexity model of version 1"):
        linear.load(path)
