"""Exports trained models to other programs' formats. Each export is compared numerically with its source."""
