"""The two kinds of errors that users see, and hints for mistyped names."""

import difflib
import re
from collections.abc import Iterable

# Keywords of the Python API that are not simply an option's name with underscores.
_KEYWORDS = {
    "gpu": "device",
    **{name: f"{name.replace('-', '_')}=True" for name in ("resume", "overwrite", "single-slot")},
    "drop-long": "truncate=False",
    "drop-unseen": "drop_unseen=True",
    "truncate": "truncate=True",
    **{f"lora-{name}": name for name in ("rank", "alpha", "dropout", "targets")},
    "verify": "finetune verify",
}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_FLAG = re.compile(r"(?<![\w-])(?<!finetune )--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")


class FinetuneError(Exception):
    """A failure while running. Its message says what failed, with values, and what to do.

    Messages are written with the options of the command (``--host-memory``). Users of the libraries in Python
    read the keywords (``host_memory``) instead.
    """

    exit_status = 1
    names_flags = False  # Whether this process is the command's, which sets this on the class itself

    @property
    def as_written(self) -> str:
        """The message with the command's options, to be handed on to another process or error."""
        return super().__str__()

    def __str__(self) -> str:
        text = self.as_written
        return text if FinetuneError.names_flags else with_keywords(text)


class UserError(FinetuneError):
    """A wrong path, option or budget: what the user has to change before anything can run."""

    exit_status = 2


def with_keywords(text: str) -> str:
    """Return a message with the Python API's keywords instead of options, except in commands between backticks."""
    parts = text.split("`")
    parts[::2] = [
        _FLAG.sub(lambda flag: _KEYWORDS.get(flag[1], flag[1].replace("-", "_")), p) for p in parts[::2]
    ]
    return "`".join(parts)


def printable(text: str) -> str:
    r"""Return a text that may quote files as a terminal may show it.

    Control characters other than line breaks and tabs, and marks that reverse the order of letters, are written as in
    Python (``\x1b``).
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def as_message(text: str) -> str:
    """Return a printable text whose further lines are indented, so that none looks like another message."""
    return printable(text).replace("\n", "\n  ")


def on_one_line(error: BaseException) -> str:
    """Return an error's message without line breaks."""
    return " ".join(str(error).split())


def with_notes(text: str, error: BaseException) -> str:
    """Return a message, and after it the notes of an error."""
    return " ".join([text, *getattr(error, "__notes__", [])])


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the nearest of ``candidates``, or an empty string."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
