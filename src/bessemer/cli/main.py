"""The `bessemer` command: registers every verb and maps errors to exit codes.

Verb files import only typer at the top, so that `--help` is fast.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import warnings
from contextlib import suppress

import typer

from bessemer import __version__
from bessemer.cli import (
    align,
    assist,
    bench,
    chaos,
    checkpoints,
    compress,
    data,
    demo,
    diagnose,
    doctor,
    evaluate,
    evaluate_judge,
    export,
    generate,
    inspect,
    launch,
    model,
    new,
    plan,
    review,
    runs,
    serve,
    spec,
    sweep,
    train,
    watch,
)
from bessemer.cli.console import CommandGroup
from bessemer.errors import RankError, UserError
from bessemer.observe.progress import open_missing_streams, output_fault
from bessemer.parent import end_with_parent

# Errors that only a path given by the user can cause.
PATH_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
# Errors of the machine: a full disk or quota, a read-only or failing disk, a limit on file sizes.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)

# The sections of `bessemer --help`.
SECTIONS = {
    "Start": ("demo", "new", "spec", "doctor"),
    "Prepare": ("data", "plan", "model", "bench"),
    "Train": ("train", "sweep", "launch", "runs", "control", "checkpoints"),
    "Watch and repair": ("watch", "report", "diagnose", "replay", "inspect", "review", "chaos"),
    "Align": ("align",),
    "Evaluate and use": ("generate", "evaluate", "export", "compress", "serve"),
    "Coding assistants": ("mcp", "assist"),
}


class RootGroup(CommandGroup):
    def sections(self, rows: list[tuple[str, str]]) -> list[tuple[str, list[tuple[str, str]]]]:
        summaries = dict(rows)
        return [(title, [(name, summaries[name]) for name in names]) for title, names in SECTIONS.items()]


app = typer.Typer(
    name="bessemer",
    cls=RootGroup,
    help="An LLM training engineer that you install: it prepares data, plans, trains, guards every step and explains."
    "\n\nExample: bessemer train my-run.yaml\n\n`bessemer COMMAND --help` has an example of each command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(plan.app, name="plan")
app.command("train", cls=train.TrainCommand)(train.train)
app.add_typer(launch.app, name="launch")
app.add_typer(data.app, name="data")
app.command("sweep")(sweep.sweep)
app.add_typer(runs.app, name="runs")
app.command("replay")(runs.replay)
app.add_typer(checkpoints.app, name="checkpoints")
app.command("diagnose")(diagnose.diagnose)
app.add_typer(inspect.app, name="inspect")
app.command("chaos")(chaos.chaos)
app.command("generate")(generate.generate)
evaluate.app.add_typer(evaluate_judge.app, name="judge")
app.add_typer(evaluate.app, name="evaluate")
app.add_typer(align.app, name="align")
app.command("export")(export.export)
app.command("compress")(compress.compress)
app.add_typer(model.app, name="model")
app.command("serve")(serve.serve)
app.add_typer(watch.app, name="watch")
app.command("control")(watch.control)
app.command("report")(watch.report)
app.command("new")(new.new)
app.command("review")(review.review)
app.command("doctor")(doctor.doctor)
app.add_typer(spec.app, name="spec")
app.add_typer(bench.app, name="bench")
app.command("mcp")(assist.mcp)
app.add_typer(assist.app, name="assist")
app.command("demo")(demo.demo)

QUIET_LIBRARIES = {"TORCH_LOGS": "-all", "TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(f"bessemer {__version__}")
        raise typer.Exit


def silence_libraries() -> None:
    """Hide warnings of other packages and print ours as one line each. Call it before torch is imported.
    PYTHONWARNINGS, TORCH_LOGS and similar variables show them again."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"bessemer\.")
        warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    if logging.lastResort:  # prints records that no handler takes
        logging.lastResort.setLevel(logging.ERROR)
    for name, value in QUIET_LIBRARIES.items():
        os.environ.setdefault(name, value)


def run() -> None:
    """Run the command. Exit codes: 0 success, 1 a fault, 2 a mistake in the input, 129, 130, 138 and 143 a signal."""
    end_with_parent()
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal lacks are escaped
            stream.reconfigure(errors="backslashreplace")
    silence_libraries()
    # Before torch is imported: expandable segments avoid fragmentation when sizes change (accumulation, evaluation).
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    code = _call()
    if (fault := output_fault()) and not isinstance(fault, BrokenPipeError):
        code = code or _print_error(f"the output cannot be written: {fault.strerror}")
    sys.exit(code)


def _call() -> int:
    """The command's exit code. A closed pipe (`| head`) is not an error."""
    try:
        app(prog_name="bessemer")
    except SystemExit as left:
        return 0 if isinstance(left.__context__, BrokenPipeError) else _exit_code(left)
    except UserError as error:
        # All processes of a run read the same input: only one per host prints the error.
        if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0" or isinstance(error, RankError):
            _print_error(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.filename is None and (fault := output_fault("\n")):  # an error about a file has a name
            return _print_error(f"the output cannot be written: {fault.strerror}")
        if error.errno in PATH_ERRORS and error.filename is not None:
            _print_error(f"{error.filename}: {error.strerror}; correct the path or its permissions")
            return 2
        if error.errno not in DISK_ERRORS:
            raise
        place = f"{error.filename}: " if error.filename else ""
        return _print_error(f"{place}{error.strerror}; free some space or use another disk, then run it again")
    return 0


def _exit_code(left: SystemExit) -> int:
    if isinstance(left.code, int) or left.code is None:
        return left.code or 0
    return _print_error(str(left.code))


def _print_error(message: str) -> int:
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)
    return 1
