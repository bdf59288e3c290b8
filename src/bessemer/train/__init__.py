"""The loop and what it is made of: objective, precision, feeding, evaluation, throughput."""
