"""`bessemer train`: start or continue a run, or profile a few of its steps."""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperCommand

from bessemer.cli.console import AS_JSON, SETTINGS, SPEC, lines_on_stderr, naming_spec, print_json
from bessemer.errors import UserError

if TYPE_CHECKING:
    from bessemer.spec.schema import ParallelSpec, RunSpec

PROCESSES_PER_CORE = 4  # more would stall the machine for hours
RESTARTS = 3  # as in `bessemer launch`


def count_local_processes(parallel: ParallelSpec) -> int:
    """The number of processes to start here: the product of the parallel degrees, at least one per GPU. 1 if a launcher
    has already started them."""
    if "WORLD_SIZE" in os.environ:
        return 1
    from bessemer.plan.search.layout import count_processes

    if parallel.device not in ("auto", "cuda"):
        return count_processes(parallel, 0)
    import torch

    return count_processes(parallel, torch.cuda.device_count())


def check_layout(spec: RunSpec, count: int) -> None:
    """Check the layout before any process starts, so that a mistake is one line."""
    import torch

    from bessemer.plan.search.layout import check_processes

    shape = None
    if spec.model.hf is not None:
        from bessemer.session.start import open_source

        source = open_source(spec)
        shape = source.shape if source else None
    check_processes(spec, shape, count)
    cores = os.cpu_count() or 1
    on_cpu = spec.parallel.device == "cpu" or not torch.cuda.is_available()
    if on_cpu and count > PROCESSES_PER_CORE * cores:
        raise UserError(
            f"parallel: needs {count} processes, but this machine has no GPU and {cores} cores, enough for "
            f"{PROCESSES_PER_CORE * cores}. Lower the degrees, or use `bessemer launch`"
        )


class TrainCommand(TyperCommand):
    """Answers an unknown option that is a key of the spec (`--lr 3`) with the right `--set`."""

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
                raise UserError(f"{option}: no such option, but a key of the spec: write --set {key}={value}")
        return super().parse_args(ctx, args)


def start_processes(count: int) -> NoReturn:
    """Replace this process by `count` processes of the same command. After a fault all restart from the last save,
    a few times; torchrun's variables (PET_MAX_RESTARTS) override that."""
    from bessemer.parent import keep_parent

    launcher = ["-m", "bessemer.parallel.agent", "--standalone", f"--nproc-per-node={count}"]
    os.environ.setdefault("PET_MAX_RESTARTS", str(RESTARTS))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    keep_parent()
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "bessemer", *sys.argv[1:]])


def _run_json(folder: Path) -> dict[str, Any]:
    """The run as `bessemer runs` lists it."""
    from dataclasses import asdict

    from bessemer.run.directory import Run, summarize
    from bessemer.run.journal import json_ready

    if not (folder / "events.jsonl").exists():  # a stage that has not started
        return {"name": folder.name, "folder": str(folder), "state": "new"}
    return json_ready(asdict(summarize(Run(folder))))


def _rehearse(spec: RunSpec, as_json: bool) -> int:
    """Plays the rehearsal; the exit code."""
    from dataclasses import asdict

    import torch

    from bessemer.chaos.rehearsal import Rehearsal, conclusion

    if "WORLD_SIZE" in os.environ:
        raise UserError("--rehearse starts processes itself: run it without a launcher")
    gpus = torch.cuda.device_count() if spec.parallel.device in ("auto", "cuda") else 0
    folder = Path(spec.runs) / f"{spec.name}-rehearsal"
    stages = Rehearsal(
        spec, folder, lambda stage: print(stage, file=sys.stderr if as_json else None, flush=True), gpus
    ).run()
    if as_json:
        print_json({"folder": str(folder), "stages": [asdict(stage) for stage in stages]})
    else:
        print(conclusion(stages))
    return int(any(stage.state == "failed" for stage in stages))


