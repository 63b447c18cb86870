"""What to say when the system refuses memory. Imports nothing slow."""

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import FinetuneError
from common.units import format_bytes


@contextmanager
def shortage_explained(nbytes: int) -> Iterator[None]:
    """Turn the system's refusal of memory inside the context into an error that says what to lower."""
    try:
        yield
    except OSError as error:
        raise FinetuneError(
            f"The system gives no {format_bytes(nbytes)} of memory ({error.strerror}): lower --host-memory."
        ) from error
