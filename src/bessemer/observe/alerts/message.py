"""The text of an alert, and its delivery through Apprise."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from bessemer.errors import UserError
from bessemer.observe.alerts.incidents import AlertIncident
from bessemer.observe.figure import LineChart
from bessemer.run.directory import Run
from bessemer.run.journal import last_record, last_records, to_number
from bessemer.spec.quantity import human_count

CHART_RECORDS = 200
MOST_REASON = 400  # characters
CHART_COLUMNS, CHART_ROWS = 44, 7
NUMBERS = ("loss", "grad_norm", "lr", "tokens_per_s")
REPLAYED = ("veto", "rollback", "spike", "divergence", "nonfinite")


def title_of(run: Run, incidents: Sequence[AlertIncident]) -> str:
    first = incidents[0]
    more = f" and {len(incidents) - 1} more" if len(incidents) > 1 else ""
    return f"{run.name}: {first.title} at step {first.step:,}{more}"


def body_of(run: Run, incidents: Sequence[AlertIncident]) -> str:
    """What happened, the numbers of the last step, a chart of the metric, and the command to look."""
    first, lines = incidents[0], [incident.text for incident in incidents]
    last = last_record(run.steps_path) or {}
    numbers = [f"{name} {value:.4g}" for name in NUMBERS if (value := to_number(last.get(name))) is not None]
    if last:
        numbers.append(f"tokens {human_count(to_number(last.get('tokens')) or 0)}")
        lines += ["", f"at step {int(to_number(last.get('step')) or 0):,}: {', '.join(numbers)}"]
    if chart := chart_of(run, first.metric):
        lines += ["", chart]
    folder = shlex.quote(str(run.folder.resolve()))
    replay = first.kinds[0] in REPLAYED
    look = f"bessemer replay {folder} --step {first.step}" if replay else f"bessemer runs {folder}"
    return "\n".join([*lines, "", f"look: {look}", f"      bessemer watch {folder}"])


def chart_of(run: Run, metric: str) -> str:
    """The last records of a metric as a text chart; empty without two values."""
    path = run.validation_path if metric.startswith("validation:") else run.steps_path
    name = metric.removeprefix("validation:")
    points = [
        (to_number(record.get("step")), to_number(record.get(name))) for record in last_records(path, CHART_RECORDS)
    ]
    drawn = [(step, value) for step, value in points if step is not None and value is not None]
    if sum(math.isfinite(value) for _, value in drawn) < 2:
        return ""
    chart = LineChart(name, [step for step, _ in drawn], {name: [value for _, value in drawn]}, x_label="step")
    return chart.text(CHART_COLUMNS, CHART_ROWS)


def open_route(variable: str) -> Any:
    """The Apprise object of the URL in an environment variable. UserError if it is missing or not one; the message does
    not contain it."""
    try:
        import apprise
    except ImportError:
        raise UserError("alerts: need the package apprise: pip install 'bessemer[alerts]'") from None
    url = os.environ.get(variable)
    if not url:
        raise UserError(f"alerts.routes: the environment variable {variable} is not set: give it an Apprise URL")
    route = apprise.Apprise()
    if not route.add(url):
        raise UserError(f"alerts.routes: {variable} holds no URL that Apprise knows (`apprise --details` lists them)")
    return route


def deliver(route: Any, url: str, title: str, body: str) -> str:
    """Send a message; why it was not taken, empty if it was. Of `url` the reason holds nothing but a local address."""
    import apprise

    with apprise.LogCapture(level=logging.DEBUG, fmt="%(levelname)s %(message)s") as log:
        if route.notify(title=title, body=body):
            return ""
        return hide_parts(failure_in(log.getvalue()), url)


def failure_in(log: str) -> str:
    """What Apprise and the server say in Apprise's log: its warnings, the server's answer, the socket's error."""
    parts: list[str] = []
    for record in re.split(r"^(?=DEBUG |INFO |WARNING |ERROR |CRITICAL )", log, flags=re.M):
        level, _, text = record.partition(" ")
        answer = text.startswith("Response Details:")
        if level in ("WARNING", "ERROR", "CRITICAL") or answer or text.startswith("Socket Exception:"):
            text = text.removeprefix("Response Details:").strip()
            text = text[2:-1] if re.fullmatch(r"b(['\"]).*\1", text, re.S) else text  # bytes as Python writes them
            parts.append(" ".join(text.split()).rstrip("."))
    reason = "; ".join(part for part in dict.fromkeys(parts) if part)
    return reason[:MOST_REASON] or "no reason was given; check the address, and that its server is up"


def hide_parts(text: str, url: str) -> str:
    """The text without user, tokens and names that a URL holds."""
    pieces = {piece for form in (url, unquote(url)) for piece in re.split(r"[/:@?&=,#]+", form.partition("://")[2])}
    hidden = [piece for piece in pieces if len(piece) > 3 and not re.fullmatch(r"localhost|[\d.]+", piece)]
    for piece in sorted(hidden, key=len, reverse=True):
        text = text.replace(piece, "***")
    return text
