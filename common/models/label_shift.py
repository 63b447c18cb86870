"""Find by experiment whether a family's own loss shifts labels, so that it can be computed here in several passes."""

import inspect

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from common.errors import UserError

_IGNORED = -100
_ROUNDING = 1e-4  # Part of a loss up to which another counts as equal


def shifts_labels(model: PreTrainedModel) -> bool:
    """Return whether the model's own loss compares each logit with the *next* label, as most causal models do.

    Some decoders (BART's kind) compare it with the label at its own place, and leave it to the data to put the next
    token there.

    Args:
        model: a small model of the family, with values.

    Raises:
        UserError: its loss is not the mean cross entropy, neither with shifted labels nor without.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        return True  # it has no loss
    vocabulary, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(11)
    device = next(model.parameters()).device
    ids = torch.randint(min(5, vocabulary // 2), vocabulary, (2, 13), generator=generator).to(device)
    labels = ids.clone()
    labels[0, :4] = labels[1, 5:7] = _IGNORED
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            try:
                output = model(input_ids=ids, labels=labels, use_cache=False)
            except Exception:  # some families' code for inference does not run where that for training does (xLSTM's)
                output = model.train()(input_ids=ids, labels=labels, use_cache=False)
    finally:
        model.train(was_training)
    if output.loss is None:
        return True
    own = float(output.loss)
    next_label = functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
    found = {shifted: _mean(output.logits, next_label if shifted else labels) for shifted in (True, False)}
    for shifted, value in found.items():
        if abs(own - value) <= _ROUNDING * abs(own):
            return shifted
    raise UserError(
        f"The loss of {type(model).__name__} is not the mean cross entropy of its logits and labels: on a small model "
        f"of this configuration its own code gives {own:.6g}, and the cross entropy is {found[True]:.6g} (with labels "
        f"of the next position) or {found[False]:.6g} (of the same). Training computes nothing else, so this model "
        "cannot be trained here."
    )


def _mean(logits: torch.Tensor, targets: torch.Tensor) -> float:
    rows = logits.float().reshape(-1, logits.shape[-1])
    return float(functional.cross_entropy(rows, targets.reshape(-1), ignore_index=_IGNORED))
