"""The next token is drawn as transformers draws it."""

import pytest
import torch
from transformers import TopPLogitsWarper

from common.errors import UserError
from fuyou.engine.sampling import Sampler


def test_nucleus_is_that_of_transformers() -> None:
    logits = 2 * torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    for top_p in (0.05, 0.5, 0.9, 1.0):
        warped = logits / 0.7 if top_p == 1 else TopPLogitsWarper(top_p)(torch.empty(5, 0), logits / 0.7)
        expected = torch.multinomial(warped.softmax(-1), 1, generator=torch.Generator().manual_seed(3)).squeeze(1)
        assert torch.equal(Sampler(0.7, top_p, seed=3).choose(logits), expected)
        drawn = torch.stack([Sampler(0.7, top_p, seed).choose(logits) for seed in range(60)])
        assert not warped.gather(1, drawn.T).isinf().any()
    assert torch.equal(Sampler(temperature=0).choose(logits), logits.argmax(-1))
    assert len(drawn.unique()) > 5


@pytest.mark.parametrize(
    ("options", "message"), [({"temperature": float("nan")}, "temperature"), ({"top_p": 1.5}, "top_p")]
)
def test_no_such_probabilities(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=f"{message} must be"):
        Sampler(**options)
