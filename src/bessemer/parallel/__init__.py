"""The processes of a run and how a model is laid over them."""
