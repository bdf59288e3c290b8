"""Measurements: a machine's peak rates, scaling, faster settings, a server under load, checks before a run."""
