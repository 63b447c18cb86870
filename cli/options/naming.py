"""Errors that name an option, though whatever raises them does not know options."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import FinetuneError, UserError


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Let errors inside begin with ``option`` (``--data``), unless they name it themselves."""
    try:
        yield
    except (UserError, FinetuneError) as error:
        if type(error) not in (UserError, FinetuneError) or option.split()[0] in str(error):
            raise
        raise type(error)(f"{option}: {error}") from error
