"""The native transformer and generation from it. Knows nothing of training, data or parallelism."""
