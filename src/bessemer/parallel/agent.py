"""torchrun for Bessemer runs: `python -m bessemer.parallel.agent`, with torchrun's arguments.

It adds what torchrun lacks: meaningful exit codes (129, 130, 138, 143 after a signal, 2 for a user error) instead of a
traceback and code 1, workers that end when this process is killed, an end of this process when its parent is, and nodes
that identify each other by address.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from bessemer.parallel.address import interface, own_address
from bessemer.parent import PARENT

USER_ERROR = 2  # a worker's exit code after it has printed a UserError
# Signals that are forwarded to the workers. SIGUSR1 is a scheduler's warning: they finish the step, save and exit.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SAVE_S = 100  # time for the workers' last save after a signal; Slurm warns 120 s ahead


def _is_informative(record: logging.LogRecord) -> bool:
    """Whether a line of torchrun's log says something that no other message does."""
    text = record.getMessage()
    return not (
        text.startswith(("Sending process", "Received", f"failed (exitcode: {USER_ERROR})"))
        or "forcefully exiting" in text
    )


def main() -> None:
    os.environ[PARENT] = str(os.getpid())  # for the workers
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup: the run survives the terminal
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS.replace("SIGHUP,", "") if ignored else SIGNALS)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_S))
    if endpoint := os.environ.get("PET_RDZV_ENDPOINT"):  # several nodes: torch and gloo would use hostnames
        address = own_address([endpoint.rpartition(":")[0].strip("[]")])
        os.environ.setdefault("PET_LOCAL_ADDR", address)
        if name := interface(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(_is_informative)
    try:
        run.main()
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval)
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        if first.exitcode != USER_ERROR:
            cause = signal.Signals(-first.exitcode).name if first.exitcode < 0 else f"exit code {first.exitcode}"
            print(f"rank {rank} (process {first.pid}) ended with {cause}; no restarts are left", file=sys.stderr)
        sys.exit(first.exitcode if first.exitcode > 0 else 1)


if __name__ == "__main__":
    main()
