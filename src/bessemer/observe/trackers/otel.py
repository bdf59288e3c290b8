"""OpenTelemetry: gauges over OTLP/HTTP. Only the newest values."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from bessemer.observe.trackers.tracker import Row, RunInfo, Tracker

TIMEOUT_S = 10


class OpenTelemetry(Tracker):
    """Gauges `bessemer.train.loss` and so on of a resource with the run's name, group and tags."""

    needs = ("opentelemetry.exporter", "opentelemetry-exporter-otlp-proto-http")

    def open(self, info: RunInfo) -> None:
        metrics = import_module("opentelemetry.sdk.metrics")
        export = import_module("opentelemetry.sdk.metrics.export")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        resource = import_module("opentelemetry.sdk.resources").Resource(
            {
                "service.name": "bessemer",
                "service.instance.id": info.id,
                "bessemer.run": info.run.name,
                "bessemer.tags": info.spec.tags,
                "bessemer.group": info.spec.group or "",
            }
        )
        self._exporter = otlp.OTLPMetricExporter(endpoint=info.spec.url, timeout=TIMEOUT_S)
        self._reader, self._taken = export.InMemoryMetricReader(), export.MetricExportResult.SUCCESS
        self._provider = metrics.MeterProvider([self._reader], resource, shutdown_on_exit=False)
        self._meter, self._gauges = self._provider.get_meter("bessemer"), dict[str, Any]()

    def rows(self, rows: Sequence[Row]) -> None:
        for row in {row.prefix: row for row in rows}.values():
            for name, value in {f"{row.prefix}/step": float(row.step), **row.named}.items():
                key = "bessemer." + name.replace("/", ".")
                if key not in self._gauges:
                    self._gauges[key] = self._meter.create_gauge(key)
                self._gauges[key].set(value)

    def flush(self) -> None:
        data = self._reader.get_metrics_data()  # None if nothing was set since
        if data is not None and self._exporter.export(data) is not self._taken:
            raise ConnectionError("the OTLP endpoint did not take the metrics")

    def close(self, state: str) -> None:
        self._provider.shutdown()
        self._exporter.shutdown()
