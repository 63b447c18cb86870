"""Contender: plain PyTorch, everything in memory, every block's activations recomputed in the backward pass.

What a person would write for mixed precision with bf16 computation: a bf16 model, fp32 master weights next to it, fused
AdamW on the masters; in fp32, AdamW on the model. Settings: ``step_in_backward`` updates each parameter as soon as its
gradient is complete, for models that fit into memory only without all gradients at once (18 bytes per parameter become
14).
"""

from collections.abc import Callable

import torch

from peers import contender


def _updates_after_backward(weights: list[torch.Tensor], task: contender.Task) -> Callable[[], None]:
    """All parameters in one optimizer; returns what to call after the backward pass."""
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=task.lr, weight_decay=0.01, fused=True)

    def update() -> None:
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)

    return update


def _updates_in_fp32(weights: list[torch.Tensor], task: contender.Task) -> Callable[[], None]:
    """Masters are the weights."""
    optimizer = torch.optim.AdamW(weights, lr=task.lr, weight_decay=0.01, fused=True)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def _updates_in_backward(weights: list[torch.Tensor], task: contender.Task) -> Callable[[], None]:
    """An optimizer per parameter, called by autograd; nothing is left to do after the backward pass."""
    masters = {weight: weight.detach().float() for weight in weights}
    optimizers = {
        weight: torch.optim.AdamW([master], lr=task.lr, weight_decay=0.01, fused=True)
        for weight, master in masters.items()
    }

    def update(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        master = masters[weight]
        master.grad, weight.grad = weight.grad.float(), None
        optimizers[weight].step()
        master.grad = None
        with torch.no_grad():
            weight.copy_(master)

    for weight in weights:
        weight.register_post_accumulate_grad_hook(update)
    return lambda: None


def main() -> None:
    task = contender.prepare()
    model = contender.build_model(task.config(), task.compute_dtype)
    weights: list[torch.Tensor] = list(model.parameters())
    prepare = _updates_in_fp32 if task.dtype == "fp32" else _updates_after_backward
    if task.settings.get("step_in_backward"):
        prepare = _updates_in_backward
    update = prepare(weights, task)

    def train_step(tokens: torch.Tensor) -> float:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        update()
        return loss.item()

    contender.serve(task, train_step, {"parameters": sum(weight.numel() for weight in weights)})


if __name__ == "__main__":
    main()
