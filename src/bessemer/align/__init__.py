"""Training on preferences and rewards, and tools that make and audit alignment data."""
