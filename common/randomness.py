"""Random numbers of this process: PyTorch's global generators belong to the run that is open, whose dropout draws them.

``torch.manual_seed`` seeds CUDA's generators too, which ``fork_rng(devices=[])`` does not restore: so no other module
of this project calls either.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_run(seed: int) -> None:
    """Seed all of PyTorch's generators, for a run that begins."""
    torch.manual_seed(seed)


@contextmanager
def own_random_numbers(seed: int | None = None) -> Iterator[None]:
    """Draw from PyTorch's CPU generator, seeded if there is a ``seed``, and leave it as it was. No other is touched."""
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield
