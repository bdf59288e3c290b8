"""`bessemer doctor`: are this machine, or the nodes of a cluster, ready for a run?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from bessemer.cli.console import AS_JSON, print_json


def doctor(
    folder: Path = typer.Argument(Path("."), help="Where runs will be written."),
    port: int = typer.Option(29500, "--port", min=1, max=65535, help="The port of torch.distributed."),
    store: str = typer.Option("", "--store", help="Also measure this object store, such as s3://bucket/runs."),
    nodes: str = typer.Option("", "--nodes", help="Every node instead: a number (srun), or hosts with commas (SSH)."),
    srun_options: str = typer.Option("", "--srun-options", help="For srun, such as '--partition gpu --gpus 8'."),
    as_json: bool = AS_JSON,
) -> None:
    """Check this machine before a run, with a fix for each problem.

    Checks versions, GPUs, memory, limits, disk, clock and network.

    Writes 64 MiB to the folder to measure the disk. Exit code 1 if something is critical. With --nodes, checks
    every node and names what differs between them.

    Example: bessemer doctor /scratch/runs

    Example: bessemer doctor /scratch/runs --nodes gpu1,gpu2
    """
    from bessemer.bench.doctor import examine_machine
    from bessemer.errors import UserError
    from bessemer.observe.progress import working

    if nodes:
        if store:
            raise UserError("--store: leave it out with --nodes; every node reads the store by the same address")
        raise typer.Exit(_doctor_nodes(nodes, str(folder), port, srun_options, as_json))
    if srun_options:
        raise UserError("--srun-options: goes with --nodes, such as --nodes 4")
    with working("examining the machine"):
        checks = [check.to_json() for check in examine_machine(folder, port, store)]
    if as_json:
        print_json(checks)
    else:
        for check in checks:
            _print_check(check)
    if any(check["severity"] == "critical" for check in checks):
        raise typer.Exit(1)


def _print_check(check: Mapping[str, Any]) -> None:
    print(f"{check['severity'] or 'ok':8}  {check['name']}: {check['value']}")
    if check["fix"]:
        print(f"          fix: {check['fix']}")


def _doctor_nodes(nodes: str, folder: str, port: int, srun_options: str, as_json: bool) -> int:
    """Prints the problems of each node and the differences; the exit code."""
    from dataclasses import asdict

    from bessemer.launch.preflight import compare_nodes, examine_nodes
    from bessemer.observe.progress import working

    with working("examining the nodes"):
        reports = examine_nodes(nodes, folder, port, srun_options)
    differences = compare_nodes(reports)
    severities = [check["severity"] for report in reports for check in report.problems]
    severities += [difference.severity for difference in differences]
    ready = "critical" not in severities and not any(report.error for report in reports)
    if as_json:
        content = [asdict(report) for report in reports]
        print_json({"ready": ready, "nodes": content, "differences": [each.to_json() for each in differences]})
        return 0 if ready else 1
    for report in reports:
        if report.error:
            print(f"{report.node}: not examined: {report.error}")
            continue
        print(f"{report.node}: {len(report.checks) - len(report.problems)} readings ok, {len(report.problems)} others")
        for check in report.problems:
            _print_check(check)
    for each in differences:
        nodes_read = each.usual_nodes + len(each.others)
        print(f"{each.severity:8}  {each.name} differs: {each.usual_nodes} of {nodes_read} nodes: {each.usual}")
        for node, value in each.others.items():
            print(f"          {node}: {value}")
        print(f"          fix: {each.fix}")
    examined = sum(not report.error for report in reports)
    print(f"{examined} of {len(reports)} nodes examined, {len(differences)} differences")
    return 0 if ready else 1
