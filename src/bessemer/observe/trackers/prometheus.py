"""Prometheus: a scrape endpoint on this machine, or a pushgateway. Only the newest values: Prometheus has no past."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from bessemer.observe.trackers.tracker import Row, RunInfo, Tracker

STATES = ("running", "finished", "failed", "stopped", "interrupted")


class Prometheus(Tracker):
    """Gauges `bessemer_train_loss{run="..."}` and so on, and `bessemer_state{state="..."}`."""

    needs = ("prometheus_client", "prometheus-client")

    def open(self, info: RunInfo) -> None:
        self._client: Any = import_module("prometheus_client")
        self._registry, self._info = self._client.CollectorRegistry(), info
        self._gauges: dict[str, Any] = {}
        self._server: Any = None
        if info.spec.port is not None:
            self._server, _ = self._client.start_http_server(info.spec.port, "127.0.0.1", self._registry)
        self._set_state("running")

    def _set(self, name: str, value: float, **labels: str) -> None:
        name = re.sub(r"\W", "_", f"bessemer_{name}")
        if name not in self._gauges:
            self._gauges[name] = self._client.Gauge(name, name, ["run", *labels], registry=self._registry)
        self._gauges[name].labels(run=self._info.run.name, **labels).set(value)

    def _set_state(self, current: str) -> None:
        for state in STATES:
            self._set("state", float(state == current), state=state)

    def rows(self, rows: Sequence[Row]) -> None:
        for row in {row.prefix: row for row in rows}.values():
            self._set(f"{row.prefix}_step", row.step)
            for name, value in row.named.items():
                self._set(name, value)

    def flush(self) -> None:
        if self._info.spec.url:
            group = {"run": self._info.run.name}
            self._client.push_to_gateway(self._info.spec.url, "bessemer", self._registry, group, timeout=10)

    def close(self, state: str) -> None:
        if state:
            self._set_state(state)
            self.flush()
        if self._server:
            self._server.shutdown()
            self._server.server_close()
