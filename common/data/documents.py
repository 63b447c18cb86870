"""Find the documents of packed rows, and tell modules which ones are being computed."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Documents:
    """The documents that share the rows of a batch."""

    rows: int
    length: int  # Number of tokens of each row
    # Row, first token and end of each document, one after another; they cover every token
    flat: tuple[int, ...]

    @staticmethod
    def of(position_ids: torch.Tensor | None) -> "Documents | None":
        """Find the documents in int64 ``[B, S]``: one begins wherever positions do not go up by one. None: each row is
        one."""
        if position_ids is None or not restarts(position_ids):
            return None
        rows, length = position_ids.shape
        flat: list[int] = []
        for row, begins in enumerate(_begins(position_ids)):
            starts = [0, *begins.nonzero().flatten().tolist(), length]
            for start, end in itertools.pairwise(starts):
                flat += (row, start, end)
        return Documents(rows, length, tuple(flat))

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield row, first token and end of each document."""
        yield from zip(self.flat[::3], self.flat[1::3], self.flat[2::3], strict=True)


def restarts(position_ids: torch.Tensor | None) -> bool:
    """Return whether some row of int64 ``[B, S]`` holds more than one document."""
    return position_ids is not None and position_ids.dim() == 2 and bool(_begins(position_ids).any())


def _begins(position_ids: torch.Tensor) -> torch.Tensor:
    """Return where documents begin, bool ``[B, S]``, except at the beginning of a row."""
    return torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1


_current: Documents | None = None


def current_documents() -> Documents | None:
    """Return the documents of the batch that is being computed, if they are kept apart."""
    return _current


def replace_documents(documents: Documents | None) -> Documents | None:
    """Let :func:`current_documents` return ``documents`` from now on, and return what it returned before.

    It is for computations that take turns: their ``with`` blocks of :func:`separate_documents` do not nest.
    """
    global _current
    before, _current = _current, documents
    return before


@contextmanager
def separate_documents(documents: Documents | None) -> Iterator[None]:
    """Let :func:`current_documents` return ``documents`` while the context is open.

    This holds for the process, not the thread: on a GPU, autograd recomputes blocks in its own threads.
    """
    before = replace_documents(documents)
    try:
        yield
    finally:
        replace_documents(before)
