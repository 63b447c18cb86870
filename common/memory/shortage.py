"""What to say when the system refuses memory. Imports nothing slow."""

import errno
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
        # A limit on files holds for memory that processes share
        advice = "enter `ulimit -f unlimited` before" if error.errno == errno.EFBIG else "lower --host-memory"
        raise FinetuneError(
            f"The system gives no {format_bytes(nbytes)} of memory ({error.strerror}): {advice}."
        ) from error
