"""ClearML, online or as offline sessions that `Task.import_offline_session` uploads."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bessemer.observe.trackers.tracker import Row, RunInfo, Tracker


class ClearML(Tracker):
    """The same task at every start, online; offline, each start is a session. Points of a step that was trained again
    follow the old ones, with a note."""

    needs = ("clearml", "clearml")

    def open(self, info: RunInfo) -> None:
        module, spec = import_module("clearml"), info.spec
        if spec.offline:
            module.Task.set_offline(True)
        known = None if spec.offline else info.state.get("task")
        self._task = module.Task.init(
            project_name=info.project, task_name=info.run.name, tags=info.labels, reuse_last_task_id=False,
            continue_last_task=known or False, auto_connect_arg_parser=False, auto_connect_frameworks=False,
            auto_resource_monitoring=False, auto_connect_streams=False, deferred_init=False,
        )  # fmt: skip
        self._task.set_initial_iteration(0)  # steps are the run's, also in a task that goes on
        self._info, info.state["task"] = info, self._task.id
        if spec.offline:
            info.state["sessions"] = [*info.state.get("sessions", []), str(self._task.get_offline_mode_folder())]
        if not known:
            self._task.set_parameters({f"Bessemer/{key}": str(value) for key, value in info.config.items()})
        self._logger = self._task.get_logger()

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            for name, value in row.values.items():
                self._logger.report_scalar(name, row.prefix, value, row.step)

    def cut(self, step: int) -> None:
        self.text("metrics_cut", step, f"the run went back: steps from {step:,} on are logged again")

    def text(self, kind: str, step: int, text: str) -> None:
        self._logger.report_text(f"{kind}  step {step:,}  {text}", print_console=False)

    def report(self, path: Path) -> None:
        self._task.upload_artifact(f"reports/{path.name}", str(path), wait_on_upload=True)

    def flush(self) -> None:
        self._task.flush()

    def close(self, state: str) -> None:
        if state == "failed":
            self._task.mark_failed(ignore_errors=True)
        self._task.close()
