"""TensorBoard event files, written without TensorFlow or torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from bessemer.observe.trackers.tracker import Row, RunInfo, Tracker


class TensorBoard(Tracker):
    """A new event file at each start. After a rollback a file begins with SessionLog START, which tells readers to drop
    the steps from there on."""

    needs = ("tensorboard", "tensorboard")

    def open(self, info: RunInfo) -> None:
        module = import_module("tensorboard.summary.writer.event_file_writer")
        self._event = import_module("tensorboard.compat.proto.event_pb2")
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._tensor = import_module("tensorboard.compat.proto.tensor_pb2").TensorProto
        self._text = import_module("tensorboard.plugins.text.metadata")
        folder = str(info.folder("tensorboard"))
        self._new_writer = lambda: module.EventFileWriter(folder)
        self._writer = self._new_writer()
        if not info.state.get("opened"):
            rows = [f"| {key} | {value} |" for key, value in info.config.items()]
            self.text("config", 0, "\n".join(["| key | value |", "|---|---|", *rows]))
            self.text("tags", 0, ", ".join(info.spec.tags))
            info.state["opened"] = True

    def _add(self, step: int, time_s: float, **content: Any) -> None:
        self._writer.add_event(self._event.Event(step=step, wall_time=time_s, **content))

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in row.named.items()]
            self._add(row.step, row.time, summary=self._summary(value=values))

    def cut(self, step: int) -> None:
        self._writer.close()
        self._writer = self._new_writer()
        log = self._event.SessionLog(status=self._event.SessionLog.START)
        self._add(step, 0.0, session_log=log)

    def text(self, kind: str, step: int, text: str) -> None:
        content = self._tensor(dtype="DT_STRING", string_val=[text.encode()], tensor_shape={"dim": [{"size": 1}]})
        metadata = self._text.create_summary_metadata(display_name=kind, description="")
        value = self._summary.Value(tag=f"{kind}/text_summary", metadata=metadata, tensor=content)
        self._add(step, 0.0, summary=self._summary(value=[value]))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, state: str) -> None:
        self._writer.close()
