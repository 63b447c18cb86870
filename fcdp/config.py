"""The options of :class:`fcdp.trainer.Trainer`."""

from dataclasses import dataclass

from common.models.vision import DEFAULT_FREEZING, TowerFreezing
from fcdp.strategy.strategy import Strategy
from fuyou.optimizer.adam import AdamConfig, check_max_grad_norm


@dataclass(frozen=True)
class TrainerConfig:
    """Options of :class:`fcdp.trainer.Trainer`."""

    strategy: Strategy | str = "fcdp"  # a strategy or its name; see :func:`fcdp.fully_shard`
    dtype: str = "bf16"  # dtype in which blocks compute and gradients are reduced. Master weights and moments are fp32.
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01  # as with transformers' Trainer: biases and norms do not decay
    max_grad_norm: float | None = None  # norm to which the gradient is clipped; None: it is not
    micro_batch: int | None = None  # sequences that a rank computes at once; None: its whole part of the batch
    seed: int = 0  # seed of random weights and dropout
    host_cache_bytes: int | None = None  # host memory per rank for cached shards; see :func:`fcdp.fully_shard`
    device_cache_threshold: float = 0.9  # part of device memory for cached shards; see :func:`fcdp.fully_shard`
    on_nonfinite: str = "stop"  # ``stop`` or ``skip`` a step whose loss is not finite
    towers: TowerFreezing = DEFAULT_FREEZING  # parts of a vision-language model that are not trained
    # ``auto`` (as the configuration has it), ``on``, or ``off``: the loss of a mixture of experts' router
    router_loss: str = "auto"

    def __post_init__(self) -> None:
        AdamConfig(betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)  # which checks them
        check_max_grad_norm(self.max_grad_norm)
