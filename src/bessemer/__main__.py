"""`python -m bessemer`: the same as the `bessemer` command."""

from bessemer.cli.main import run

if __name__ == "__main__":
    run()
