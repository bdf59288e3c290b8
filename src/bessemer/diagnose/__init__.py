"""Looks inside a model and its gradients, for people: each look takes a Subject and gives a Report."""
