"""Starts the server: loads the models, binds the address, and runs until SIGTERM or SIGINT, which drain it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from bessemer.errors import UserError
from bessemer.listener import is_loopback, listen, shown_host
from bessemer.serve.models import (
    ModelOptions,
    ModelRegistry,
    RunWatcher,
    ServedModel,
    load_adapter,
    load_served,
    wait_for_checkpoint,
)
from bessemer.serve.scheduler import QueueLimits, Scheduler

if TYPE_CHECKING:
    from bessemer.serve.app import Access
    from bessemer.serve.metrics import ServerMetrics

API_KEYS = "BESSEMER_API_KEYS"


@dataclass(frozen=True)
class ServeOptions:
    """What `bessemer serve` was asked for."""

    model: Path
    name: str | None = None
    adapters: Sequence[str] = ()
    watch: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    origins: tuple[str, ...] = ()
    anonymous: bool = False
    drain_s: int = 60
    options: ModelOptions = field(default_factory=ModelOptions)
    limits: QueueLimits = field(default_factory=QueueLimits)


def serve(request: ServeOptions) -> None:
    """Serve until a signal. The first one drains: no new connections, running requests end within `drain_s`."""
    try:
        import uvicorn  # noqa: F401

        from bessemer.serve.app import Access, parse_keys
        from bessemer.serve.metrics import ServerMetrics

        keys, metrics = tuple(parse_keys(os.environ.get(API_KEYS, ""))), ServerMetrics()
        import llguidance  # noqa: F401
    except ImportError as error:
        raise UserError(f"serve needs {error.name}: pip install 'bessemer[serve]'") from None
    local = is_loopback(request.host)
    if not local and not keys and not request.anonymous:
        raise UserError(
            f"--host {request.host} opens the model to the network without a key: set {API_KEYS}, or add --anonymous"
        )
    with listen(request.host, request.port) as listener:
        _run(request, listener, Access(keys, request.origins, local and not keys), metrics)


def _say(line: str) -> None:
    print(line, flush=True)


def _run(request: ServeOptions, listener: socket, access: Access, metrics: ServerMetrics) -> None:
    import uvicorn

    from bessemer.serve.app import make_app

    if request.watch:
        wait_for_checkpoint(request.model, _say)
    models = load_models(request)
    scheduler = Scheduler(request.limits, metrics)
    registry = ModelRegistry(models)
    watcher = None
    if request.watch:
        watcher = RunWatcher(request.model, models[0].name, request.options, registry, report=_say)
    app = make_app(registry, scheduler, access, watcher)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=request.drain_s,
            lifespan="on",
        )
    )
    _ignore_after_drain()
    port = listener.getsockname()[1]
    shown = shown_host(request.host)
    listener.listen(2048)
    for model in models:
        print(f"model    {model.name}  ({model.task}, {model.context:,} tokens)  {model.source}")
    _say(f"serving  http://{shown}:{port}/v1  chat page at http://{shown}:{port}/  Ctrl-C drains and stops")
    # The scheduler's thread waits for the device many times a second. By default the event loop then keeps it from the
    # interpreter's lock for 5 ms each time.
    sys.setswitchinterval(2e-4)
    start = time.monotonic()
    server.run(sockets=[listener])
    _say(f"stopped after {time.monotonic() - start:.0f} s")


def load_models(request: ServeOptions) -> list[ServedModel]:
    name = request.name or Path(os.path.abspath(request.model)).name
    models = [load_served(name, request.model, request.options)]
    for entry in request.adapters:
        adapter, separator, folder = entry.partition("=")
        if not separator or not adapter or not folder:
            raise UserError(f"--adapter {entry}: write NAME=FOLDER")
        models.append(load_adapter(adapter, Path(folder), models[0], request.options))
    return models


def _ignore_after_drain() -> None:
    """uvicorn raises the signal that ended it once more after draining; the command then ends with 0."""

    def ignore(number: int, frame: Any) -> None:
        return None

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ignore)
