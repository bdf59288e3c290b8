"""torchrun for runs of ours: `python -m bessemer.parallel.agent`, with torchrun's own arguments.

It adds what torchrun lacks: exit codes that tell what happened (129, 130, 138, 143 after a signal, 2 for a mistake in
the input) in place of a traceback and code 1, workers that end when this process is killed, an end of this process
when the one that started it is, and nodes that know each other by address.
"""

from __future__ import annotations

import logging
import os
import signal
import sys

from bessemer.parallel.address import interface, own_address
from bessemer.parent import PARENT

REFUSED = 2  # a worker's exit code for a mistake in the input, which it has printed
# Signals that are passed on to the workers. SIGUSR1 is a scheduler's warning: they finish the step, save and leave.
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SAVE_S = 100  # how long the workers get for the last save once a signal has come; Slurm's warning comes 120 s ahead


def _tells_news(record: logging.LogRecord) -> bool:
    """Whether a line of torchrun's log says what nothing else says."""
    text = record.getMessage()
    return not (
        text.startswith(("Sending process", "Received", f"failed (exitcode: {REFUSED})"))
        # Nobody can say more of a worker that had been asked to end.
        or "forcefully exiting" in text
    )


def main() -> None:
    os.environ[PARENT] = str(os.getpid())  # for the workers
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup: the run outlives the terminal
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", SIGNALS.replace("SIGHUP,", "") if ignored else SIGNALS)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_S))
    if endpoint := os.environ.get("PET_RDZV_ENDPOINT"):  # several nodes: torch and gloo go by hostnames otherwise
        address = own_address([endpoint.rpartition(":")[0].strip("[]")])
        os.environ.setdefault("PET_LOCAL_ADDR", address)
        if found := interface(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(_tells_news)
    try:
        run.main()
    except SignalException as signalled:
        sys.exit(128 + signalled.sigval)
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        if first.exitcode != REFUSED:
            how = signal.Signals(-first.exitcode).name if first.exitcode < 0 else f"exit code {first.exitcode}"
            print(f"rank {rank} (process {first.pid}) ended with {how}; no restart is left", file=sys.stderr)
        sys.exit(first.exitcode if first.exitcode > 0 else 1)


if __name__ == "__main__":
    main()
