"""Comet, online or as offline archives that `comet upload` sends."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bessemer.observe.trackers.tracker import Row, RunInfo, Tracker

# Everything that Comet would find out about its process, which is not the training process.
NOTHING_OF_ITS_OWN: dict[str, Any] = {
    "log_code": False, "log_graph": False, "log_git_metadata": False, "log_git_patch": False, "log_env_details": False,
    "auto_param_logging": False, "auto_metric_logging": False, "auto_output_logging": False, "parse_args": False,
    "auto_histogram_weight_logging": False, "display_summary_level": 0,
}  # fmt: skip


class Comet(Tracker):
    """One experiment key at every start. Comet keeps what was logged: rows after a rollback follow with a note."""

    needs = ("comet_ml", "comet-ml")

    def open(self, info: RunInfo) -> None:
        comet, spec = import_module("comet_ml"), info.spec
        known = info.state.get("key")
        key = info.state.setdefault("key", uuid.uuid4().hex)
        options = dict(NOTHING_OF_ITS_OWN)
        if spec.offline:
            options["offline_directory"] = str(info.folder("comet"))
        if known:
            kind = comet.ExistingOfflineExperiment if spec.offline else comet.ExistingExperiment
            self._experiment = kind(previous_experiment=key, **options)
            return
        kind = comet.OfflineExperiment if spec.offline else comet.Experiment
        self._experiment = kind(project_name=info.project, workspace=spec.entity, experiment_key=key, **options)
        self._experiment.set_name(info.run.name)
        self._experiment.add_tags(info.labels)
        self._experiment.log_parameters(info.config)

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._experiment.log_metrics(row.named, step=row.step)

    def cut(self, step: int) -> None:
        self.text("metrics_cut", step, f"the run went back: steps from {step:,} on are logged again")

    def text(self, kind: str, step: int, text: str) -> None:
        self._experiment.log_text(text, step=step, metadata={"kind": kind})

    def report(self, path: Path) -> None:
        self._experiment.log_asset(str(path), file_name=f"reports/{path.name}", overwrite=True)

    def checkpoint(self, step: int, folder: Path) -> None:
        self._experiment.log_remote_asset(folder.resolve().as_uri(), remote_file_name=folder.name, step=step)

    def close(self, state: str) -> None:
        if state:
            self._experiment.log_other("state", state)
        self._experiment.end()
