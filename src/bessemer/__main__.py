"""The `bessemer` command, also as `python -m bessemer`."""

import signal


def run() -> None:
    """Ctrl-C while the command's modules are imported ends the process at once, without their traceback."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from bessemer.cli.main import run as command

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()


if __name__ == "__main__":
    run()
