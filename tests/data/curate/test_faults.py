"""What goes wrong on real machines: a full disk, a killed worker, parts of which nothing is left."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bessemer
from bessemer.data.curate.corpus import Corpus
from bessemer.data.curate.engine import CurationEngine, LocalEngine, Meter, ProcessPool
from bessemer.data.curate.ledger import load_arrays, save_arrays
from bessemer.data.curate.passes import ValidationSplit
from bessemer.data.curate.report import read_report
from bessemer.data.prepare import Prepared, prepare
from bessemer.data.read import list_files
from bessemer.errors import UserError
from bessemer.spec.data import DataSpec, TokenizerSpec

from .conftest import text


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def write(path: Path, texts: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"text": one, "url": f"https://example.org/{path.stem}/{i}"} for i, one in enumerate(texts))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def some_texts(count: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    return [text(draw) for _ in range(count)]


def spec_of(clean: list[Any], part: int = 10_000, **sources: Any) -> DataSpec:
    return DataSpec.model_validate({"sources": sources, "clean": clean, "validation": 0.1, "part": part})


def build(data: DataSpec, cache: Path, engine: CurationEngine | None = None) -> Prepared:
    return prepare(data, TokenizerSpec(), cache, 300, 0, engine=engine or LocalEngine())


# A full disk. A small file system of its own, in a namespace that goes with the process.

FULL = """
import json, os, shutil, subprocess, sys
from pathlib import Path
from bessemer.data.curate.engine import LocalEngine
from bessemer.data.prepare import prepare
from bessemer.errors import UserError
from bessemer.spec.data import DataSpec, TokenizerSpec

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(disk)], check=True)
data = DataSpec.model_validate(json.loads(sys.argv[2]))

def build():
    return prepare(data, TokenizerSpec(), disk / "cache", 300, 0, engine=LocalEngine())

told = []
for free in map(int, sys.argv[3:]):
    about = os.statvfs(disk)
    with open(disk / "ballast", "wb") as ballast:
        ballast.write(bytes(about.f_bavail * about.f_frsize - free))
    try:
        build()
        error = None
    except UserError as refused:
        error = str(refused)
    left = [path.name for path in (disk / "cache").glob("**/*.tmp")]
    (disk / "ballast").unlink()
    folder = build().folder
    content = {path.name: path.read_bytes().hex() for path in folder.iterdir()}
    told.append({"error": error, "left": left, "content": content})
    shutil.rmtree(disk / "cache")
print(json.dumps(told))
"""


def in_a_namespace(*command: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(bessemer.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}
    return subprocess.run(
        ["unshare", "--map-root-user", "--mount", *command], capture_output=True, text=True, env=environment
    )


def can_mount(folder: Path) -> bool:
    if not shutil.which("unshare"):
        return False
    folder.mkdir()
    return in_a_namespace("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)).returncode == 0


@pytest.mark.slow
def test_a_full_disk_is_told_and_the_next_run_goes_on(tmp_path: Path) -> None:
    if not can_mount(tmp_path / "disk"):
        pytest.skip("no file system can be mounted here, not even in a namespace of its own")
    path = write(tmp_path / "web.jsonl", [one.replace("\n", " \n") for one in some_texts(150)])
    clean: list[Any] = ["whitespace", {"length": {"min_chars": 100}}, "dedup_exact"]
    data = spec_of(clean, 40_000, web=str(path))
    space = [4_096 * blocks for blocks in (*range(5, 190, 24), 256)]
    done = in_a_namespace(sys.executable, "-c", FULL, str(tmp_path / "disk"), data.model_dump_json(), *map(str, space))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    expected = {path.name: path.read_bytes().hex() for path in build(data, tmp_path / "cache").folder.iterdir()}
    errors = [one["error"] for one in told]
    assert [error for error in errors if error and not ("space" in error and "run again" in error)] == []
    assert not any(error and "\n" in error for error in errors)
    assert sum("web.jsonl" in error for error in errors if error) >= 2  # while on a part, which is named
    assert errors[-1] is None and len({error for error in errors if error}) >= 3  # at several places
    assert all(one["left"] == [] for one in told)
    assert all(one["content"] == expected for one in told)


# A worker that is killed.

DEADLY = """
import os, signal
from pathlib import Path

