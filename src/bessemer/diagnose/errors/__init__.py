"""Recognises texts of faults: tracebacks, out of memory, NCCL, kernel logs, nvidia-smi, flight recorder, profiler."""
