"""Cut attention into tiles, each of which one call of a kernel or one matrix product computes."""

import itertools
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

KEYS = 4096  # Keys of a tile, where a kernel computes it
SCORES = 2**20  # Scores of a tile and head, where products compute it
# Tokens of which CUDA's flash kernel keeps fp32 sums for each document of a call, besides its own, in the backward pass
_DOCUMENT_TOKENS = 128
_LEAST_DOCUMENTS = 32  # Documents of a call, however short all are
_BANDED_QUERIES = 256  # Queries that share a mask on a CPU, where a window hides some of their keys


class Tile(NamedTuple):
    """Queries, and some of the keys that they see."""

    queries: slice
    keys: slice
    # "full": all see all; "causal": both are the same tokens; "banded": what they see differs; "documents": the same
    # tokens, of several whole documents
    kind: str


class View(NamedTuple):
    """Which keys are seen by each query."""

    past: int  # Index of the first query's key
    window: int
    starts: tuple[int, ...]  # Indices of keys, ascending: queries from there on see no key before

    @staticmethod
    def of(queries: int, keys: int, window: int, chunk: int, offset: int, documents: Sequence[int]) -> "View":
        past = keys - queries
        first, starts = offset - past, documents or (0,)  # the first key's token; where documents begin
        if chunk:
            ranges = itertools.pairwise((*starts, first + keys))
            starts = [start for begin, end in ranges for start in range(begin, end, chunk)]
        inside = (start - first for start in starts)
        return View(
            past, window if window < keys else 0, tuple(start for start in inside if 0 < start < keys)
        )

    def first(self, query: int) -> int:
        index = self.past + query
        before = bisect_right(self.starts, index)
        return max(self.starts[before - 1] if before else 0, index - self.window + 1 if self.window else 0)

    def stop(self, query: int) -> int:
        """Return the first query after ``query`` that sees none of the keys before its own, if there is one."""
        after = bisect_right(self.starts, self.past + query)
        return self.starts[after] - self.past if after < len(self.starts) else sys.maxsize

    def seen(self, tile: Tile, device: torch.device) -> torch.Tensor:
        """Return which keys of a tile are seen by each of its queries, bool ``[queries, keys]``."""
        last = self.past + torch.arange(tile.queries.start, tile.queries.stop, device=device)[:, None]
        keys = torch.arange(tile.keys.start, tile.keys.stop, device=device)
        seen = keys <= last
        if self.window:
            seen &= keys > last - self.window
        return seen


def cut_into_tiles(view: View, queries: int, way: str) -> Iterator[Tile]:
    """Cut attention into tiles that one call of a kernel computes; windows are sliced, and a query sees a key once.

    Args:
        way: ``"cpu"`` or ``"cuda"``: with that device's kernels; ``"products"``: one matrix product at a time.
    """
    if way == "cuda" and view.starts and not view.past:
        # No more in a call than would double its sums
        most = max(_LEAST_DOCUMENTS, queries // _DOCUMENT_TOKENS)
        borders = [0, *view.starts[most - 1 :: most], queries]
        for tokens in itertools.starmap(slice, itertools.pairwise(borders)):
            yield Tile(tokens, tokens, "documents")
        return
    step = queries
    if view.window and view.window < view.past + queries and way != "cuda":
        step = _BANDED_QUERIES if way == "cpu" else 4 * _BANDED_QUERIES
    start = 0
    while start < queries:
        stop = min(start + step, queries, view.stop(start))
        piece = slice(start, stop)
        first_own = view.past + start
        end = view.past + stop
        first = view.first(start)
        shared = view.first(stop - 1)
        if way == "products":
            tile = max(1, SCORES // (stop - start))
            for key in range(first, end, tile):
                keys = slice(key, min(key + tile, end))
                yield Tile(piece, keys, "full" if key >= shared and keys.stop <= first_own + 1 else "banded")
        elif first < shared:
            yield Tile(piece, slice(first, end), "banded")
        else:
            for key in range(shared, first_own, KEYS):
                yield Tile(piece, slice(key, min(key + KEYS, first_own)), "full")
            yield Tile(piece, slice(first_own, end), "causal")
        start = stop


def covered_once(tiles: Sequence[Tile], count: int) -> bool:
    """Return whether each of ``count`` queries is in one tile alone, so that its result is no sum."""
    return sum(tile.queries.stop - tile.queries.start for tile in tiles) == count
