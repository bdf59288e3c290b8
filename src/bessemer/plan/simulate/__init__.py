"""Discrete-event simulation of a planned run: one step (step.py) and the whole run with failures (run.py)."""
