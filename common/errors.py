"""The two kinds of errors that users see, and hints for mistyped names."""

import difflib
from collections.abc import Iterable


class FinetuneError(Exception):
    """A failure while running. Its message says what failed, with values, and what to do."""

    exit_status = 1


class UserError(FinetuneError):
    """A wrong path, option or budget: what the user has to change before anything can run."""

    exit_status = 2


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest of ``candidates``, or an empty string."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
