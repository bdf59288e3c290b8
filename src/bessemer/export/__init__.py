"""Trained models for other programs, each compared numerically with its source before it counts."""
