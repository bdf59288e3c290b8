"""Prometheus metrics of the server, in a registry of its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bessemer.serve.scheduler import InferenceJob

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)


class ServerMetrics:
    """Counters and histograms. TTFT counts from the arrival of a request; TPOT is the time of a further token."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

        disable_created_metrics()
        self.registry = CollectorRegistry()

        def add(kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **options: Any) -> Any:
            return kind(f"bessemer_{name}", text, labels, registry=self.registry, **options)

        by_model = ("model",)
        self.jobs = add(Counter, "jobs", "Prompts and encoder inputs by outcome.", ("model", "outcome"))
        self.refused = add(Counter, "refused", "Requests refused because the queue was full.")
        self.responses = add(Counter, "http_responses", "Responses by path and status.", ("path", "status"))
        self.prompt_tokens = add(Counter, "prompt_tokens", "Tokens of prompts.", by_model)
        self.cached_tokens = add(Counter, "cached_prompt_tokens", "Prompt tokens not read again.", by_model)
        self.new_tokens = add(Counter, "generated_tokens", "New tokens.", by_model)
        self.ttft = add(Histogram, "ttft_seconds", "Arrival to first token.", by_model, buckets=_SECONDS)
        self.tpot = add(Histogram, "tpot_seconds", "Time per further token.", by_model, buckets=_TOKEN_SECONDS)
        self.queue_time = add(Histogram, "queue_seconds", "Arrival to admission.", by_model, buckets=_SECONDS)
        self.latency = add(Histogram, "latency_seconds", "Arrival to end.", by_model, buckets=_SECONDS)
        self.waiting = add(Gauge, "queue_jobs", "Jobs that wait.")
        self.running = add(Gauge, "running_samples", "Samples that are computed.")

    def finished(self, job: InferenceJob, outcome: str) -> None:
        """Record a job that has ended. Called by the scheduler's thread."""
        now, model = time.monotonic(), job.model
        self.jobs.labels(model, outcome).inc()
        if job.started is not None:
            self.queue_time.labels(model).observe(job.started - job.submitted)
        tokens = [len(completion.tokens) for completion in job.completions]
        for completion in job.completions:
            self.prompt_tokens.labels(model).inc(completion.prompt_tokens)
            self.cached_tokens.labels(model).inc(completion.cached_tokens)
            self.new_tokens.labels(model).inc(len(completion.tokens))
        if outcome != "completed":
            return
        self.latency.labels(model).observe(now - job.submitted)
        if job.first_token is not None:
            self.ttft.labels(model).observe(job.first_token - job.submitted)
            if max(tokens) > 1:
                self.tpot.labels(model).observe((now - job.first_token) / (max(tokens) - 1))

    def render(self, load: dict[str, int]) -> bytes:
        """The text format that Prometheus reads."""
        from prometheus_client import generate_latest

        self.waiting.set(load["waiting"])
        self.running.set(load["running"])
        text: bytes = generate_latest(self.registry)
        return text
