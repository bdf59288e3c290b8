"""Builds a run from its spec, runs the loop and handles its outcome."""
