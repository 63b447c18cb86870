"""Several data sets in one run, each with a weight: the part of all rows that come from it."""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch

from common.data.batches import Batches, PackedBatches, batch_of_words
from common.data.packed.packing import shuffled
from common.errors import UserError

BLOCK = 1000  # Number of rows in a row of which every data set has its part exactly: weights count to a thousandth


class MixedBatches(Batches):
    """Batches whose rows come from several data sets, in shuffled order. The batch of step s is a pure function of s.

    Each data set goes through its own epochs, in its own order. An epoch of the mixture is as many rows as all
    data sets have together, so that in it a data set of a small weight is not seen to its end, and one of a large
    weight more than once.

    Args:
        parts: the data sets, of one row length.
        weights: how much of the rows is to come from each, in any unit.
        batch_size: rows of a batch.
        seed: seed of the order.

    Raises:
        UserError: a weight is not positive, or less than a thousandth of all.
    """

    def __init__(self, parts: Sequence[PackedBatches], weights: Sequence[float], batch_size: int, seed: int) -> None:
        self._parts, self._size, self._seed = list(parts), batch_size, seed
        self._counts = counts_of(weights)
        self._last = -1, np.empty(0, np.int64)
        self.rows = sum(part.rows for part in parts)
        self.tokens = sum(part.tokens for part in parts)
        self.trainable_tokens = sum(part.trainable_tokens for part in parts)
        self.steps_per_epoch = -(-self.rows // batch_size)
        self.labels_ahead, self.packed = parts[0].labels_ahead, parts[0].packed
        identity = json.dumps([[part.digest for part in parts], self._counts.tolist()])
        self.digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        shares = self._counts / BLOCK
        self.description = "\n".join(
            f"{share:.3g} of all rows: {part.description}" for share, part in zip(shares, parts, strict=True)
        )

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Read the rows of a step; see :meth:`Batches.batch`."""
        first = step * self._size
        sources = self._sources(first, first + self._size)
        words = None
        for number, part in enumerate(self._parts):
            chosen = sources == number
            if chosen.any():
                begin = self._drawn_before(number, first)
                own = part.words(range(begin, begin + int(chosen.sum())))
                words = np.empty((self._size, own.shape[1]), np.uint32) if words is None else words
                words[chosen] = own
        assert words is not None
        return batch_of_words(words, self.packed, self.labels_ahead)

    def _block(self, number: int) -> np.ndarray:
        """Return the data set of each row of a block, int64 [BLOCK]; the last one is kept."""
        if self._last[0] == number:
            return self._last[1]
        sources = np.repeat(np.arange(len(self._counts)), self._counts)
        mixed: np.ndarray = sources[shuffled(np.arange(BLOCK), BLOCK, (self._seed, -1 - number))]
        self._last = number, mixed
        return mixed

    def _sources(self, first: int, stop: int) -> np.ndarray:
        blocks = range(first // BLOCK, (stop - 1) // BLOCK + 1)
        sources = np.concatenate([self._block(number) for number in blocks])
        return sources[first - blocks[0] * BLOCK :][: stop - first]

    def _drawn_before(self, number: int, place: int) -> int:
        whole, rest = divmod(place, BLOCK)
        return whole * int(self._counts[number]) + int((self._block(whole)[:rest] == number).sum())

    def close(self) -> None:
        """Close all token files."""
        for part in self._parts:
            part.close()


def counts_of(weights: Sequence[float]) -> np.ndarray:
    """Return how many of :data:`BLOCK` rows come from each data set: largest remainders, int64 [len(weights)].

    Raises:
        UserError: a weight is not positive, or less than a thousandth of all.
    """
    total = sum(weights)
    if not all(weight > 0 for weight in weights):
        raise UserError(f"--data: weights are {', '.join(f'{one:g}' for one in weights)}: each must be more than 0.")
    exact = np.array(weights) * BLOCK / total
    counts = np.floor(exact).astype(np.int64)
    for number in np.argsort(counts - exact, kind="stable")[: BLOCK - int(counts.sum())]:
        counts[number] += 1
    if not counts.all():
        raise UserError(
            f"--data: the smallest weight is {min(weights) / total:.2g} of the total; the least is a thousandth."
        )
    return counts
