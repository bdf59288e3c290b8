"""Faults injected on purpose, to see that the guard finds each, names its cause and repairs the run."""
