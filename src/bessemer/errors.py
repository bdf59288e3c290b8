"""UserError: the exception for mistakes that the user can fix. Printed without a traceback, exit code 2.

Every layer may raise it. Any other exception that reaches the top is a fault of Bessemer (exit code 1).
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake in the input. The message names the value, the place and what to write instead."""


class RankError(UserError):
    """A mistake that only this rank met, so that it must print it itself; rank 0 prints all others."""
