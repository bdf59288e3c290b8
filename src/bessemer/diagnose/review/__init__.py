"""`bessemer review`: finds faults in a training script without running it, and writes patches for them."""
