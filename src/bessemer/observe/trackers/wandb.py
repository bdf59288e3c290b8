"""Weights & Biases, online or to offline files that `wandb sync` uploads."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bessemer.observe.trackers.tracker import Row, RunInfo, Tracker


class Wandb(Tracker):
    """One run per id online. Offline, each start is a part `ID-2`, `ID-3` of the group: syncing a second offline part
    of one id would erase the first. W&B keeps what was logged: rows after a rollback are logged again with a higher
    `generation`."""

    needs = ("wandb", "wandb")

    def open(self, info: RunInfo) -> None:
        wandb, spec = import_module("wandb"), info.spec
        identifier, group = info.id, spec.group
        if spec.offline:
            info.state["parts"] = part = info.state.get("parts", 0) + 1
            identifier, group = (identifier if part == 1 else f"{identifier}-{part}"), group or identifier
        self._info, self._wandb = info, wandb
        self._run = wandb.init(
            project=info.project, entity=spec.entity, id=identifier, name=info.run.name, group=group, tags=spec.tags,
            config=info.config, dir=str(info.run.folder / "trackers"), mode="offline" if spec.offline else "online",
            resume=None if spec.offline else "allow", reinit="create_new",
            settings=wandb.Settings(x_disable_stats=True, console="off", silent=True, disable_git=True,
                                    disable_code=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def rows(self, rows: Sequence[Row]) -> None:
        generation = self._info.state.get("generation", 0)
        for row in rows:
            self._run.log({"step": row.step, "time": row.time, "generation": generation, **row.named})

    def cut(self, step: int) -> None:
        self._info.state["generation"] = self._info.state.get("generation", 0) + 1
        self.text("metrics_cut", step, f"the run went back: steps from {step:,} on are logged again")

    def text(self, kind: str, step: int, text: str) -> None:
        self._run.log({"step": step, f"text/{kind}": text})

    def report(self, path: Path) -> None:
        artifact = self._wandb.Artifact(f"{self._info.id}-{path.stem}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def checkpoint(self, step: int, folder: Path) -> None:
        if not folder.exists():  # retention was faster
            super().checkpoint(step, folder)
            return
        artifact = self._wandb.Artifact(f"{self._info.id}-checkpoint", type="model", metadata={"step": step})
        artifact.add_reference(folder.resolve().as_uri(), checksum=False)
        self._run.log_artifact(artifact)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=int(state in ("failed", "interrupted")))
