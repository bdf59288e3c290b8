"""lowp."""
