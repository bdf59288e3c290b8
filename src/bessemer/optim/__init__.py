"""Optimizers, schedules, clipping and the guarded step: an update that a verdict can reject."""
