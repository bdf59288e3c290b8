"""The one exception that means "the user can fix this": printed as plain lines, exit code 2.

It lies below every layer so that any of them can raise it. Everything else that escapes is a fault of ours (exit 1).
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake in the input. The message names the value, the place and what to write instead."""


class RankError(UserError):
    """A mistake that this process of several met and rank 0 did not, so that it has to be printed here."""
