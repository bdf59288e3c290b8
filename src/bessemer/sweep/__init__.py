"""`bessemer sweep`: many runs of one spec with other values, the best of them, and which of the values mattered."""
