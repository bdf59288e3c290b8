"""Damage to prepared data is found by `data verify`, and never read by a run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bessemer.cli.main import app
from bessemer.data.prepare import Prepared, open_prepared, prepare
from bessemer.data.store.writer import merge
from bessemer.data.stream.curriculum import length_score, measure_by_score, rank_rows
from bessemer.data.stream.packing import open_best_fit
from bessemer.data.stream.rows import ConcatRows
from bessemer.data.verify import VerifyReport, verify
from bessemer.errors import UserError
from bessemer.spec.data import DataSpec, SourceSpec, TokenizerSpec

CONTEXT = 16


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Two shards of training data, a packing and a ranking."""
    folder = tmp_path_factory.mktemp("verify")
    rows = [{"text": f"row {i}: " + "the kettle sings\n" * (i % 7 + 1), "id": f"id-{i}"} for i in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceSpec(path=[str(folder / "a.jsonl")], id_field="id")
    data = DataSpec(sources={"web": source}, validation=0.1, part=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bessemer.data.prepare.merge", lambda prefixes, out: merge(prefixes, out, 2000))
        made = prepare(data, TokenizerSpec(), folder / "cache", 300, 0)
    assert len(made.train["web"].prefixes) == 2
    read(made)
    return made


def read(prepared: Prepared) -> list[object]:
    """What a run reads: the same values for the same data, however it is packed and ordered."""
    store = prepared.train["web"]
    rows = open_best_fit(store, CONTEXT, prepared.folder / f"web.best-fit-{CONTEXT}")
    windows = ConcatRows(store, CONTEXT)
    ranking = rank_rows(windows, "length", measure_by_score(windows, length_score(store)), prepared.folder, 2)
    blocks = [rows.assemble(np.arange(rows.count)), windows.assemble(np.arange(windows.count))]
    return [
        [block.tokens.tolist() for block in blocks], ranking.sequences.tolist(), prepared.tokenizer.fingerprint,
        rows.fingerprint, [store.origin_of_document(i) for i in range(store.documents)],
        [held.slice(0, held.tokens).tolist() for held in prepared.validation.values()],
    ]  # fmt: skip


def damaged(place: Path) -> list[VerifyReport]:
    return [result for result in verify(place, lambda size_bytes: None) if result.damage]


def test_sound_data_is_sound(prepared: Prepared) -> None:
    results = list(verify(prepared.folder, lambda size_bytes: None))
    assert not any(result.damage or result.note for result in results)
    names = {Path(result.path).name for result in results}
    assert {"prepared.json", "tokenizer.json", "web.train.00001", "web.validation.00000", "web.best-fit-16"} <= names


@pytest.mark.parametrize("damage", ["flipped", "cut", "deleted", "swapped"])
def test_every_damaged_file_is_found_and_none_is_read(prepared: Prepared, damage: str) -> None:
    folder = prepared.folder
    expected = read(open_prepared(folder))
    whole = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    for path, content in whole.items():
        if not content:  # no row was set aside
            continue
        if damage == "deleted":
            path.unlink()
        elif damage == "swapped":
            twin = next((other for other in whole if other.suffix == path.suffix and whole[other] != content), None)
            if twin is None:
                continue
            path.write_bytes(whole[twin])
            twin.write_bytes(content)
        else:
            middle = len(content) // 3
            changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            path.write_bytes(content[:middle] if damage == "cut" else changed)
        recomputed = damage == "deleted" and ("best-fit" in path.name or path.name.startswith("ranking"))
        if not recomputed:
            lines = " ".join(line for result in damaged(folder) for line in result.damage)
            assert path.stem in lines or (lines and damage == "swapped"), path
        refusal = None
        try:
            assert read(open_prepared(folder)) == expected, path
        except UserError as error:
            refusal = str(error)
        assert refusal is None or (str(folder) in refusal and "again" in refusal)
        for other in set(folder.iterdir()) - set(whole):
            other.unlink()
        for other, original in whole.items():
            other.write_bytes(original)


def test_the_command_names_file_place_and_fix(prepared: Prepared) -> None:
    path = prepared.folder / "web.train.00001.bin"
    whole = path.read_bytes()
    assert CliRunner().invoke(app, ["data", "verify", str(prepared.folder)]).exit_code == 0
    path.write_bytes(bytes(len(whole)))
    result = CliRunner().invoke(app, ["data", "verify", str(prepared.folder)])
    assert result.exit_code == 1
    assert f"{path}: bytes 0 to {len(whole):,} are not those that were written" in result.output
    assert f"delete the folder {prepared.folder} and prepare the data again: bessemer data prepare" in result.output
    as_json = CliRunner().invoke(app, ["data", "verify", str(path.with_suffix("")), "--json"])
    assert as_json.exit_code == 1 and json.loads(as_json.stdout)["damaged"] == 1
    path.write_bytes(whole)
    with pytest.raises(UserError, match="no prepared data and no token store"):
        CliRunner().invoke(app, ["data", "verify", str(prepared.folder / "nothing")], catch_exceptions=False)


def test_old_data_is_compared_with_its_fingerprint_and_given_digests(prepared: Prepared) -> None:
    folder = prepared.folder
    whole = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    expected = read(open_prepared(folder))
    for path in folder.glob("web.*.0000?.json"):  # as earlier versions wrote it
        about = json.loads(path.read_text())
        del about["digest"], about["sizes"]["chunks"]
        path.write_text(json.dumps(about | {"sums": {}}))
        path.with_suffix(".chunks").unlink()
    about = json.loads((folder / "prepared.json").read_text())
    old = {key: about[key] for key in ("eos", "special", "train", "validation")}
    (folder / "prepared.json").write_text(json.dumps(old))
    opened = open_prepared(folder)
    assert not opened.verifiable and read(opened) == expected
    results = list(verify(folder, lambda size_bytes: None))
    assert not any(result.damage for result in results) and sum("no digests" in result.note for result in results) == 4
    data = bytearray((folder / "web.train.00000.bin").read_bytes())
    data[100] ^= 1
    (folder / "web.train.00000.bin").write_bytes(data)
    [bad] = damaged(folder)
    assert bad.path.endswith("web.train.00000")
    (folder / "web.train.00000.bin").write_bytes(whole[folder / "web.train.00000.bin"])
    assert not any(result.damage for result in verify(folder, lambda size_bytes: None, add_digests=True))
    assert open_prepared(folder).verifiable and not damaged(folder)
    for name in ("prepared.json", "web.train.00001.json", "web.train.00000.chunks"):
        assert (folder / name).read_bytes() == whole[folder / name]
