"""Kernels of our own, in Triton, where no library has one that serves."""
