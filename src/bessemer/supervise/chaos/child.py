"""One run of a campaign, in its own process: `python -m bessemer.supervise.chaos.child SPEC FAULTS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bessemer.errors import UserError
from bessemer.spec.load import load_spec
from bessemer.supervise.chaos import flaky
from bessemer.supervise.chaos.fault import Fault
from bessemer.supervise.chaos.inject import Injector
from bessemer.supervise.session import Session, run_folder


def main(spec_path: str, faults_path: str) -> int:
    flaky.register()
    spec = load_spec(spec_path)
    faults = [Fault(**entry) for entry in json.loads(Path(faults_path).read_text())]
    try:
        outcome = Session(spec, faults=Injector(faults, run_folder(spec))).train()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if outcome.kind == "finished" else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
