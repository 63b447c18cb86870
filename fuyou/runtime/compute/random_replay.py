"""Random numbers drawn a second time: dropout in a recomputed block must repeat itself."""

import torch


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of the generator that computation on ``device`` draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class RandomReplay:
    """Draws the same random numbers again inside a ``with`` block, and leaves the caller's generator as it was.

    Args:
        state: that the generator had when they were drawn the first time.
        device: whose generator it is.
    """

    def __init__(self, state: torch.Tensor, device: torch.device):
        self._state, self._device = state, device

    def __enter__(self) -> "RandomReplay":
        self._outer = random_state(self._device)
        self.rewind()
        return self

    def rewind(self) -> None:
        """Begin again."""
        _set_random_state(self._state, self._device)

    def __exit__(self, *_: object) -> None:
        _set_random_state(self._outer, self._device)
