"""The launch files of a plan: the same that `bessemer launch` writes, for the nodes and GPUs that were planned."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from bessemer.errors import UserError
from bessemer.launch.request import Request, check
from bessemer.launch.submit import TARGETS, generate, write_files
from bessemer.plan.hardware import Cluster
from bessemer.plan.prices import Price
from bessemer.spec.document import parse
from bessemer.spec.load import named, validate

PLANNED = ("slurm", "kubernetes", "sky", "modal", "ssh")
SKY_CLOUDS = ("aws", "gcp", "azure", "lambda", "runpod")
WITH_REGIONS = ("aws", "gcp", "azure")


def planned_request(
    path: Path, text: str, on: str, cluster: Cluster, price: Price | None, options: Mapping[str, str | None]
) -> Request:
    """Where the planned run goes; `text` is its spec. `options` are those that only the user knows: image, volume,
    install, hosts."""
    if on not in PLANNED:
        raise UserError(f"--emit {on}: write one of {', '.join(PLANNED)}")
    given = {key: text for key, text in options.items() if text}
    hosts = tuple(host.strip() for host in given.pop("hosts", "").split(",") if host.strip())
    if hosts and len(hosts) != cluster.nodes:
        raise UserError(f"--hosts: names {len(hosts)} machines, and the plan has {cluster.nodes} nodes: name as many")
    more: dict[str, str] = {}
    if on in ("sky", "modal"):
        more["gpu_type"] = cluster.gpu.name.replace(" ", "")
    if on == "sky" and price is not None and price.provider in SKY_CLOUDS:
        more["cloud"] = f"{price.provider}/{price.region}" if price.provider in WITH_REGIONS else price.provider
    firm = on == "sky" and price is not None and price.term != "spot"
    run = named(validate(parse(text, str(path))), path)
    request = Request(run, on, cluster.nodes, cluster.per_node, on_demand=firm, hosts=hosts)
    request = replace(request, **given, **more)  # type: ignore[arg-type]
    try:
        return check(request)
    except UserError as fault:
        raise UserError(str(fault).replace("--on ", "--emit ")) from None


def write_planned(request: Request, tell: Callable[[str], None]) -> None:
    """All files, and the command that submits them."""
    files = generate(request)
    write_files(request, files)
    for name in files:
        tell(f"written  {request.folder / name}")
    tell(f"start    {shlex.join(TARGETS[request.on].submit(request))}")
