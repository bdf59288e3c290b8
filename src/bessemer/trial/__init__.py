"""A suspicious step on trial: replayed, attributed to documents, tried under other circumstances, written up."""
