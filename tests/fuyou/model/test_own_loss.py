"""Whether a family's own loss shifts labels is found out from what it computes."""

import pytest
import torch
from torch.nn import functional

from common.errors import UserError
from fuyou.model.family import shifts_labels
from tests.helpers.models.small_models import model_of


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_most_families_compare_with_the_next_label(family: str) -> None:
    assert shifts_labels(model_of(family))


@pytest.mark.parametrize("family", ["bart", "whisper", "trocr"])
def test_barts_kind_compares_with_the_label_at_the_same_place(family: str) -> None:
    assert not shifts_labels(model_of(family))


def test_a_loss_of_another_kind_is_rejected() -> None:
    with pytest.raises(UserError, match=r"ProphetNetForCausalLM is not the mean cross entropy .* gives \d"):
        shifts_labels(model_of("prophetnet"))


def test_terms_next_to_the_cross_entropy_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    plain = model.loss_function

    def with_z_loss(
        logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: object
    ) -> torch.Tensor:
        return plain(logits, labels, vocab_size) + 1e-2 * logits.logsumexp(-1).square().mean()

    monkeypatch.setattr(type(model), "loss_function", property(lambda self: with_z_loss))
    with pytest.raises(UserError, match="cannot be trained here"):
        shifts_labels(model)


def test_labels_that_are_left_out_do_not_count() -> None:
    """The experiment's own arithmetic, once by hand."""
    model = model_of("bart").eval()
    ids = torch.arange(8, 20)[None]
    labels = ids.clone()
    labels[:, :5] = -100
    with torch.no_grad():
        output = model(input_ids=ids, labels=labels, use_cache=False)
    torch.testing.assert_close(output.loss, functional.cross_entropy(output.logits[0, 5:], ids[0, 5:]))
