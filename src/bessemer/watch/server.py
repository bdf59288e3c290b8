"""Starts the page's server: binds the address, prints where it is, opens the browser, runs until a signal."""

from __future__ import annotations

import contextlib
import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path

from bessemer.errors import UserError
from bessemer.listener import is_loopback, listen, shown_host

EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True)
class WatchOptions:
    """What `bessemer watch` was asked for. A token is made where one is needed."""

    runs: Path
    host: str = "127.0.0.1"
    port: int = 8800
    token: str = ""
    browser: bool = True
    control: bool = False
    imports: tuple[Path, ...] = ()  # runs of other frameworks


def watch(options: WatchOptions) -> None:
    """Serve the page until Ctrl-C."""
    try:
        import uvicorn

        from bessemer.watch.access import PageAccess, make_token
        from bessemer.watch.app import CHARTS, make_app, page_file
        from bessemer.watch.foreign import import_runs
        from bessemer.watch.library import open_library
    except ImportError as error:
        raise UserError(f"watch needs {error.name}: pip install 'bessemer[watch]'") from None
    imported = import_runs(options.imports, options.runs) if options.imports else []
    for run in imported:
        print(f"imported {run.name}  {run.format}  {run.points:,} values of {len(run.metrics)} metrics", flush=True)
        for note in run.notes:
            print(f"         {note}", flush=True)
    library, first = open_library(options.runs)
    first = first or (imported[0].name if imported else "")
    local = is_loopback(options.host)
    token = options.token or ("" if local and not options.control else make_token())
    listener = listen(options.host, options.port)
    port = listener.getsockname()[1]
    app = make_app(library, PageAccess(token, local, port), options.control, first)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, lifespan="off",
        timeout_graceful_shutdown=1,  # open streams never end by themselves
        limit_concurrency=1000, h11_max_incomplete_event_size=64 << 10,
    )  # fmt: skip
    listener.listen(128)
    place = "localhost" if options.host in EVERYWHERE else shown_host(options.host)
    address = f"http://{place}:{port}/" + (f"?token={token}" if token else "")
    print(f"watching {library.root}  {address}  Ctrl-C stops", flush=True)
    if options.control:
        print("control  whoever has this address can stop, pause and change the runs", flush=True)
    if not page_file(CHARTS[0]):
        print("charts   are drawn by the server: uPlot was not fetched when Bessemer was installed", flush=True)
    if options.browser:
        threading.Timer(0.5, lambda: webbrowser.open(address)).start()
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        library.close()
