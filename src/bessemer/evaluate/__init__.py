"""Evaluation of trained models: tasks, intervals, judges, contamination."""
