"""What the user asks for: the run's specification, its quantities, and the arithmetic of a model's shape."""
