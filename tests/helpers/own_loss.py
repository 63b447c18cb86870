"""Training in memory on a loss that the caller makes of log-probabilities; all logits exist at once."""

import contextlib
from collections.abc import Callable

import torch
from gpu.twin import documents_alone
from torch.nn import functional

from tests.helpers.adapters import InMemory

Loss = Callable[[dict[str, torch.Tensor], torch.Tensor | None], torch.Tensor]
"""Makes a loss of numbers for each token by name, and of the reference's log-probabilities."""


def pairs(count: int, rows: int = 4, tokens: int = 32) -> list[dict[str, torch.Tensor]]:
    """Batches of chosen sequences, then the rejected ones, which begin with the same prompts; padded at their ends."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for _ in range(count):
        ids = torch.randint(3, 211, (rows, tokens), generator=generator)
        ids[rows // 2 :, :6] = ids[: rows // 2, :6]
        labels = ids.clone()
        labels[:, :6] = -100
        lengths = torch.randint(9, tokens + 1, (rows, 1), generator=generator)
        padding = torch.arange(tokens) >= lengths
        result.append({"input_ids": ids.masked_fill(padding, 0), "labels": labels.masked_fill(padding, -100)})
    return result


def dpo(numbers: dict[str, torch.Tensor], reference: torch.Tensor | None) -> torch.Tensor:
    """Rafailov et al. 2023, equation 7, with beta = 0.5."""
    assert reference is not None
    chosen, rejected = (numbers["log_probs"].sum(1) - reference.sum(1)).chunk(2)
    return -functional.logsigmoid(0.5 * (chosen - rejected)).mean()


def numbers_of(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """All that the engine has a name for, ``[B, S]`` each, in the plainest way."""
    log_softmax, targets = logits.float().log_softmax(-1), functional.pad(labels, (0, 1), value=-100)[:, 1:]
    taken = log_softmax.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return {
        "log_probs": taken.masked_fill(targets == -100, 0.0), "entropy": -(log_softmax.exp() * log_softmax).sum(-1),
        "log_sum_sq_probs": logits.float().softmax(-1).square().sum(-1).log(), "is_top1": logits.argmax(-1) == targets,
    }  # fmt: skip


def kto(numbers: dict[str, torch.Tensor], reference: torch.Tensor | None) -> torch.Tensor:
    """Ethayarajh et al. 2024, equation 7, with beta = 0.5: an answer that is wanted, one that is not, and two for the
    distance."""
    assert reference is not None
    wanted, unwanted, *others = 0.5 * (numbers["log_probs"].sum(1) - reference.sum(1))
    distance = torch.stack(others).mean().clamp(min=0).detach()
    return 2 - torch.sigmoid(wanted - distance) - torch.sigmoid(distance - unwanted)


class OwnLossInMemory(InMemory):
    """A model in memory that is trained on such losses, in micro-batches that the loss knows nothing of."""

    def loss_step(
        self, batch: dict[str, torch.Tensor], micro: int, loss: Loss, reference: bool = False
    ) -> float:
        """One step; returns the loss."""
        rows = len(batch["labels"])
        parts = [
            {name: value[start : start + micro] for name, value in batch.items()}
            for start in range(0, rows, micro)
        ]
        with torch.no_grad():
            first = [self._numbers(part) for part in parts]
            theirs = self.reference(batch, micro)["log_probs"] if reference else None
        numbers = {name: torch.cat([one[name] for one in first]) for name in first[0]}
        leaves = {
            name: value.requires_grad_() for name, value in numbers.items() if value.is_floating_point()
        }
        total = loss(numbers, theirs)
        total.backward()
        start = 0
        for part in parts:
            again, stop = self._numbers(part), start + len(part["labels"])
            used = [name for name, leaf in leaves.items() if leaf.grad is not None]
            torch.autograd.backward(
                [again[name] for name in used], [leaves[name].grad[start:stop] for name in used]
            )
            start = stop
        self.update()
        return float(total)

    @torch.no_grad()
    def reference(self, batch: dict[str, torch.Tensor], micro: int) -> dict[str, torch.Tensor]:
        """The numbers of the model without its adapters."""
        self.model.eval()
        rows = len(batch["labels"])
        with self.model.disable_adapter():
            found = [
                self._numbers({name: value[start : start + micro] for name, value in batch.items()})
                for start in range(0, rows, micro)
            ]
        self.model.train()
        return {name: torch.cat([one[name] for one in found]) for name in found[0]}

    def _numbers(self, part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        alone = documents_alone(self.model, part) if "position_ids" in part else contextlib.nullcontext()
        with alone:
            logits = self.model(**{k: v for k, v in part.items() if k != "labels"}, use_cache=False).logits
        return numbers_of(logits, part["labels"])
