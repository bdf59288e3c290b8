"""An MLflow tracking server, or its SQLite file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bessemer.errors import UserError
from bessemer.observe.trackers.tracker import Row, RunInfo, Tracker
from bessemer.spec.observers import TrackerSpec

BATCH = 1000  # metrics in a request
NOT_A_NAME = re.compile(r"[^\w\-. /:]")
ENDS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "interrupted": "KILLED"}


class MLflow(Tracker):
    """MLflow keeps a metric of the same step, time and value once, so that a batch may be sent again. Values that a
    rollback made void stay in the history, with earlier times; `generation` tells them apart."""

    needs = ("mlflow", "mlflow-skinny")

    def check(self, spec: TrackerSpec) -> None:
        super().check(spec)
        if not (spec.url or os.environ.get("MLFLOW_TRACKING_URI")):
            raise UserError("trackers: mlflow has no address: write url: http://HOST:5000, or set MLFLOW_TRACKING_URI")

    def open(self, info: RunInfo) -> None:
        # Its own retries block for minutes; the forwarder tries again by itself.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        mlflow = import_module("mlflow")
        self._metric = import_module("mlflow.entities").Metric
        address = info.spec.url or os.environ["MLFLOW_TRACKING_URI"]
        self._client, self._info = mlflow.MlflowClient(tracking_uri=address), info
        if "run_id" not in info.state:
            self._create(info)
        self._id: str = info.state["run_id"]
        self._client.update_run(self._id, status="RUNNING")

    def _create(self, info: RunInfo) -> None:
        experiment = self._client.get_experiment_by_name(info.project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(info.project)
        # A start that died between the creation and its note of the id left a run with this tag.
        same = self._client.search_runs([number], f"tags.bessemer_id = '{info.id}'", max_results=1)
        tags = {"bessemer_id": info.id, "folder": str(info.run.folder.resolve())}
        tags |= {f"tag.{NOT_A_NAME.sub('_', tag)}": "yes" for tag in info.spec.tags}
        if info.spec.group:
            tags["group"] = info.spec.group
        run = same[0] if same else self._client.create_run(number, tags=tags, run_name=info.run.name)
        entities = import_module("mlflow.entities")
        params = [entities.Param(NOT_A_NAME.sub("_", key)[:250], str(value)[:6000])
                  for key, value in info.config.items()]  # fmt: skip
        for i in range(0, len(params), 100):
            self._client.log_batch(run.info.run_id, params=params[i : i + 100])
        info.state["run_id"] = run.info.run_id

    def rows(self, rows: Sequence[Row]) -> None:
        metrics = [
            self._metric(NOT_A_NAME.sub("_", name), value, int(row.time * 1000), row.step)
            for row in rows
            for name, value in row.named.items()
        ]
        for i in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[i : i + BATCH])

    def cut(self, step: int) -> None:
        generation = int(self._info.state.get("generation", 0)) + 1
        self._client.set_tag(self._id, f"cut.{generation}", f"steps from {step} on were trained and logged again")
        self._info.state["generation"] = generation

    def text(self, kind: str, step: int, text: str) -> None:
        self._client.set_tag(self._id, f"{kind}.{step}", text[:5000])

    def report(self, path: Path) -> None:
        self._client.log_artifact(self._id, str(path), "reports")

    def close(self, state: str) -> None:
        if state:
            self._client.set_terminated(self._id, ENDS.get(state, "FINISHED"))
