"""One run of a campaign, in its own process: `python -m bessemer.chaos.child SPEC FAULTS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bessemer.chaos import faults as flaky
from bessemer.chaos.faults import Fault
from bessemer.chaos.inject import Injector
from bessemer.errors import UserError
from bessemer.session.session import Session, run_folder
from bessemer.spec.load import load_spec


def main(spec_path: str, faults_path: str) -> int:
    flaky.register_flaky_storage()
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