def score(texts):
    mark = Path(__file__).with_name("killed")
    if any("DEADLY" in text for text in texts) and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [len(text) for text in texts]
"""


@pytest.mark.slow
def test_a_killed_worker_is_named_with_its_part_and_the_next_run_finishes(tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text(DEADLY)
    files = [write(tmp_path / "in" / f"{k}.jsonl", some_texts(8, seed=k)) for k in range(4)]
    write(files[2], ["DEADLY " + one for one in some_texts(8, seed=9)])
    score = {"score": {"function": f"{tmp_path}/scorer.py:score", "keep": "best 75%"}}
    data = spec_of(["whitespace", score], 1_000, web=str(tmp_path / "in"))
    pool = ProcessPool(2)
    with pytest.raises(
        UserError, match=r"^source 'web', .*2\.jsonl.*: the worker was killed by SIGKILL.*continues"
    ) as told:
        build(data, tmp_path / "cache", pool)
    assert "\n" not in str(told.value) and not list((tmp_path / "cache").glob("*/prepared.json"))
    assert (tmp_path / "killed").exists()
    again = build(data, tmp_path / "cache", pool)
    pool.close()
    assert digests(again.folder) == digests(build(data, tmp_path / "other").folder)


# Parts of which an earlier step left nothing.

GLOBAL: list[Any] = [
    "dedup_url",
    "dedup_exact",
    {"dedup_exact": {"keep": "longest"}},
    "dedup_minhash",
    {"dedup_minhash": {"verify": 0.7}},
    "dedup_simhash",
    "dedup_paragraphs",
    {"dedup_paragraphs": {"unit": "line", "min_chars": 10}},
    "dedup_substrings",
    {"decontaminate": {"sets": {"quiz": "QUIZ"}}},
    {"decontaminate": {"sets": {"quiz": "QUIZ"}, "action": "cut"}},
    {"score": {"function": "SCORER:length", "keep": "best 50%"}},
    {"score": {"function": "SCORER:length", "keep": "best 50%", "per": "source"}},
    {"score": {"function": "SCORER:length"}},
]


FAST_STEPS = (1, 3, 8, 10, 12)  # one of each kind: hashes, buckets, suffixes, sets, scores


def step_name(step: Any) -> str:
    return step if isinstance(step, str) else json.dumps(step)[1:-1].replace('"', "")


@pytest.fixture(scope="module")
def emptied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of 12 documents each; `b` has only short ones, so that it is a part of which nothing is left."""
    home = tmp_path_factory.mktemp("emptied")
    for name, seed in (("a", 1), ("c", 2), ("d", 3)):
        write(home / "in" / f"{name}.jsonl", some_texts(12, seed))
    write(home / "in" / "b.jsonl", [f"short {i}" for i in range(12)])
    (home / "quiz.jsonl").write_text(json.dumps({"question": some_texts(1, seed=2)[0][:300]}) + "\n")
    (home / "scorer.py").write_text("def length(texts):\n    return [len(text) for text in texts]\n")
    return home


def filled_in(step: Any, home: Path) -> Any:
    written = json.dumps(step).replace("QUIZ", f"{home}/quiz.jsonl").replace("SCORER", f"{home}/scorer.py")
    return json.loads(written)


def curate(data: DataSpec, cache: Path, engine: CurationEngine | None = None) -> Corpus:
    files = {name: list_files(source) for name, source in data.sources.items()}
    corpus = Corpus(data, files, cache, engine or LocalEngine(), Meter())
    corpus.curate(ValidationSplit(0, 0.1))
    return corpus


