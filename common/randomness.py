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


def random_states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the states of the CPU's generator and, on a GPU, the GPU's."""
    return (torch.get_rng_state(),) + ((torch.cuda.get_rng_state(device),) if device.type == "cuda" else ())


def set_random_states(states: tuple[torch.Tensor, ...], device: torch.device) -> None:
    """Set the generators to what :func:`random_states` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def fresh_random_states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return states of generators with a seed that is drawn from the CPU's generator."""
    seed = int(torch.randint(1 << 62, ()))
    fresh: tuple[torch.Tensor, ...] = (torch.Generator().manual_seed(seed).get_state(),)
    if device.type == "cuda":
        fresh += (torch.Generator(device).manual_seed(seed).get_state(),)
    return fresh
