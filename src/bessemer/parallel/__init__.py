"""The processes of a run, and how a model is parallelized over them."""
