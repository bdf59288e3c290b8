"""The sections `trackers` and `alerts`: where a run's records are forwarded, and who is told what happens to it.

Both are read by a process beside the run (`bessemer watch forward`). Secrets come from the environment only, so that a
spec can be shared; keys and URLs that hold one are refused.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import field_validator, model_validator

from bessemer.spec.quantity import Seconds, SpecSection, check_url, setting

# What each tracker reads of the spec, besides `to`, `every`, `tags`; and the environment variables of its secrets.
TRACKERS: dict[str, tuple[str, ...]] = {
    "tensorboard": ("folder",),
    "wandb": ("project", "entity", "group", "offline"),
    "mlflow": ("url", "project", "group"),
    "comet": ("project", "entity", "group", "offline", "folder"),
    "clearml": ("project", "group", "offline"),
    "trackio": ("project", "group"),
    "prometheus": ("url", "port"),
    "otel": ("url", "group"),
    "csv": ("folder",),
    "parquet": ("folder",),
}
SECRETS = {
    "wandb": "WANDB_API_KEY",
    "mlflow": "MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
    "comet": "COMET_API_KEY",
    "clearml": "CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY",
    "otel": "OTEL_EXPORTER_OTLP_HEADERS",
}
_SECRET = re.compile(r"key|token|secret|password|passwd|auth|headers|credential", re.IGNORECASE)

# Life-cycle events, each an incident of its own, and events of the guard, of which several make one incident.
ENDS = ("failed", "stopped", "interrupted", "finished")
ALERT_EVENTS = (
    "started", *ENDS, "died", "veto", "rollback", "trial", "alarm", "hang", "out_of_memory", "recovered",
    "not_recovered", "save_failed", "upload_failed", "saved", "uploaded", "refused", "report",
)  # fmt: skip
# Alarms of the detectors, which are routed by name or all by `alarm`; `throughput` stands for SLOW.
ALARMS = (
    "nonfinite", "spike", "divergence", "oscillation", "plateau", "gradient_exploding", "gradient_vanishing",
    "learning_rate", "loss_scale", "slowdown", "data_wait", "straggler", "throttled", "weights_differ",
    "memory_growth", "clock_jump", "overfitting", "nonfinite_layer", "layer_gradient_exploding",
    "layer_gradient_vanishing", "update_large", "update_small", "activation_growth", "dead_units", "saturated_units",
    "attention_logit_growth", "attention_entropy_collapse", "reward_hacking", "kl_runaway", "entropy_collapse",
    "length_drift", "format_collapse", "equal_groups", "reward_drift", "over_optimisation",
    "likelihood_displacement", "router_collapse", "plan_speed", "plan_memory",
)  # fmt: skip
SLOW = ("slowdown", "data_wait", "straggler", "throttled", "plan_speed")
USUAL = [
    "failed", "stopped", "died", "hang", "rollback", "not_recovered", "divergence", "throughput", "finished", "rules",
]  # fmt: skip
CONDITION = re.compile(r"\s*([A-Za-z_][\w./:-]*)\s*(<=|>=|<|>)\s*([-+]?[\d.]+(?:e[-+]?\d+)?)\s*", re.IGNORECASE)


class TrackerSpec(SpecSection):
    """A tracker that gets the run's metrics, samples and reports. `wandb` is short for `{to: wandb}`, and
    `{wandb: {project: llm}}` for `{to: wandb, project: llm}`. Secrets come from the environment."""

    to: str = setting(..., f"one of {', '.join(TRACKERS)}", "wandb")
    project: str | None = setting(None, "project or experiment (default: bessemer)", "llm", min_length=1)
    entity: str | None = setting(None, "team or workspace, of wandb and comet", "team", min_length=1)
    group: str | None = setting(
        None, "group of runs; a tag in comet and clearml, which have none", "baseline", min_length=1
    )
    tags: list[str] = setting([], "tags of the run", ["baseline"])
    url: str | None = setting(
        None, "address of the MLflow server, Prometheus pushgateway or OTLP endpoint", "http://127.0.0.1:5000"
    )
    port: int | None = setting(None, "port to serve Prometheus metrics on, of this machine", 9400, ge=1, le=65535)
    folder: str | None = setting(None, "folder to write to (default: in the run's folder)", "tensorboard/my-run")
    offline: bool = setting(False, "write to files that are uploaded later, of wandb, comet and clearml", True)
    every: Seconds = setting(5.0, "interval between deliveries", "5s", ge=0.1, le=3600)

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"to": value}
        if isinstance(value, dict) and len(value) == 1 and (name := next(iter(value))) in TRACKERS:
            value = {"to": name, **(value[name] or {})}
        if isinstance(value, dict):
            secrets = [key for key in value if key not in cls.model_fields and _SECRET.search(str(key))]
            if secrets:
                names = SECRETS.get(str(value.get("to")), "the variables that its documentation names")
                raise ValueError(f"{secrets[0]} is a secret: remove it, and set {names} in the environment")
        return value

    @field_validator("to")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in TRACKERS:
            raise ValueError(f"no tracker {value!r}: write one of {', '.join(TRACKERS)}")
        return value

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        return None if value is None else check_url(value, "http://127.0.0.1:5000")

    @model_validator(mode="after")
    def _keys_fit(self) -> TrackerSpec:
        known = {"to", "tags", "every", *TRACKERS[self.to]}
        extra = [key for key, field in type(self).model_fields.items()
                 if key not in known and getattr(self, key) != field.default]  # fmt: skip
        if extra:
            raise ValueError(f"{self.to} has no {extra[0]}; it takes {', '.join(sorted(known - {'to'}))}")
        if self.to == "prometheus" and (self.url is None) == (self.port is None):
            raise ValueError("prometheus needs either a port to serve on, or the url of a pushgateway")
        if self.to == "otel" and self.url is None:
            raise ValueError("otel needs url, such as http://127.0.0.1:4318/v1/metrics")
        return self


class RouteSpec(SpecSection):
    """Which incidents are sent to one address. The address is an Apprise URL in an environment variable."""

    to: str = setting(
        ..., "name of the environment variable that holds the Apprise URL", "SLACK_URL", pattern=r"^\w[\w.-]*$"
    )
    on: list[str] = setting(
        USUAL, "events, alarms by name, `rules` for the rules below, or `all`", ["failed", "rollback", "rules"]
    )

    @field_validator("to", mode="before")
    @classmethod
    def _is_a_name(cls, value: Any) -> Any:
        if isinstance(value, str) and "://" in value:
            raise ValueError("URLs of alerts hold secrets: set it in the environment, and write the variable's name")
        return value

    @field_validator("on", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("on")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        known = (*ALERT_EVENTS, *ALARMS, "throughput", "rules", "all")
        if unknown := [name for name in value if name not in known]:
            raise ValueError(f"no event {unknown[0]!r}: write {', '.join(known)}")
        return value


class AlertRuleSpec(SpecSection):
    """A condition on any metric of the run's records."""

    when: str = setting(..., "metric, comparison and number; validation:loss is of evaluations", "grad_norm > 5")
    window: int = setting(1, "the condition is about the mean of this many records", 20, ge=1, le=100_000)
    action: Literal["message", "save", "stop"] = setting(
        "message", "message; save: also save a checkpoint; stop: save and end the run", "stop"
    )
    quiet: Seconds | None = setting(None, "instead of `quiet` of all alerts", "2h", gt=0)

    @field_validator("when")
    @classmethod
    def _is_condition(cls, value: str) -> str:
        if not CONDITION.fullmatch(value):
            raise ValueError(f"{value!r} is no condition: write a metric, <, <=, > or >=, and a number: grad_norm > 5")
        return value

    @property
    def condition(self) -> tuple[str, str, float]:
        """Metric, comparison, limit."""
        match = CONDITION.fullmatch(self.when)
        assert match
        return match[1], match[2], float(match[3])


class AlertsSpec(SpecSection):
    """Messages about events of the run and rules on its metrics, through Apprise. One message per incident: what comes
    back within `quiet` belongs to the same one."""

    routes: list[RouteSpec] = setting([], "addresses, and what is sent to each", [{"to": "SLACK_URL"}])
    rules: list[AlertRuleSpec] = setting([], "conditions on metrics", [{"when": "grad_norm > 5", "window": 20}])
    quiet: Seconds = setting(1800.0, "an incident ends when it did not come back for this long", "30 min", gt=0)
    every: Seconds = setting(5.0, "interval between looks at the run", "5s", ge=0.1, le=3600)

    @model_validator(mode="after")
    def _does_something(self) -> AlertsSpec:
        acts = any(rule.action != "message" for rule in self.rules)
        if not self.routes and not acts:
            raise ValueError("alerts needs routes, such as [{to: SLACK_URL}], or a rule with an action")
        return self
