"""What to train and with which settings: tokens, sizes, rates, shapes, adapters and methods, each with its reason."""
