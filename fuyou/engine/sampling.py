"""Choosing the next token of each sequence from its logits."""

import torch

from common.errors import UserError


class Sampler:
    """Chooses tokens: the likeliest ones, or by chance.

    Args:
        temperature: divides logits; 0 takes the likeliest token each time.
        top_p: draws from the fewest tokens that have this probability together (Holtzman et al. 2020,
            arXiv:1904.09751), after the temperature.
        seed: of what is drawn. The same logits, in the same order, give the same tokens.

    Raises:
        UserError: there are no such probabilities.
    """

    def __init__(self, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0):
        if not 0 <= temperature < float("inf"):
            raise UserError(f"temperature must be 0 or a positive number, not {temperature}.")
        if not 0 < top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {top_p}.")
        self._temperature, self._top_p = temperature, top_p
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a token for each row, int64 ``[B]``, for logits fp32 ``[B, V]`` on the CPU."""
        if self._temperature == 0:
            return logits.argmax(-1)
        probabilities = self._nucleus(torch.softmax(logits / self._temperature, -1))
        return torch.multinomial(probabilities, 1, generator=self._generator).squeeze(1)

    def _nucleus(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Return the probabilities with 0 for all tokens outside the nucleus; a row's sum need not be 1."""
        if self._top_p == 1:
            return probabilities
        ascending, order = probabilities.sort(-1)
        outside = ascending.cumsum(-1) <= 1 - self._top_p
        outside[:, -1] = False  # the likeliest is always in it
        return probabilities.masked_fill(outside.scatter(1, order, outside), 0.0)
