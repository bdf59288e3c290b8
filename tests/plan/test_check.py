"""`plan check`: both published tables, the accuracy that is promised, bad rows by their number."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bessemer.cli.plan import app
from bessemer.errors import UserError
from bessemer.plan.check import check_file, mean_absolute_error, read_rows, to_json
from bessemer.plan.cost_model.operators import constants

DATA = Path(__file__).parents[2] / "benchmarks/data/planner"
BOUNDS = {"vtrain_single": 0.06, "vtrain_multi": 0.07, "llmfoundry_mfu": 0.045}


@pytest.mark.parametrize("name", BOUNDS)
def test_step_times_of_published_runs(name: str) -> None:
    assert mean_absolute_error(check_file(DATA / f"{name}.csv")) <= BOUNDS[name]


def test_the_error_bars_are_those_of_rows_left_out_of_the_fit() -> None:
    kinds = {"megatron, one node", "megatron, several nodes", "fsdp, one node", "fsdp, several nodes"}
    assert kinds <= constants().errors.keys()
    for kind in kinds:
        assert 0.01 < constants().errors[kind]["mean_absolute_error"] < 0.15


def test_utilisation_as_llm_foundry_counts_it() -> None:
    """(6 N + 12 L d T) tokens/s/GPU over the peak gives the table's own MFU: shapes and units are read right. Its rows
    in fp8 count against the fp8 peak."""
    off = []
    for case in read_rows(DATA / "llmfoundry_mfu.csv"):
        work, row = case.setup.work, case.columns
        assert work.parameters == int(row["NumParams"]), case.words
        flops = 6 * work.parameters + 12 * work.depth * work.width * case.setup.context
        peak = case.cluster.gpu.peak(case.setup.precision)
        rate = case.setup.global_batch * case.setup.context / case.measured_s / case.cluster.count
        off.append(abs(rate * flops / peak * 100 / float(row["MFU"]) - 1))
    assert max(off) < 0.003


def test_json_as_it_is_promised() -> None:
    result = CliRunner().invoke(app, ["check", str(DATA / "vtrain_multi.csv"), "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and len(found["rows"]) == 54
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in found["rows"]]
    assert found["mean_absolute_error"] == pytest.approx(sum(errors) / len(errors))
    assert found == json.loads(json.dumps(to_json(check_file(DATA / "vtrain_multi.csv"))))


def test_the_printed_table_ends_with_the_mean() -> None:
    lines = CliRunner().invoke(app, ["check", str(DATA / "llmfoundry_mfu.csv")]).stdout.strip().splitlines()
    assert len(lines) == 108 + 3 and lines[-1].startswith("mean absolute error ")


def test_a_prediction_does_not_look_at_the_measurement(tmp_path: Path) -> None:
    with (DATA / "vtrain_single.csv").open() as source:
        rows = list(csv.DictReader(source))[:5]
    for row in rows:
        row["iteration time (ms)"] = "1"
    with (tmp_path / "other.csv").open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    other = [one.predicted_s for one in check_file(tmp_path / "other.csv")]
    assert other == [one.predicted_s for one in check_file(DATA / "vtrain_single.csv")[:5]]


VTRAIN = (DATA / "vtrain_single.csv").read_text().splitlines()[0]
FOUNDRY = (DATA / "llmfoundry_mfu.csv").read_text().splitlines()[0]
GOOD = "8,32,4,1024,16,24,1024,2,2,2,219.7"
MPT = "3b,2048,8,h100_80gb,40,40,400,8,2,128,1,100000,1,1,amp_bf16,DEFAULT,FULL_SHARD,False,False,1"


@pytest.mark.parametrize(
    ("header", "row", "told"),
    [
        (VTRAIN, "8,32,4,1024,16,24,1024,2,2,1,219.7", "row 3: .* is not 8 GPUs"),
        (VTRAIN, "8,30,4,1024,16,24,1024,2,2,2,219.7", "row 3: global batch: 30"),
        (VTRAIN, "8,32,4,1024,16,24,1024,2,2,2,-1", "row 3: iteration time .* above zero"),
        (VTRAIN, "8,32,4,1024,16,24,1024,2,2,2,nan", "row 3: iteration time"),
        (VTRAIN, "8,32,4,1024,16,23,1024,2,2,2,200", "row 3: 23 layers do not divide"),
        (VTRAIN, "8,32,4,1024,15,24,1024,2,2,2,200", "row 3: hidden size"),
        (VTRAIN, "8,32,four,1024,16,24,1024,2,2,2,200", "row 3: micro batch is 'four'"),
        (VTRAIN, "8,32,4,1024", "row 3: has more or fewer fields"),
        (FOUNDRY, MPT.replace("3b", "4b"), "row 3: Model is '4b'"),
        (FOUNDRY, MPT.replace("h100", "h900"), "row 3: GPU is 'h900_80gb'"),
        (FOUNDRY, MPT.replace("amp_bf16", "int8"), "row 3: Precision"),
        (FOUNDRY, MPT.replace("False,False", "maybe,False"), "row 3: Activation Checkpointing"),
        (FOUNDRY, MPT.replace(",8,h100", ",12,h100"), "row 3: 12 GPUs"),
        (FOUNDRY, MPT.replace("FULL_SHARD", "HALF"), "row 3: Sharding Strategy"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, header: str, row: str, told: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([header, GOOD if header == VTRAIN else MPT, row, ""]))
    with pytest.raises(UserError, match=told) as refused:
        check_file(path)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


def test_files_that_are_no_table(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with pytest.raises(UserError, match="no such file"):
        check_file(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="columns"):
        check_file(path)
    path.write_text("")
    with pytest.raises(UserError, match="columns"):
        check_file(path)
    path.write_text(VTRAIN + "\n")
    with pytest.raises(UserError, match="no rows"):
        check_file(path)
    path.write_bytes(b"\xff\xfe\x00\x01" * 10)
    with pytest.raises(UserError, match="cannot be read"):
        check_file(path)
