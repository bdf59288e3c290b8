"""Readers of runs that other frameworks wrote."""
