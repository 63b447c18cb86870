"""Cross entropy over a large vocabulary, in passes.

A model's logits are its largest tensor by far, and an ordinary loss makes five more of their size on the way to it and
back, in fp32. Here a pass covers few tokens at a time: its intermediate tensors stay in the cache of a CPU, and are
small on a GPU. Rows are independent of each other, and they are summed as one batch, so loss and gradient are those of
the ordinary loss, bit for bit.
"""

import torch
from torch.nn import functional

# Logits per pass. On a CPU a pass should stay in the cache; on a GPU it should take longer than the host's work for it.
_CPU_LOGITS = 1 << 20
_DEVICE_LOGITS = 1 << 23
_DEVICE_PASSES = 8  # Most passes over the tokens that go through the head at once, on a GPU
# Upper bound of the bytes per logit of a pass: fp32 logits, log-softmax, two gradients, and a copy; and of a pass that
# makes what a caller's own loss needs (:mod:`fuyou.model.loss.token_head`): the same of several outputs together.
_PASS_BYTES = 20
_OWN_PASS_BYTES = 48
IGNORED = -100  # Label of positions without a loss


def pass_bytes(tokens: int, vocabulary: int, device_type: str, own_loss: bool = False) -> int:
    """Return the bytes that the loss of this many tokens takes next to logits and their gradient."""
    each = _OWN_PASS_BYTES if own_loss else _PASS_BYTES
    return min(tokens, tokens_per_pass(tokens, vocabulary, device_type)) * vocabulary * each


def shifted_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return what each position is to predict: ``labels`` int64 ``[B, S]`` moved left by one, -100 at the end."""
    return functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()


def targets_of(labels: torch.Tensor, shifts: bool) -> torch.Tensor:
    """Return what each position is to predict, int64 ``[B, S]``, from ``labels`` as a family's own loss takes them.

    Args:
        labels: int64 ``[B, S]``, -100 where no loss is wanted; ``[B]`` of a sequence classifier gives ``[B, 1]``.
        shifts: whether the family compares a position with the label of the next one; if not, with its own.
    """
    if labels.dim() == 1:
        return labels.unsqueeze(1)
    return shifted_labels(labels) if shifts else labels


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, items: torch.Tensor, gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the sum of the cross entropies, divided by ``items``, and its gradient with respect to ``logits``.

    Args:
        logits: ``[B, S, V]``; its graph is not used.
        targets: int64 ``[B, S]``, already shifted; -100 where there is no loss.
        items: scalar: how many targets the whole batch has.
        gradient: whether the gradient is wanted.

    Returns:
        The loss, an fp32 scalar; the gradient ``[B, S, V]`` in the logits' dtype, or None.
    """
    rows = logits.detach().reshape(-1, logits.shape[-1])  # [N, V], N = B S
    labels = targets.reshape(-1)
    losses = torch.empty(rows.shape[0], dtype=torch.float32, device=rows.device)
    result = torch.empty_like(rows) if gradient else None
    # The gradient that flows back into the sum of an ordinary loss: that of (sum / items), which is 1 / items.
    share = torch.ones((), device=rows.device) / items
    step = tokens_per_pass(rows.shape[0], rows.shape[1], rows.device.type)
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        with torch.set_grad_enabled(gradient):
            values = rows[part].requires_grad_(gradient)
            loss = functional.cross_entropy(
                values.float(), labels[part], ignore_index=IGNORED, reduction="none"
            )
        losses[part] = loss.detach()
        if result is not None:
            (result[part],) = torch.autograd.grad(loss, values, share.expand_as(loss))
    # Summed as one batch, in the order of the ordinary loss: each token has a single "class", whose loss is known.
    first = torch.where(labels == IGNORED, IGNORED, 0)
    total = functional.nll_loss(-losses[:, None], first, ignore_index=IGNORED, reduction="sum")
    return total / items, None if result is None else result.view_as(logits)


def tokens_per_pass(tokens: int, vocabulary: int, device_type: str) -> int:
    """Return the number of tokens whose loss is computed at once, of ``tokens`` whose logits are there."""
    if device_type == "cpu":
        return max(1, _CPU_LOGITS // vocabulary)
    return max(1, _DEVICE_LOGITS // vocabulary, -(-tokens // _DEVICE_PASSES))
