"""Writes a run's page as one HTML file: the page's own code with the answers of the server inside."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import msgspec

from bessemer import __version__
from bessemer.run.directory import Run
from bessemer.storage import write_atomic
from bessemer.watch import facts
from bessemer.watch.app import CHARTS, MODULES, page_file
from bessemer.watch.library import JOURNALS, X_AXES, WatchedRun, cache_folder

BINS = 1500
# The file runs its own inline code and loads nothing.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; frame-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)


def export_run(folders: list[Path], path: Path) -> int:
    """Write the first run, with the curves of the others for overlays; the size of the file in bytes."""
    runs = [WatchedRun(Run.existing(folder).folder.resolve(), cache_folder()) for folder in folders]
    try:
        for run in runs:
            run.refresh(wait=True)
        content = page({"time": time.time(), **answers(runs)})
    finally:
        for run in runs:
            run.close()
    write_atomic(path, content, durable=False)
    return len(content.encode())


def answers(runs: list[WatchedRun]) -> dict[str, Any]:
    """What the page asks of the server, by address."""
    first, by_address, reports = runs[0], dict[str, Any](), dict[str, str]()
    for watched in runs:
        run, names = watched.run, watched.names()
        at = f"runs/{quoted(run.name)}"
        by_address[at], by_address[f"{at}/names"] = facts.describe_run(run), {"names": names, "complete": True}
        wanted = [
            name if journal == "steps" else f"{journal}:{name}"
            for journal in JOURNALS
            if journal != "layers"
            for name in names[journal]
        ]
        for axis in X_AXES:
            by_address[f"{at}/series?{axis}"] = watched.series(wanted, axis, None, None, BINS)
            by_address[f"{at}/layers?{axis}"] = watched.layers(axis, None, None)
            by_address[f"{at}/events?{axis}"] = watched.described_events(axis)
        by_address[f"{at}/samples"], by_address[f"{at}/checkpoints"] = (
            facts.newest_samples(run),
            facts.list_checkpoints(run),
        )
        for name in by_address[at]["reports"]:
            reports[f"{run.name}/{name}"] = facts.report_file(run, name) or ""
    pulses = [watched.pulse() for watched in runs]
    by_address["runs"] = {"runs": [pulse["summary"] for pulse in pulses], "control": False, "first": first.run.name,
                     "version": __version__}  # fmt: skip
    compared = [watched.run for watched in runs]
    by_address["compare"] = {"runs": [run.name for run in compared], "rows": facts.compare_settings(compared),
                             "results": facts.compare_results(compared)}  # fmt: skip
    return {"answers": by_address, "reports": reports, "pulse": pulses[0]}


def quoted(name: str) -> str:
    """As JavaScript's encodeURIComponent writes a name."""
    from urllib.parse import quote

    return quote(name, safe="!'()*-._~")


def page(data: dict[str, Any]) -> str:
    """The page with style, code and data inside. The modules become one script: their imports name each other."""
    html = page_file("index.html") or ""
    styles = "\n".join(page_file(name) or "" for name in (CHARTS[1], "style.css"))
    modules = "\n".join(as_script(page_file(name) or "") for name in MODULES)
    # `<` in a string of JSON may also be written as an escape: no text of a run ends the element.
    json = (
        msgspec.json.encode(data)
        .decode()
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{styles}</style>\n</head>'
    script = f'<script type="application/json" id="export">{json}</script>\n<script>{page_file(CHARTS[0])}</script>\n'
    html = re.sub(r'<link rel="stylesheet"[^>]*>\n|<script src=[^>]*></script>\n', "", html)
    html = html.replace("</head>", head)
    return html.replace("</body>", f'{script}<script type="module">{modules}</script>\n</body>')


def as_script(module: str) -> str:
    """A module without its imports and exports."""
    module = re.sub(r"^import [^;]*;\n", "", module, flags=re.M)
    return re.sub(r"^export ", "", module, flags=re.M)
