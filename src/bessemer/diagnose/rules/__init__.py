"""Rules that judge the curves and settings of a run: `judge_run` returns ranked findings.

One module per family: loss, rates (schedule, batch, precision, restarts), data (held-out loss, epochs, routers), speed,
alignment. `runbook` is the table of causes, `config` the lines of configuration of each framework.
"""

from bessemer.diagnose.rules.judge import judge_run
from bessemer.diagnose.rules.speed import judge_scaling

__all__ = ["judge_run", "judge_scaling"]
