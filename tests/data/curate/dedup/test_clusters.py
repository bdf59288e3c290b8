"""Union-find against sets, and the choice of who stays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bessemer.data.curate.dedup.clusters as clusters
from bessemer.data.curate.dedup.clusters import group
from bessemer.data.curate.dedup.shuffle import note_places
from bessemer.data.curate.step import Collected
from bessemer.data.read.entry import Document


def slow_roots(total: int, pairs: list[tuple[int, int]]) -> list[int]:
    """The smallest document of each one's cluster."""
    root = list(range(total))
    for a, b in pairs:
        low, high = sorted((root[a], root[b]))
        root = [low if one == high else one for one in root]
    return root


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(
    st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=60), st.integers(1, 70),
)))  # fmt: skip
def test_clusters_are_those_of_sets(some: tuple[int, list[tuple[int, int]], int]) -> None:
    total, pairs, size = some
    parents = np.arange(total)
    for at in range(0, len(pairs), size):
        block = np.array(pairs[at : at + size], np.int64).reshape(-1, 2)
        clusters.unite(parents, block[:, 0], block[:, 1])
    clusters.flatten(parents)
    assert parents.tolist() == slow_roots(total, pairs)


@pytest.mark.parametrize("kind", ["up", "down", "random", "star", "comb"])
def test_long_chains_take_few_rounds(kind: str) -> None:
    n = 200_000
    order = np.arange(n)
    if kind == "down":
        order = order[::-1].copy()
    if kind == "random":
        order = np.random.default_rng(0).permutation(n)
    left, right = order[:-1], order[1:]
    if kind == "star":
        left = np.full(n - 1, n - 1)
        right = np.arange(n - 1)
    if kind == "comb":
        left, right = np.arange(n // 2), np.arange(n // 2) + n // 2
        left, right = np.append(left, left[:-1]), np.append(right, left[1:])
    parents = np.arange(n)
    rounds = 0
    original = clusters._roots

    def counting(*arguments: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "_roots", counting)
        clusters.unite(parents, left, right)
        clusters.flatten(parents)
    assert not parents.any()
    assert rounds < 60


def settled(
    folder: Path, sizes: list[int], pairs: list[tuple[int, int]], keep: str, lengths: list[int]
) -> tuple[list[list[tuple[int, str]]], dict[str, Any]]:
    parts, at = [], 0
    for i, size in enumerate(sizes):
        documents = [Document("", f"{i}.jsonl", row) for row in range(1, size + 1)]
        arrays = {"ordinal": np.arange(size), "length": np.array(lengths[at : at + size], np.int64)}
        at += size
        path = folder / f"{i}.npz"
        with open(path, "wb") as file:
            np.savez(file, **arrays, **note_places(documents, np.arange(size)))
        parts.append(Collected(i, path, "web", size))
    np.array(pairs, np.int64).reshape(-1, 2).tofile(folder / "links")
    decisions_by_part, summary = clusters.resolve_clusters(parts, folder, [folder / "links"], sum(sizes), keep)
    found = []
    for decisions in decisions_by_part:
        gone = decisions["ordinal"].tolist()
        found.append([(int(ordinal), clusters.shuffle.unpack(decisions, i)) for i, ordinal in enumerate(gone)])
    return found, summary


def test_the_first_stays_and_the_others_name_it(tmp_path: Path) -> None:
    pairs = [(4, 1), (6, 4), (3, 2)]
    found, summary = settled(tmp_path, [3, 0, 4], pairs, "first", [1] * 7)
    assert found == [[], [], [(0, "0.jsonl:3"), (1, "0.jsonl:2"), (3, "0.jsonl:2")]]
    assert summary == {
        "documents": 7,
        "duplicates": 3,
        "clusters": 2,
        "cluster_sizes": {"2": 1, "3": 1},
        "largest_clusters": [
            {"documents": 3, "kept": "0.jsonl:2", "dropped": ["2.jsonl:2", "2.jsonl:4"]},
            {"documents": 2, "kept": "0.jsonl:3", "dropped": ["2.jsonl:1"]},
        ],
    }


def test_the_longest_stays_and_among_equals_the_first(tmp_path: Path) -> None:
    found, summary = settled(tmp_path, [3, 0, 4], [(4, 1), (6, 4), (3, 2)], "longest", [0, 5, 7, 7, 9, 0, 9])
    assert found == [[(1, "2.jsonl:2")], [], [(0, "0.jsonl:3"), (3, "2.jsonl:2")]]
    assert summary["largest_clusters"][0] == {
        "documents": 3,
        "kept": "2.jsonl:2",
        "dropped": ["0.jsonl:2", "2.jsonl:4"],
    }


@given(st.data())
def test_who_stays_is_as_by_hand_in_blocks_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    total = sum(sizes)
    if not total:
        return
    number = st.integers(0, total - 1)
    pairs = data.draw(st.lists(st.tuples(number, number), max_size=12))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=total, max_size=total))
    keep = data.draw(st.sampled_from(["first", "longest"]))
    root = slow_roots(total, pairs)
    by_hand = []
    for i in range(total):
        members = [j for j in range(total) if root[j] == root[i]]
        stays = max(members, key=lambda j: (lengths[j], -j)) if keep == "longest" else members[0]
        if stays != i:
            by_hand.append((i, stays))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clusters, "_BLOCK", data.draw(st.integers(1, 9)))
        found, summary = settled(tmp_path_factory.mktemp("x"), sizes, pairs, keep, lengths)
    names = [f"{part}.jsonl:{row}" for part, size in enumerate(sizes) for row in range(1, size + 1)]
    starts = np.cumsum([0, *sizes])
    flat = [(int(starts[part]) + ordinal, names.index(of)) for part, one in enumerate(found) for ordinal, of in one]
    assert flat == by_hand
    assert summary["duplicates"] == len(by_hand)
    assert summary["clusters"] == len({root[i] for i, _ in by_hand})


def test_sizes_of_clusters_are_counted_by_powers_of_two(tmp_path: Path) -> None:
    pairs, at = [], 0
    for size in (2, 2, 3, 4, 7, 8, 15, 16):
        pairs += [(at, at + i) for i in range(1, size)]
        at += size
    _, summary = settled(tmp_path, [at], pairs, "first", [1] * at)
    assert summary["cluster_sizes"] == {"2": 2, "3": 1, "4-7": 2, "8-15": 2, "16-31": 1}
    assert [one["documents"] for one in summary["largest_clusters"]] == [16, 15, 8, 7, 4, 3, 2, 2]


def test_an_empty_corpus(tmp_path: Path) -> None:
    assert settled(tmp_path, [], [], "first", [])[0] == []
    (tmp_path / "again").mkdir()
    assert settled(tmp_path / "again", [0, 0], [], "first", [])[0] == [[], []]


def test_all_with_a_key_are_linked_to_the_first(tmp_path: Path) -> None:
    made = np.empty(6, np.dtype([("key", "<u8"), ("document", "<i8"), ("check", "<u8")]))
    made["key"], made["check"], made["document"] = [5, 5, 1, 5, 5, 1], [1, 1, 1, 2, 1, 1], [9, 3, 4, 1, 7, 2]
    heads, links = group(made)
    assert sorted(heads["document"].tolist()) == [1, 2, 3]
    assert sorted(map(tuple, links.tolist())) == [(2, 4), (3, 7), (3, 9)]
