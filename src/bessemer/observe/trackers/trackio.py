"""trackio: a local dashboard with the interface of W&B."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from bessemer.observe.trackers.tracker import Row, RunInfo, Tracker


class Trackio(Tracker):
    """The run of the same name at every start; rows after a rollback are logged again, with a note."""

    needs = ("trackio", "trackio")

    def open(self, info: RunInfo) -> None:
        trackio = import_module("trackio")
        config = {key: value for key, value in info.config.items() if not key.startswith("_")}
        self._run = trackio.init(
            project=info.project, name=info.id, group=info.spec.group, config={**config, "tags": info.spec.tags},
            resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(row.named, step=row.step)

    def cut(self, step: int) -> None:
        self.text("metrics_cut", step, f"the run went back: steps from {step:,} on are logged again")

    def text(self, kind: str, step: int, text: str) -> None:
        self._run.log({f"text/{kind}": text}, step=step)

    def close(self, state: str) -> None:
        self._run.finish()
