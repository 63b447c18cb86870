"""Memory that adapters take while a module computes with them, next to that of the module itself.

Factors are upper bounds of what PyTorch's allocator was seen to hand out for one adapted linear layer: bf16 and fp32,
with dropout and without, wide and narrow (tests/common/models/adapters/test_memory.py measures again).
"""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

# Bytes per token for each element that is kept until the backward pass: a fp32 copy of a layer's
# input; with dropout also what that makes of it and its mask, and with DoRA the layer's output.
SAVED = 4
SAVED_MORE = 7
PASSING = 9  # Bytes for each such element in passing, in one layer at a time: products, scaled and added
# Bytes for each element of a weight where the adapter is made as large as the weight (parameters of experts): kept for
# the backward pass, and in passing.
SAVED_WEIGHT = 4
PASSING_WEIGHT = 16
# Bytes for each element of the factors of experts that are computed range by range, for the factors' gradients until
# they reach the adapters' own. Of the weights of a range, the sums with the product of factors are kept for the
# backward pass, in the weights' dtype, and a gradient as large comes in passing.
FACTOR_GRADIENTS = 8
# Bytes for each element of a module that is trained as a whole next to adapters: its copy in the dtype of the others,
# and its gradient three times, as that is summed and widened.
TRAINED_WHOLE = 12
UNIT_MATRIX = 4  # DoRA computes its norm of the adapted weight by way of a unit matrix


@dataclass(frozen=True)
class AdapterMemory:
    """Bytes of device memory that adapters take."""

    fixed: int = 0  # Bytes for any batch
    saved_per_token: int = 0  # Bytes for each token of a micro-batch that are kept until the backward pass
    # Bytes for each token in passing, while one linear layer computes, and no experts do
    passing_per_token: int = 0

    @property
    def per_token(self) -> int:
        return self.saved_per_token + self.passing_per_token

    @staticmethod
    def most(several: Iterable["AdapterMemory"]) -> "AdapterMemory":
        """Return what is enough for each of several modules."""
        return AdapterMemory(*map(max, zip(*map(astuple, (AdapterMemory(), *several)), strict=True)))


NO_ADAPTERS = AdapterMemory()


def adapter_memory(module: nn.Module, share: float | None = None) -> AdapterMemory:
    """Return what the adapters inside ``module`` take when it runs forward and backward.

    Args:
        module: a block, or an adapted module.
        share: fraction of a mixture's experts that are computed at once (:mod:`fuyou.pieces`); None: all of them.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    weights = [_weights(layer, share) for layer in layers]
    saved, passing = zip(*weights, strict=True) if weights else ((), ())
    copies = [part.modules_to_save for part in module.modules() if isinstance(part, ModulesToSaveWrapper)]
    whole = sum(parameter.numel() for copy in copies for parameter in copy.parameters())
    layers = [layer for layer in layers if not _trains_rows(layer)]  # these compute as without
    return AdapterMemory(
        sum(saved) + max(passing, default=0) + TRAINED_WHOLE * whole,
        sum(map(_saved_per_token, layers)),
        PASSING * max(map(_width, layers), default=0),
    )


def _saved_per_token(layer: BaseTunerLayer) -> int:
    """Return the bytes per token that are kept until the backward pass. LoRA's output is a sum, which needs none."""
    if not isinstance(layer, LoraLayer) or isinstance(layer, ParamWrapper):
        return SAVED * _width(layer)
    if any(layer.use_dora.values()):
        return SAVED_MORE * _width(layer)
    drops = any(not isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values())
    passed_on = 0 if isinstance(layer.get_base_layer(), nn.Embedding) else int(layer.out_features or 0)
    return (SAVED_MORE if drops else SAVED) * (_width(layer) - passed_on)


def _width(layer: BaseTunerLayer) -> int:
    """Return the elements per token at both ends of a layer and between its factors; of an embedding, at its output."""
    *_, outputs, inputs = _shape(layer)
    return 2 * _rank(layer) + (
        inputs if isinstance(layer.get_base_layer(), nn.Embedding) else inputs + outputs
    )


def _weights(layer: BaseTunerLayer, share: float | None) -> tuple[int, int]:
    shape = _shape(layer)
    elements = math.prod(shape)
    if isinstance(layer, ParamWrapper) and layer.num_experts > 1 and share is not None:
        sums = math.ceil(share * elements) * layer.get_param().dtype.itemsize
        return sums + FACTOR_GRADIENTS * _rank(layer) * layer.num_experts * sum(shape[1:]), sums
    if _trains_rows(layer):
        return SAVED_WEIGHT * elements, SAVED_WEIGHT * elements  # the weight with new rows, and its gradient
    if isinstance(layer, ParamWrapper):
        return SAVED_WEIGHT * elements, PASSING_WEIGHT * elements
    if isinstance(layer.get_base_layer(), nn.Embedding):
        return 0, 8 * shape[0] * _rank(layer)  # a factor's transpose, and its gradient
    if isinstance(layer, LoraLayer) and any(layer.use_dora.values()):
        return 0, PASSING_WEIGHT * elements + UNIT_MATRIX * max(shape) ** 2
    return 0, 0


def _shape(layer: BaseTunerLayer) -> tuple[int, ...]:
    """Return the adapted weight's shape: ``[outputs, inputs]``, in some families reversed, or with experts first."""
    if isinstance(layer, ParamWrapper):
        return tuple(layer.get_param().shape)
    weight: torch.Tensor = layer.get_base_layer().get_parameter("weight")
    return tuple(weight.shape)


def _trains_rows(layer: object) -> bool:
    return isinstance(layer, TrainableTokensLayer)


def _rank(layer: BaseTunerLayer) -> int:
    return max(getattr(layer, "r", {}).values(), default=0)
