"""A campaign of faults: every one is detected and repaired, and its numbers add up."""

from pathlib import Path
from typing import Any

import pytest

from bessemer.chaos.campaign import run_campaign


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_campaign_adds_up(make_spec: Any, tmp_path: Path) -> None:
    spec = make_spec(budget={"steps": 40, "batch": 512}, optimizer={"lr": 0.003})  # calm without faults
    campaign = run_campaign(
        spec, ["nan", "flip-weight", "sigkill"], 3, tmp_path / "chaos", per_run=3, learn=50, seeds=2, jobs=2
    )
    summary = campaign.summary()
    assert [summary[key] for key in ("faults", "detected", "recovered")] == [3, 3, 3]
    assert (summary["verdicts_due"], summary["verdicts_right"]) == (2, 2)
    assert summary["clean_alarms"] == 0 and len(campaign.clean_losses) == 2
    assert {row.kind: row.right for row in campaign.rows} == {"nan": True, "flip-weight": True, "sigkill": None}
    assert next(row for row in campaign.rows if row.kind == "sigkill").action == "restarted"
    for loss, clean in campaign.final_losses.values():
        assert abs(loss - clean) < 0.05 * clean