def train(
    spec: Path = SPEC,
    settings: list[str] = SETTINGS,
    restart: bool = typer.Option(
        False, "--restart", help="Start over from step 0; existing checkpoints move to checkpoints/abandoned/."
    ),
    plain: bool = typer.Option(False, "--plain", help="Print plain lines, even in a terminal."),
    profile: bool = typer.Option(
        False, "--profile", help="Only measure where the time of a step goes; the run is not changed."
    ),
    profile_steps: int = typer.Option(3, help="With --profile: steps to measure, after five of warm-up."),
    rehearse: bool = typer.Option(
        False, "--rehearse", help="Instead, play a small copy of the run: train, save, kill, resume, evaluate, export."
    ),
    nsight: bool = typer.Option(False, "--nsight", help="Like --profile, for use under nsys or ncu: marks the steps."),
    as_json: bool = AS_JSON,
) -> None:
    """Train the run of a spec, or resume it.

    The same command resumes exactly where the run stopped. Ctrl-C saves first.

    Example: bessemer train my-run.yaml --set budget.tokens=50M

    Example: bessemer train my-run.yaml --rehearse
    """
    from bessemer.observe.progress import working
    from bessemer.session.recovery.restart import ended_before
    from bessemer.spec.load import load_spec
    from bessemer.spec.stages import has_stages, load_chain

    if has_stages(spec):
        from bessemer.session.stages import REPORT, train_chain

        if rehearse:
            raise UserError(
                f"--rehearse {spec}: has stages: pass the spec of one, which train writes to RUNS/NAME/stages/"
            )

        chain = load_chain(spec, settings)
        with lines_on_stderr(as_json):
            code = train_chain(chain, ["--plain"] * plain, restart)
        if as_json:
            print_json(
                {"report": str(chain.folder / REPORT), "stages": [_run_json(stage.run) for stage in chain.stages]}
            )
        raise typer.Exit(code)
    run_spec = load_spec(spec, settings)
    if rehearse:
        raise typer.Exit(_rehearse(run_spec, as_json))
    if code := ended_before(Path(run_spec.runs) / run_spec.name):
        raise typer.Exit(code)
    with nullcontext() if "RANK" in os.environ else working("loading torch"):
        importlib.import_module("torch")
    if profile or nsight:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler
        os.environ.setdefault("PET_MAX_RESTARTS", "0")  # a measurement is not repeated
    if (count := count_local_processes(run_spec.parallel)) > 1:
        check_layout(run_spec, count)
        start_processes(count)
    from bessemer.observe.view import LineView, LiveView, RunView
    from bessemer.parallel.world import leave_process_group
    from bessemer.session.session import Session
    from bessemer.train.control import STOP

    live = sys.stdout.isatty() and not plain and not as_json
    resume_with = None if settings else str(spec)  # with overrides, continue with the spec in the run's folder
    view: RunView = (
        LiveView(resume_with)
        if live
        else LineView(resume_with, run_spec.observe.line_every, sys.stderr if as_json else None)
    )
    if os.environ.get("RANK", "0") != "0":  # only rank 0 prints
        view = RunView()
    if profile or nsight:
        from bessemer.session.inspect import ProfileSession

        session = ProfileSession(run_spec, view, profile_steps, nsight)
        session.train()
        leave_process_group()
        if as_json and session.world.main:
            report = session.folder / "profile.json"
            print_json({"folder": str(session.folder), **(json.loads(report.read_text()) if session.text else {})})
        elif session.text:
            files = ", ".join(path.name for path in sorted(session.folder.iterdir()))
            print(f"\n{session.text}\nin {session.folder}: {files}; traces are for ui.perfetto.dev")
        return
    with naming_spec(spec, settings):
        outcome = Session(run_spec, view, restart=restart).train()
    leave_process_group()
    if as_json and os.environ.get("RANK", "0") == "0":
        print_json(_run_json(Path(run_spec.runs) / run_spec.name))
    if outcome.kind == "interrupted" and outcome.reason.startswith(STOP):
        return  # as asked: a launcher must not start it again
    if outcome.kind == "interrupted":
        raise typer.Exit({"SIGTERM": 143, "SIGUSR1": 138, "SIGHUP": 129}.get(outcome.reason, 130))
    if outcome.kind in ("failed", "stopped"):
        raise typer.Exit(1)
