"""Finds what is wrong with a run, a log or a script, and inspects models and their gradients."""
