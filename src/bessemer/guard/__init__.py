"""Judges steps. It only judges: what follows from a verdict is done elsewhere."""