def rows_of(corpus: Corpus) -> list[tuple[str, int, str]]:
    found = (document for state in corpus.parts for _, document in corpus.documents(state))
    return [(document.file, document.row, document.text) for document in found]


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=() if k in FAST_STEPS else pytest.mark.slow) for k, step in enumerate(GLOBAL)],
    ids=step_name,
)
def test_a_part_of_which_nothing_is_left_changes_nothing_for_the_others(
    emptied: Path, tmp_path: Path, step: Any
) -> None:
    clean = [{"length": {"min_chars": 100}}, filled_in(step, emptied)]
    source = {"path": str(emptied / "in"), "url_field": "url"}
    with_it = curate(spec_of(clean, 100, web=source), tmp_path / "with")
    without = curate(spec_of(clean, 100, web={**source, "exclude": ["b.jsonl"]}), tmp_path / "without")
    left = {state.part.name: state.census.documents for state in with_it.parts if state.census}
    assert [left[name] for name in left if "b.jsonl" in name] == [0] * sum("b.jsonl" in name for name in left)
    assert len(left) > len(without.parts)
    kept = [rows_of(with_it), rows_of(without)]
    assert kept[0] == kept[1] and len(kept[0]) >= 12


@pytest.mark.parametrize(
    "step", [*GLOBAL[:4], *(pytest.param(step, marks=pytest.mark.slow) for step in GLOBAL[4:])], ids=step_name
)
def test_nothing_left_of_a_source_is_told_not_crashed_on(emptied: Path, tmp_path: Path, step: Any) -> None:
    clean = [{"length": {"min_chars": 10_000_000}}, filled_in(step, emptied)]
    source = {"path": str(emptied / "in"), "url_field": "url"}
    with pytest.raises(
        UserError, match=r"^source 'web': the steps dropped all 48 documents, the first being .*a\.jsonl$"
    ):
        build(spec_of(clean, 100, web=source), tmp_path / "cache")


def test_one_source_of_which_nothing_is_left_is_named(emptied: Path, tmp_path: Path) -> None:
    short = {"path": str(emptied / "in" / "b.jsonl")}
    data = spec_of([{"length": {"min_chars": 100}}], web=str(emptied / "in" / "a.jsonl"), notes=short)
    with pytest.raises(UserError, match=r"^source 'notes': the steps dropped all 12 documents, .*b\.jsonl$"):
        build(data, tmp_path / "cache")


# What is collected once.


