"""Errors a user can cause, as one sentence each.

The command line prints a :class:`UserError` without a traceback and exits with
code 2. Anything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

USER_ERROR_EXIT_CODE = 2


class UnevenTPError(Exception):
    """Base of all errors this package raises on purpose."""


class UserError(UnevenTPError, ValueError):
    """Bad input: one sentence naming the key, the value, what is allowed and what to do."""


class UnsupportedError(UserError):
    """A feature that uneven tensor parallelism does not support (yet), asked for by name."""
