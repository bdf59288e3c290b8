"""Turns every `auto` into a decision with its reason. Counts only: no torch, no numpy."""
