"""A plain loop in memory, as anybody would write it, that the engine has to equal."""

import inspect

import torch
from torch import nn
from transformers import Trainer

VECTOR = 128  # elements: a multiple of every vector width


class Twin:
    """AdamW on a model in memory, by the family's own loss.

    Args:
        model: in the dtype that it computes in.
        masters: fp32 values of what is trained, by name.
        options: ``lr``, ``weight_decay``, ``eps``.
    """

    def __init__(self, model: nn.Module, masters: dict[str, torch.Tensor], options: dict[str, float]):
        self.model, self.masters, self._options = model.train(), masters, options
        self._parameters = {
            name: parameter for name, parameter in model.named_parameters() if name in masters
        }
        self._moments = {name: (_padded(master * 0), _padded(master * 0)) for name, master in masters.items()}
        # By parameter, as AdamW counts: those in which it had a gradient
        self.steps = dict.fromkeys(masters, 0)
        self._decayed = frozenset(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
        self._load()

    def step(self, batch: dict[str, torch.Tensor], micro: int, documents: list[slice] | None) -> float:
        """Take one step.

        Args:
            batch: ``input_ids`` and ``labels``, ``[B, S]``.
            micro: rows that are computed at once.
            documents: of every row; each of them is computed alone.

        Returns:
            The mean loss.
        """
        parts = [
            {
                name: value[start : start + micro, piece].contiguous()
                for name, value in batch.items()
                if name != "position_ids"
            }
            for start in range(0, len(batch["labels"]), micro)
            for piece in documents or [slice(None)]
        ]
        items = sum(_labels(part) for part in parts)
        honours = self._honours_items(parts[0]) if len(parts) > 1 else _takes_items(self.model)
        total, terms = None, dict[str, list[torch.Tensor]]()
        for part in parts:
            if honours:
                loss = self.model(**part, use_cache=False, num_items_in_batch=items).loss
            else:
                loss = self.model(**part, use_cache=False).loss
                if len(parts) > 1:
                    loss = loss * (_labels(part) / items)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    terms.setdefault(name, []).append(parameter.grad)
                    parameter.grad = None
        self._update(terms)
        assert total is not None
        return float(total)

    def _honours_items(self, part: dict[str, torch.Tensor]) -> bool:
        """Whether this family's loss divides by ``num_items_in_batch``: some take the word and do nothing with it."""
        if not _takes_items(self.model):
            return False
        state, count = torch.get_rng_state(), _labels(part)
        losses = []
        for items in (count, 4 * count):
            torch.set_rng_state(state)
            with torch.no_grad():
                losses.append(
                    float(self.model(**part, use_cache=False, num_items_in_batch=torch.tensor(items)).loss)
                )
        torch.set_rng_state(state)
        return losses[1] < 0.5 * losses[0]

    def _update(self, terms: dict[str, list[torch.Tensor]]) -> None:
        self._apply({name: self._sum(name, gradients) for name, gradients in terms.items()})

    def _sum(self, name: str, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Sum in fp32, rounded to the parameter's dtype."""
        total = gradients[0].float()
        for gradient in gradients[1:]:
            total = total + gradient.float()
        return total.to(self._parameters[name].dtype)

    def _apply(self, gradients: dict[str, torch.Tensor], scale: float = 1.0) -> None:
        """Take one AdamW step with ``scale`` times these gradients."""
        for name, gradient in gradients.items():
            self.steps[name] += 1
            master = _padded(self.masters[name])
            decay = self._options["weight_decay"] if name in self._decayed else 0.0
            self._update_one(name, master, _padded(gradient).mul_(scale), decay)
            self.masters[name] = master[: gradient.numel()].view(gradient.shape).clone()
        self._load()

    def _update_one(self, name: str, master: torch.Tensor, gradient: torch.Tensor, decay: float) -> None:
        mean, variance = self._moments[name]
        torch._fused_adamw_(
            [master], [gradient], [mean], [variance], [], [torch.tensor(float(self.steps[name]))],
            amsgrad=False, lr=self._options["lr"], beta1=0.9, beta2=0.999, weight_decay=decay, eps=self._options["eps"],
            maximize=False,
        )  # fmt: skip

    @torch.no_grad()
    def _load(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(
                _rounded(self.masters[name]) if parameter.dtype == torch.bfloat16 else self.masters[name]
            )


def _takes_items(model: nn.Module) -> bool:
    return any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in inspect.signature(model.forward).parameters.values()
    )


def _labels(part: dict[str, torch.Tensor]) -> int:
    return int((part["labels"][:, 1:] != -100).sum())


def _padded(value: torch.Tensor) -> torch.Tensor:
    """fp32 and a whole number of vectors, so that no element is updated by the kernel for tails, which rounds
    otherwise."""
    padded = torch.zeros(-(-value.numel() // VECTOR) * VECTOR)
    padded[: value.numel()] = value.detach().reshape(-1).float()
    return padded


def _rounded(master: torch.Tensor) -> torch.Tensor:
    """bf16, ties away from zero."""
    bits = master.view(torch.int32)
    return ((bits + 0x8000) & -65536).view(torch.float32).to(torch.bfloat16)
