"""Detectors on the host: cheap, pure, fed with the records of steps, validations and looks inside the model."""
