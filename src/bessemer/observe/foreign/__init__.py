"""Readers of runs that other frameworks wrote: `read(path)` gives ForeignRuns, `recognise(path)` the format."""

from bessemer.observe.foreign.read import read, recognise
from bessemer.observe.foreign.series import NAMES, ForeignRun, Series

__all__ = ["NAMES", "ForeignRun", "Series", "read", "recognise"]
