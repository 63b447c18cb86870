"""The two kinds of failure a user can see, and the help that goes with a mistyped name."""

import difflib
from collections.abc import Iterable


class FinetuneError(Exception):
    """Something failed while running: one message that says what, with values, and what to do."""

    exit_status = 1


class UserError(FinetuneError):
    """What the user asked for cannot be done as asked (wrong path, option, or budget)."""

    exit_status = 2


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest of ``candidates``, or an empty string."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
