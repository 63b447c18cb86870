"""Training loops of others: FSDP2's ``fully_shard`` replaced by ours wherever it is looked up.

accelerate, transformers' ``Trainer``, TRL's trainers and torchtitan shard a model with the function that they import
from PyTorch. One line before that makes them train by a strategy::

    fcdp.replace_fsdp2()
    trainer = SFTTrainer(...)
    trainer.train()

or, for a part of a program, ``with fcdp.replace_fsdp2(): model = accelerator.prepare(model)``."""

import functools
import importlib
import sys
from types import ModuleType, TracebackType
from typing import Any

from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from fcdp.shard import check_strategy, fully_shard
from fcdp.strategy.strategy import Strategy

# Others import the function from these. The rest of PyTorch keeps its function.
_WAYS_IN = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")


class Replacement:
    """What :func:`replace_fsdp2` has replaced, until :meth:`undo` or the end of a ``with`` block."""

    def __init__(self, ours: Any):
        self._places = [(module, name) for module in _modules() for name in _names(module)]
        for module, name in self._places:
            setattr(module, name, ours)

    def undo(self) -> None:
        """Put PyTorch's function back where it was. What has been sharded meanwhile stays as it is."""
        for module, name in self._places:
            setattr(module, name, fsdp2_fully_shard)
        self._places.clear()

    def __enter__(self) -> "Replacement":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def replace_fsdp2(strategy: Strategy | str = "fcdp") -> Replacement:
    """Have everyone who shards with FSDP2 from now on get :func:`fcdp.fully_shard` instead.

    It is replaced in PyTorch and in all modules that have imported it. Models are FSDP2 models, and communicate by
    ``strategy``, one that :func:`fcdp.install` takes, from their first forward pass on."""
    check_strategy(strategy)
    ours: Any = functools.partial(fully_shard, strategy=strategy)
    functools.update_wrapper(ours, fully_shard)
    return Replacement(ours)


def _modules() -> list[ModuleType]:
    """Return the modules in which the function may be replaced: all but PyTorch's own and ours, which call it."""
    ways_in = [importlib.import_module(name) for name in _WAYS_IN]
    others = [
        module
        for name, module in sorted(sys.modules.items())
        if isinstance(module, ModuleType) and name.split(".")[0] not in ("torch", "fcdp")
    ]
    return ways_in + others


def _names(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if value is fsdp2_fully_shard]
