"""A run on disk: its folder, journals, lock, and the snapshot that checkpoints keep of it."""
