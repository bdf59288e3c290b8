"""Fault injection into short runs, and the rehearsal of a run before it starts."""
