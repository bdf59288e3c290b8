"""Training on preferences."""
