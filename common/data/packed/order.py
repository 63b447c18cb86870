"""Draw rows in a random order that needs no memory, however many rows there are."""

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1


def draw_rows(draws: range, rows: int, seed: int | None, group_size: int = 1) -> np.ndarray:
    """Return the rows at some places of an endless sequence of epochs, each of which has each of ``rows`` once.

    Args:
        draws: places in that sequence.
        seed: chooses a new order for every epoch; None leaves the rows in theirs.
        group_size: number of neighbouring rows that stay together; rows left over come last in an epoch.
    """
    chosen = []
    while draws:
        epoch, start = divmod(draws[0], rows)
        places = np.arange(start, min(start + len(draws), rows))
        if seed is not None:
            groups = rows // group_size
            inside = places < groups * group_size
            if inside.any():
                at, within = np.divmod(places[inside], group_size)
                places[inside] = shuffled(at, groups, (seed, epoch)) * group_size + within
        chosen.append(places)
        draws = draws[len(places) :]
    return np.concatenate(chosen)


def shuffled(indices: np.ndarray, count: int, key: tuple[int, int]) -> np.ndarray:
    """Return where a random permutation of ``range(count)``, chosen by ``key``, sends ``indices`` (int64, any shape).

    This is the swap-or-not shuffle (Hoang, Morris, Rogaway, CRYPTO 2012): in each round every index has a partner, and
    a coin that both share decides whether they trade places. Each element is computed independently.
    """
    at = indices.astype(np.int64)
    rounds = 16 + 6 * max(count - 1, 1).bit_length()
    state = _mix_int(_mix_int(key[0] & _MASK) ^ (key[1] & _MASK))
    for _ in range(rounds):
        state = _mix_int(state)
        partner = (state % count - at) % count
        coin = _mix(np.maximum(at, partner).astype(np.uint64) ^ np.uint64(state)) & np.uint64(1)
        at = np.where(coin == 1, partner, at)
    return at


def _mix_int(value: int) -> int:
    return int(_mix(np.array([value], dtype=np.uint64))[0])


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply splitmix64 (Steele, Lea, Flood 2014): a well-mixed 64-bit word for each; uint64 arithmetic wraps."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed
