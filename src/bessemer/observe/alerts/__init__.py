"""Alerts: messages about a run's events and metrics, from a process beside the run: see watcher.py."""
