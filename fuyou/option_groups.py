"""Options of the engine, each declared once; those with ``option()`` are options of ``finetune``, too.

The first paragraph of a docstring is the help of the command. Imports nothing slow, as the command reads this for its
help: types that take long to import are quoted.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from common.options import ABOVE_ZERO, BUDGET, DAYS, NOT_NEGATIVE, POSITIVE, SIZE, Command, option

if TYPE_CHECKING:
    import torch
    from peft import PeftConfig

    from common.models.adapters.options import AdapterOptions
    from fuyou.model.recompute.policy import ActivationPolicy
    from fuyou.runtime.device import Device
    from fuyou.runtime.ranks import ClusterTopology

AUTO = "auto"
"""The dtype that asks for a decision by what the device multiplies faster."""


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Options of what a run has on the SSDs."""

    ssd: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    """Existing directories, one per drive; a single one may stand alone. The store takes 24 bytes per parameter in
    ``<ssd>/<run_name>`` (fewer with other optimizers), striped over them."""
    run_name: str = "fuyou-run"
    """Name of the run's folder in each directory of ``ssd``. (Not that of a package: Python would find a folder
    ``fuyou`` in the working directory in its place.)"""
    resume: bool = False
    """Whether to continue the run that the directories hold."""
    overwrite: bool = False
    """Whether to replace the run that the directories hold."""
    leave_ssd: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
    """Directories of drives that a resumed run may be on and is to leave. A run that is on other drives than ``ssd``
    moves there first, crash-safely: it is copied, and the copy is read again."""
    commit_every: int = 1
    """Steps between commits: memory is not written in between, and a crash loses up to this many steps."""
    drive_life: float | None = option(None, "DAYS|any", DAYS, may_differ=True, heading="Memory")
    """Days that the drives' warranted writes must last; any: the fastest step. Default: the step that writes least
    within 10% of the fastest.

    For the planner (``automatic``); 0 for any."""
    io: str = option("posix", type=("posix", "kvikio"), heading="Memory")
    """How parameters get from the SSDs to a GPU: through host memory (posix), or directly (kvikio).

    Those that are cached in host memory come from there."""

    def __post_init__(self) -> None:
        for name in ("ssd", "leave_ssd"):  # which are gone through more than once
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str | os.PathLike) else tuple(given))

    @property
    def direct_reads(self) -> bool:
        """Whether parameters are read to the device past host memory."""
        return self.io == "kvikio"

    @property
    def drives(self) -> list[Path]:
        """The directories of :attr:`ssd`."""
        assert isinstance(self.ssd, tuple)
        return [Path(path) for path in self.ssd]

    @property
    def drives_to_leave(self) -> list[Path]:
        """The directories of :attr:`leave_ssd`."""
        assert isinstance(self.leave_ssd, tuple)
        return [Path(path) for path in self.leave_ssd]

    @property
    def folders(self) -> list[Path]:
        """The run's folder on each drive."""
        return [path / self.run_name for path in self.drives]

    @property
    def folders_to_leave(self) -> list[Path]:
        """The run's folder on each drive that it is to leave."""
        return [path / self.run_name for path in self.drives_to_leave]

    @property
    def everywhere(self) -> list[Path]:
        """All folders in which a resumed run, or that of other ranks, may be."""
        return (
            [*self.folders, *self.folders_to_leave, *self.drives, *self.drives_to_leave]
            if self.resume
            else []
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Options of the optimizer, of clipping, and of when updates are done."""

    lr: float = 1e-5
    """Learning rate; ``engine.lr`` may be set before each step."""
    # As in fuyou.layout.record_parts, which takes long to import.
    optimizer: str = option("adamw", type=("adamw", "adamw8bit"), commands=Command.MODEL, heading="Memory")
    """adamw8bit stores moments in 8 bits and master weights in 24, which more than halves the bytes of a
    step."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running mean of gradients and of their squares."""
    eps: float = option(1e-8, "X", ABOVE_ZERO, heading="Training")
    """Added to Adam's divisor."""
    weight_decay: float = option(0.01, "X", NOT_NEGATIVE, heading="Training")
    """Decoupled weight decay; as with transformers' Trainer, biases and norms do not decay."""
    max_grad_norm: float | None = None
    """Global norm to which gradients are clipped, exactly; None does not clip."""
    # Names of fuyou.optimizer.clipping.ClipBy, which takes long to import.
    clip_by: str = option(
        "auto", type=("auto", "deferral", "speculation"), needs="max_grad_norm", heading="Training"
    )
    """With ``max_grad_norm``: update in the next step, when the norm is known (deferral), or at once, and again after
    clipped steps (speculation). The numbers are the same.

    Deferral costs 4 more bytes of SSD traffic per parameter where gradients find no room in host memory; speculation
    costs 2 and needs ``commit_every=1`` and one rank. ``"auto"`` lets the planner choose (with ``automatic``), or is
    deferral. See :mod:`fuyou.optimizer.clipping`."""
    deferred_fraction: float = 0.0
    """Fraction of the blocks, interleaved over the stack, that are updated during the next forward pass: the same
    numbers, and a shorter step where computing and the SSDs take about as long. Costs host memory for gradients."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Options of how much memory a run takes, and what for."""

    host_memory: int | str | None = option(None, "SIZE", BUDGET, commands=Command.SHAPE, heading="Memory")
    """Host memory to use: 64GiB. Default: what is free; 48GiB in a plan of other hardware.

    In bytes or as text; None takes four fifths of what is available. With several ranks it is that of the node."""
    device_memory: int | str | None = option(None, "SIZE", BUDGET, commands=Command.SHAPE, heading="Memory")
    """Device memory to use: 24GiB. Default: what is free.

    On a CPU the device's memory is a part of the host's."""
    host_cache: int | str | None = option(None, "SIZE", SIZE, commands=Command.SHAPE, heading="Memory")
    """Host memory (per node) that caches parameters and states between steps; 0: none. Default: the rest.

    Parameters first, then optimizer states, too."""
    saved_activations: "ActivationPolicy | int | str | None" = None
    """Outputs of operators inside the blocks that are saved for the backward pass instead of computed again, on the
    device, the host or the SSDs, wherever there is room: this many bytes (or ``"64MiB"``) of a block and micro-batch,
    those that save the most computing per byte; or a :class:`fuyou.ActivationPolicy`. The same numbers, and a shorter
    step where computing is the bound."""
    piece_size: int | str | None = option(None, "SIZE", SIZE, commands=Command.STEP, heading="Memory")
    """Largest part of a block that is on the device at once: 256MiB. Default: whole blocks where they fit.

    In bytes of the compute dtype: blocks that are larger are cut, and each piece comes to the device alone. None cuts
    as little as it takes. A run that continues keeps its pieces."""
    micro_batch: int | None = option(None, "N", POSITIVE, commands=Command.SHAPE, heading="Memory")
    """Sequences computed at once. Default: as many as fit."""
    chunk: int | None = option(None, "N", POSITIVE, commands=Command.STEP, heading="Memory")
    """Tokens of a row computed at once. Default: whole rows where they fit, else as many tokens as fit.

    The keys and values of earlier tokens are at hand. Then nothing else is saved (``saved_activations``)."""
    batch_shape: tuple[int, int] | None = None
    """(sequences, tokens per sequence) of the batches to come; without it, buffers are planned for one micro-batch and
    made again if the first batch is larger."""
    token_outputs: int = 0
    """Numbers for each token that :meth:`fuyou.Engine.tokens` will return (``outputs``, and what ``head``
    returns), to plan memory for them from the start. Without it, that happens when it is first called."""
    reference: bool = False
    """Whether it will also return the model's without adapters (``reference``)."""
    images: bool = False
    """Whether to plan memory for batches with images from the start. Without it, that happens when the first comes."""
    padded: bool = False
    """Whether to plan memory for batches whose ``attention_mask`` hides tokens, also: attention is given a byte for
    each pair of tokens of a row then, which stays on the device during the step."""


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Options of which weights are trained, and how the frozen ones are stored."""

    adapters: "PeftConfig | AdapterOptions | str | os.PathLike[str] | None" = None
    """Adapters that are trained while the weights are frozen: a configuration of ``peft``; the few settings of
    :class:`common.models.adapters.options.AdapterOptions`; or the directory of adapters that ``peft`` or an engine has
    saved, whose configuration is taken and whose values are trained further. Frozen weights take 2 bytes per
    parameter on SSD (4 in fp32) and are only read; adapters and their states are fp32, live in host memory, and are
    committed."""
    trainable: Sequence[str] | None = None
    """Names of the parameters that are trained (``*`` stands for anything); the others are frozen also."""
    frozen_dtype: str | None = option(
        None,
        type=("checkpoint", "int8", "nf4", "plain"),
        commands=Command.MODEL,
        heading="Adapters",
        needs="lora_rank peft_config adapter",
    )
    """Store the frozen weights in fewer bits: rounded once (int8, nf4), or in the bytes of a compressed checkpoint.
    They compute in ``dtype``. Default: checkpoint if it is compressed, else plain, as ``dtype``.

    Of matrices in the blocks. ``"int8"`` or ``"nf4"`` keeps them in 1.016 or 0.5625 bytes per parameter on SSD, on
    their way and in the host's cache. ``"checkpoint"`` (FP8, MXFP4, compressed-tensors, bitsandbytes, GGUF) is
    lossless."""
    freeze_vision_tower: bool = True
    """Whether a vision-language model's tower is frozen, where neither ``trainable`` nor ``adapters`` say it. What is
    frozen of it stays on the device for the whole run."""
    freeze_multi_modal_projector: bool = True
    """Whether the projector behind that tower is frozen, too."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options of where and how a run computes."""

    device: "str | torch.device | Device" = AUTO
    """Where blocks compute: ``"auto"``, which is the first GPU, or the CPU where PyTorch can use none; ``"cpu"``; a
    CUDA device (``"cuda:1"``); or an object that does what :class:`fuyou.runtime.device.Device` says."""
    dtype: str = option(AUTO, type=(AUTO, "bf16", "fp32"), commands=Command.SOURCE, heading="Memory")
    """What blocks compute in; auto: the faster on the device. Master weights are fp32, or 24 bits with adamw8bit.

    A run that is continued computes in what it began with; of several ranks, the first one's device decides."""
    seed: int = 0
    """Seed of random weights and dropout."""
    deterministic: bool = option(False, heading="Training")
    """Use only kernels that give the same numbers each time: slower attention on GPUs. CPUs always do.

    Of this process, while the run is open."""
    router_loss: str = option(AUTO, type=(AUTO, "on", "off"), commands=Command.STEP, heading="Training")
    """Add a mixture of experts' load-balancing loss, times the model's own coefficient. auto: if its configuration
    sets output_router_logits.

    It is that of the whole batch of all ranks, however that is split."""
    automatic: bool = False
    """Whether the planner chooses ``deferred_fraction``, ``saved_activations``, and ``clip_by`` where they are not
    given, by simulation of this run on this machine. Needs ``batch_shape`` and a profile of this machine with this
    model (``finetune profile``); without one nothing is chosen. Costs 0.1 to 3 s at the start, and changes no
    number. Of several ranks the first one chooses for all, by its own profile and the links between them, which are
    measured (a second)."""
    topology: "ClusterTopology | None" = None
    """The other ranks, if there are any (an ``fcdp.Topology``). Every rank makes an engine, with its own directories
    and otherwise alike, gives it its own part of every batch, and calls everything that the others call. Every node
    keeps one copy of the parameters, of which each of its M ranks stores 1/M; optimizer states are sharded over all W
    ranks. An error on one rank leaves the others waiting for it: end their processes, as torchrun does."""
    prove: bool = True
    """Whether to show first, on a small model of the same family, that training it out of core gives the losses and
    gradients that it has in memory (:func:`fuyou.prove`: a second or two, once for each family and version). Of several
    ranks the first one does it for all."""
    packed: bool = False
    """Whether rows are going to hold several documents (``position_ids`` start again): ``prove`` then shows it, too."""


GROUPS = {
    "store": StoreConfig,
    "optimizer": OptimizerConfig,
    "memory": MemoryConfig,
    "weights": WeightsConfig,
}
"""Groups by their names in :class:`fuyou.config.EngineConfig`, which has the options of :class:`RunConfig` itself."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions(RunConfig, WeightsConfig, MemoryConfig, OptimizerConfig, StoreConfig):
    """The keywords of :class:`fuyou.Engine`: the options of all groups, by their names alone."""


OPTION_NAMES = frozenset(field.name for field in fields(EngineOptions))
"""Names of all options: what :meth:`fuyou.config.EngineConfig.of`, and so the engine, takes as keywords."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


def typed_as(
    options: Callable[_P, object],
) -> Callable[[Callable[..., _R]], Callable[Concatenate[Any, _P], _R]]:
    """Let type checkers read the arguments of a method from a dataclass: they see a misspelled option.

    Args:
        options: the dataclass whose fields are the arguments.
    """
    return lambda method: method
