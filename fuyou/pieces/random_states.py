"""States of the random generators that a pass through a block in pieces draws from."""

import torch


def random_states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the states of the CPU's generator and, on a GPU, of its own."""
    return (torch.get_rng_state(),) + ((torch.cuda.get_rng_state(device),) if device.type == "cuda" else ())


def set_random_states(states: tuple[torch.Tensor, ...], device: torch.device) -> None:
    """Set the generators to what :func:`random_states` returned."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def fresh_random_states(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return states of generators with a seed that is drawn from the CPU's generator: numbers of their own."""
    seed = int(torch.randint(1 << 62, ()))
    fresh: tuple[torch.Tensor, ...] = (torch.Generator().manual_seed(seed).get_state(),)
    if device.type == "cuda":
        fresh += (torch.Generator(device).manual_seed(seed).get_state(),)
    return fresh
