"""Rewards: what an answer is worth, from functions, verifiers, reward models and judges."""
