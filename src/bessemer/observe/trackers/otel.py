"""OpenTelemetry: gauges over OTLP/HTTP. Only the newest values."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from bessemer.observe.trackers.tracker import Row, RunInfo, Tracker

EXPORT_MS = 1 << 40  # never by itself: each batch is exported when it is flushed
TIMEOUT_MS = 10_000


class OpenTelemetry(Tracker):
    """Gauges `bessemer.train.loss` and so on of a resource with the run's name, group and tags."""

    needs = ("opentelemetry.exporter", "opentelemetry-exporter-otlp-proto-http")

    def open(self, info: RunInfo) -> None:
        metrics = import_module("opentelemetry.sdk.metrics")
        export = import_module("opentelemetry.sdk.metrics.export")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        resource = import_module("opentelemetry.sdk.resources").Resource(
            {"service.name": "bessemer", "bessemer.run": info.run.name, "bessemer.tags": info.spec.tags}
        )
        exporter = otlp.OTLPMetricExporter(endpoint=info.spec.url, timeout=TIMEOUT_MS // 1000)
        reader = export.PeriodicExportingMetricReader(exporter, export_interval_millis=EXPORT_MS)
        self._provider = metrics.MeterProvider([reader], resource, shutdown_on_exit=False)
        self._meter, self._gauges = self._provider.get_meter("bessemer"), dict[str, Any]()

    def rows(self, rows: Sequence[Row]) -> None:
        for row in {row.prefix: row for row in rows}.values():
            for name, value in {f"{row.prefix}/step": float(row.step), **row.named}.items():
                key = "bessemer." + name.replace("/", ".")
                if key not in self._gauges:
                    self._gauges[key] = self._meter.create_gauge(key)
                self._gauges[key].set(value)

    def flush(self) -> None:
        if not self._provider.force_flush(TIMEOUT_MS):
            raise ConnectionError("the OTLP endpoint did not take the metrics")

    def close(self, state: str) -> None:
        self._provider.shutdown(TIMEOUT_MS)
