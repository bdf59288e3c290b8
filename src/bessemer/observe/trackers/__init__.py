"""Forwards a run's records to trackers, from a process beside the run: see forward.py. One module for each tracker."""
