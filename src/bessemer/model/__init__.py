"""Native models and generation. Knows nothing of training, data or parallelism."""
