"""`bessemer train`: start a run, or continue it where it stopped; or profile a few of its steps."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperCommand

from bessemer.cli.console import naming_spec
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.spec.parallel import ParallelSpec
    from bessemer.spec.schema import RunSpec

PROCESSES_PER_CORE = 4  # more would only wait for each other, for hours, with the machine at a standstill
RESTARTS = 3  # as many as `bessemer launch` gives


def local_processes(parallel: ParallelSpec) -> int:
    """How many processes to start here: as many as the degrees ask for, else one for each GPU. Just this one where a
    launcher has started them."""
    if "WORLD_SIZE" in os.environ:
        return 1
    product = parallel.tp * parallel.cp * parallel.pp
    product *= 1 if parallel.dp_replicate == "auto" else parallel.dp_replicate
    product *= parallel.ep if parallel.dp_shard == "auto" else parallel.dp_shard
    if parallel.device not in ("auto", "cuda"):
        return product
    import torch

    return max(product, torch.cuda.device_count())


def refuse_layout(spec: RunSpec, count: int) -> None:
    """Check the layout here, so that a mistake is one line and costs no start of processes."""
    import torch

    from bessemer.errors import UserError
    from bessemer.plan.search.replicas import check_processes

    given = None
    if spec.model.hf is not None:
        from bessemer.session.start import open_source

        source = open_source(spec)
        given = source.shape if source else None
    check_processes(spec, given, count)
    cores = os.cpu_count() or 1
    on_cpu = spec.parallel.device == "cpu" or not torch.cuda.is_available()
    if on_cpu and count > PROCESSES_PER_CORE * cores:
        raise UserError(
            f"parallel: asks for {count} processes, and this machine has no GPU and {cores} cores; "
            f"at most {PROCESSES_PER_CORE * cores} are started here. Use smaller degrees, or `bessemer launch`"
        )


class TrainCommand(TyperCommand):
    """Answers an unknown option that is a key of the spec (`--lr 3`) with the `--set` to write."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for i, argument in enumerate(args):
            option, equals, value = argument.partition("=")
            if not option.startswith("--") or option in known or option in ctx.help_option_names:
                continue
            from bessemer.spec.load import spec_key

            if key := spec_key(option.removeprefix("--")):
                if not equals:
                    value = args[i + 1] if i + 1 < len(args) and not args[i + 1].startswith("--") else "VALUE"
                raise UserError(f"{option}: no such option; it is a key of the spec: write --set {key}={value}")
        return super().parse_args(ctx, args)


def start_locally(count: int) -> NoReturn:
    """The same command in so many processes, in place of this one. After a fault all are started again, a few times,
    from the last checkpoint; torchrun's own variables change that."""
    from bessemer.parent import keep_tie

    launcher = ["-m", "bessemer.parallel.agent", "--standalone", f"--nproc-per-node={count}"]
    os.environ.setdefault("PET_MAX_RESTARTS", str(RESTARTS))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    keep_tie()
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "bessemer", *sys.argv[1:]])


def train(
    spec: Path = typer.Argument(help="The run's YAML file."),
    settings: list[str] = typer.Option(
        [], "--set", help="Override a key, such as --set optimizer.lr=3e-4. Repeatable."
    ),
    restart: bool = typer.Option(
        False, "--restart", help="Begin again from step 0; what the run has saved goes to checkpoints/abandoned/."
    ),
    plain: bool = typer.Option(False, "--plain", help="Plain lines, also in a terminal."),
    profile: bool = typer.Option(
        False, "--profile", help="Only see where a step's time goes; the run stays untouched."
    ),
    profile_steps: int = typer.Option(3, help="With --profile: steps to look at, after five of warm-up."),
    nsight: bool = typer.Option(False, "--nsight", help="As --profile, under nsys or ncu: marks steps for them."),
) -> None:
    """Train the run that a spec describes. The same command again continues it.

    Example: bessemer train my-run.yaml --set budget.tokens=50M
    """
    from bessemer.observe.progress import working
    from bessemer.session.recovery.restart import ended_before
    from bessemer.spec.load import load_spec

    run_spec = load_spec(spec, settings)
    if code := ended_before(Path(run_spec.runs) / run_spec.name):
        raise typer.Exit(code)
    with nullcontext() if "RANK" in os.environ else working("loading torch"):
        importlib.import_module("torch")
    if profile or nsight:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler tells of its stages otherwise
    elif (count := local_processes(run_spec.parallel)) > 1:
        refuse_layout(run_spec, count)
        start_locally(count)
    from bessemer.observe.view import LineView, LiveView, RunView
    from bessemer.parallel.world import part
    from bessemer.session.session import Session

    live = sys.stdout.isatty() and not plain
    again = None if settings else str(spec)  # with overrides, the spec in the run's folder is the one to continue with
    view: RunView = LiveView(again) if live else LineView(again, run_spec.observe.line_every)
    if os.environ.get("RANK", "0") != "0":  # of several processes the first one speaks
        view = RunView()
    if profile or nsight:
        from bessemer.session.profile import ProfileSession

        session = ProfileSession(run_spec, view, profile_steps, nsight)
        session.train()
        if session.text:
            print(
                f"\n{session.text}\nin {session.folder}: profile.txt, profile.json, trace.json.gz for ui.perfetto.dev"
            )
        return
    with naming_spec(spec, settings):
        outcome = Session(run_spec, view, restart=restart).train()
    part()
    if outcome.kind == "interrupted":
        raise typer.Exit({"SIGTERM": 143, "SIGUSR1": 138, "SIGHUP": 129}.get(outcome.reason, 130))
    if outcome.kind in ("failed", "stopped"):
        raise typer.Exit(1)
