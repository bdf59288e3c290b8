"""The `bessemer` command. Verb files import only typer at the top, so that help costs nothing."""

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
    bench,
    chaos,
    demo,
    evaluate,
    export,
    generate,
    inspect,
    launch,
    model,
    plan,
    replay,
    runs,
    spec,
    train,
)
from bessemer.cli import checkpoints as checkpoint_tools
from bessemer.cli import data as data_tools
from bessemer.cli.console import CommandGroup
from bessemer.errors import RankError, UserError
from bessemer.observe.progress import open_missing_streams, output_fault
from bessemer.parent import end_with_parent

# What only the user's paths can be the cause of, wherever it comes up.
PATH_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
# What a machine refuses: a full disk or quota, a read-only or failing disk, a limit on the size of files.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)

app = typer.Typer(
    name="bessemer",
    cls=CommandGroup,
    help="An LLM training engineer that you install: it prepares data, plans, trains, guards every step and explains.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(plan.app, name="plan")
app.command("train", cls=train.TrainCommand)(train.train)
app.add_typer(launch.app, name="launch")
app.add_typer(data_tools.app, name="data")
app.command("runs")(runs.runs)
app.command("replay")(replay.replay)
app.add_typer(checkpoint_tools.app, name="checkpoints")
app.add_typer(inspect.app, name="inspect")
app.command("chaos")(chaos.chaos)
app.command("generate")(generate.generate)
app.command("evaluate")(evaluate.evaluate)
app.command("export")(export.export)
app.add_typer(model.app, name="model")
app.add_typer(spec.app, name="spec")
app.add_typer(bench.app, name="bench")
app.command("demo")(demo.demo)


QUIET = {"TORCH_LOGS": "-all", "TORCH_CPP_LOG_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        print(f"bessemer {__version__}")
        raise typer.Exit


def silence_libraries() -> None:
    """Warnings of other packages are for their developers; those of this one are one line each. Before torch is
    imported; PYTHONWARNINGS, TORCH_LOGS and the like bring them back."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"bessemer\.")
        warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    if logging.lastResort:  # which prints what nobody handles
        logging.lastResort.setLevel(logging.ERROR)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def run() -> None:
    """Exit codes: 0 done, 2 a mistake in the input (one line for each), 1 a fault, 129, 130, 138, 143 a signal."""
    end_with_parent()
    open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot show is shown with escapes
            stream.reconfigure(errors="backslashreplace")
    silence_libraries()
    # Before torch is imported: segments that grow leave no gaps between sizes that change (accumulation, evaluation).
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    code = _call()
    if (fault := output_fault()) and not isinstance(fault, BrokenPipeError):
        code = code or _refused(f"the output cannot be written: {fault.strerror}")
    sys.exit(code)


def _call() -> int:
    """The command's exit code. A reader that left (`| head`) is no fault."""
    try:
        app(prog_name="bessemer")
    except SystemExit as left:
        return 0 if isinstance(left.__context__, BrokenPipeError) else _code(left)
    except UserError as error:
        # Processes of one run read the same input: one of each host says what is wrong with it.
        if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0" or isinstance(error, RankError):
            _refused(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.filename is None and (fault := output_fault("\n")):  # a file that cannot be opened has a name
            return _refused(f"the output cannot be written: {fault.strerror}")
        if error.errno in PATH_ERRORS and error.filename is not None:
            _refused(f"{error.filename}: {error.strerror}; correct the path or its permissions")
            return 2
        if error.errno not in DISK_ERRORS:
            raise
        place = f"{error.filename}: " if error.filename else ""
        return _refused(f"{place}{error.strerror}; make room or choose another disk, and run the same command again")
    return 0


def _code(left: SystemExit) -> int:
    if isinstance(left.code, int) or left.code is None:
        return left.code or 0
    return _refused(str(left.code))


def _refused(line: str) -> int:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    return 1
