"""The run's directory: lock, metrics, events, and the words in which findings are told."""