class Watched(LocalEngine):
    """Remembers which steps collected."""

    def __init__(self) -> None:
        self.collected: list[str] = []

    def run(self, function: Any, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        self.collected += [task.collect.spec.step for task in tasks if getattr(task, "collect", None)]
        yield from super().run(function, tasks)


COUNTED = """
def score(texts):
    open(__file__ + ".calls", "a").write(len(texts) * "x")
    return [len(text) for text in texts]
"""


def test_another_keep_of_a_score_calls_the_function_no_more(tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text(COUNTED)
    write(tmp_path / "in" / "a.jsonl", some_texts(30))
    lengths = sorted(len(one) for one in some_texts(30))

    def run(**settings: Any) -> tuple[int, list[str], int]:
        score = {"score": {"function": f"{tmp_path}/scorer.py:score", **settings}}
        engine = Watched()
        corpus = curate(spec_of(["whitespace", score], web=str(tmp_path / "in")), tmp_path / "cache", engine)
        calls = (tmp_path / "scorer.py.calls").stat().st_size
        return sum(s.census.documents for s in corpus.parts if s.census), engine.collected, calls

    documents, collected, calls = run(keep="best 50%")
    assert (documents, calls) == (15, 30) and set(collected) == {"score"}
    assert run(keep=float(lengths[10])) == (20, [], 30)
    assert run(keep="best 10%", better="lower", per="source") == (3, [], 30)
    assert run() == (30, [], 30)
    documents, collected, calls = run(keep="best 50%", version="2")  # said to be another function
    assert (documents, calls) == (15, 60) and collected


# Order.


class Backwards(LocalEngine):
    """Finishes the last task first."""

    def run(self, function: Any, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        for i in reversed(range(len(tasks))):
            yield i, function(tasks[i])


def test_the_order_in_which_parts_finish_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text(
        "def share(texts):\n    return [text.count('e') / len(text) for text in texts]\n"
    )
    write(tmp_path / "z" / "1.jsonl", some_texts(30, 1))
    write(tmp_path / "a" / "1.jsonl", some_texts(30, 2))
    for name in ("z", "a"):
        with (tmp_path / name / "1.jsonl").open("a") as file:
            file.write("not json\n")
    score = {"score": {"function": f"{tmp_path}/scorer.py:share", "keep": "best 90%"}}
    sources = {"z": str(tmp_path / "z"), "a": {"path": str(tmp_path / "a"), "clean": [{"length": {"min_chars": 250}}]}}
    data = spec_of([{"length": {"min_chars": 300}}, score, "dedup_exact"], 4_000, **sources)
    data = data.model_copy(update={"bad_rows": 0.1})
    forward = build(data, tmp_path / "forward")
    assert digests(build(data, tmp_path / "backwards", Backwards()).folder) == digests(forward.folder)
    report = read_report(forward.folder)
    assert list(report["sources"]) == ["z", "a"]  # as in the spec
    assert [list(step["by_source"]) for step in report["steps"]] == [["a"], ["z", "a"], ["z", "a"], ["z", "a"]]
    assert [Path(row["file"]).parent.name for row in report["bad_rows"]] == ["z", "a"]
    lines = (forward.folder / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == report["bad_rows"]
    assert all(source["parts"] > 3 for source in report["sources"].values())


# Damage.


def test_damaged_files_of_the_cache_say_what_to_delete(tmp_path: Path) -> None:
    save_arrays(tmp_path / "x" / "a.npz", {"ordinal": np.arange(1000)})
    whole = (tmp_path / "x" / "a.npz").read_bytes()
    assert load_arrays(tmp_path / "x" / "a.npz")["ordinal"][7] == 7
    for broken in (whole[: len(whole) // 2], b"", b"\x00" * 100):
        (tmp_path / "x" / "a.npz").write_bytes(broken)
        with pytest.raises(UserError, match=rf"a\.npz: damaged \(.*\); delete the folder {tmp_path}/x and run again"):
            load_arrays(tmp_path / "x" / "a.npz")


def test_damage_anywhere_in_the_cache_is_mended_or_named(tmp_path: Path) -> None:
    """One file of the steps' results at a time. A damage that was not noticed would bring dropped documents back."""
    for name in "ab":
        texts = [one.replace("\n", " \n") for one in some_texts(8, ord(name))]
        write(tmp_path / "in" / f"{name}.jsonl", texts * 2)
    data = spec_of(["whitespace", "dedup_exact"], part=20_000, web=str(tmp_path / "in"))
    cache = tmp_path / "cache"
    expected = rows_of(curate(data, cache))
    kinds = ("steps/*/*.json", "steps/*/*.arrow", "rulings/*/*.json", "rulings/*/*.npz", "collected/*/*.npz")
    whole = {path: path.read_bytes() for kind in kinds for path in sorted(cache.glob(kind))}
    assert {path.suffix for path in whole} == {".json", ".arrow", ".npz"}
    for path, content in whole.items():
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        other = next((one for one in whole if one.suffix == path.suffix and whole[one] != content), None)
        foreign = b'{"version": "1.0"}' if path.suffix == ".json" else b"x"  # no digest, as in earlier versions
        for damage in (None, content[:middle], flipped, foreign, whole.get(other) if other else None):
            if damage is None:
                path.unlink()
            else:
                path.write_bytes(damage)
            refusal = None
            try:
                assert rows_of(curate(data, cache)) == expected, path
            except UserError as error:
                refusal = str(error)
            assert refusal is None or str(cache) in refusal
            path.write_bytes(content)


def test_a_lost_ledger_brings_no_document_back(tmp_path: Path) -> None:
    """The counts of a step are there and its `.arrow` is not, as after a partial copy; then another vocabulary."""
    path = write(tmp_path / "in" / "a.jsonl", some_texts(12) * 3)
    data = spec_of(["dedup_exact"], web=str(path))
    first = build(data, tmp_path / "cache")
    lost = sorted((tmp_path / "cache" / "steps").glob("*/*.arrow"))
    assert lost
    for file in lost:
        file.unlink()
    again = prepare(data, TokenizerSpec(), tmp_path / "cache", 310, 0, engine=LocalEngine())
    assert [note for note in again.notes if str(lost[0]) in note and "runs again on this part" in note]
    for prepared in (first, again):
        stored = sum(side["web"].documents for side in (prepared.train, prepared.validation))
        assert stored == read_report(prepared.folder)["sources"]["web"]["documents"] == 12
