"""Starter projects of `bessemer new`: the templates of training projects, and what writes any project."""
