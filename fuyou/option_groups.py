"""Groups of an engine's options: what is on the SSDs, the optimizer, memory, and which weights are trained."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peft import PeftConfig

from common.models.adapters.options import AdapterOptions
from fuyou.layout.optimizer_state import ADAMW
from fuyou.model.recompute.policy import ActivationPolicy


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Options of what a run has on the SSDs."""

    ssd: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    """Existing directories, one per drive; a single one may stand alone. The store takes 24 bytes per parameter in
    ``<ssd>/<run_name>`` (12 with ``single_slot``; with other optimizers fewer), striped over them."""
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
    """Steps from one commit to the next: memory is not written in between, and a crash loses up to this many steps."""
    drive_life: float | None = None
    """Days that the drives' warranted writes must last, for the planner (``automatic``); 0 for the fastest schedule.
    None writes least among schedules within 10% of the fastest."""
    single_slot: bool = False
    """Whether to take half the space and no protection: a crash in the middle of a step loses the run."""
    io: str = "posix"
    """How parameters get from the SSDs to a GPU: ``"posix"``, through host memory; ``"kvikio"``, past it, except those
    that are cached there."""

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
        return [*self.folders, *self.folders_to_leave, *self.drives, *self.drives_to_leave] if self.resume else []


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Options of the optimizer, of clipping, and of when updates are done."""

    lr: float = 1e-5
    """Learning rate; ``engine.lr`` may be set before each step."""
    optimizer: str = ADAMW
    """``"adamw"``, ``"adamw8bit"`` (moments in 8 bits by blocks) or ``"lion"`` (one moment)."""
    betas: tuple[float, float] | None = None
    """Decay of the running mean of gradients and of their squares; None: (0.9, 0.999), of Lion (0.9, 0.99)."""
    eps: float = 1e-8
    """Number that is added to the denominator of an update."""
    weight_decay: float = 0.01
    """Decoupled weight decay; as with transformers' Trainer, biases and norms do not decay."""
    optimizer_dtype: str = "fp32"
    """Dtype of moments that are not in 8 bits: ``"fp32"``, or ``"bf16"`` with stochastic rounding."""
    max_grad_norm: float | None = None
    """Global norm to which gradients are clipped, exactly; None does not clip."""
    clip_by: str = "auto"
    """Way to clip, see :mod:`fuyou.optimizer.clipping`: ``"deferral"`` of all updates into the next forward pass, when
    the norm is known, which costs 4 more bytes of SSD traffic per parameter where gradients find no room in host
    memory; or ``"speculation"``, updates in the backward pass, done again in clipped steps, which costs 2 and needs two
    slots, ``commit_every=1`` and one rank. ``"auto"`` lets the planner choose (with ``automatic``), or is deferral."""
    deferred_fraction: float = 0.0
    """Fraction of the blocks, interleaved over the stack, that are updated during the next forward pass: the same
    numbers, and a shorter step where computing and the SSDs take about as long. Costs host memory for gradients."""
    on_nonfinite: str = "stop"
    """What becomes of a step whose loss or gradient is NaN or infinite: ``"stop"`` raises NonFiniteLoss; ``"skip"``
    leaves weights and moments exactly as they are, for which updates wait as with ``max_grad_norm``."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Options of how much memory a run takes, and what for."""

    host_memory: int | str | None = None
    """Budget of host memory, in bytes or as ``"64GiB"``; None takes four fifths of what is available. With several
    ranks it is that of the node."""
    device_memory: int | str | None = None
    """Budget of device memory, also. On a CPU the device's memory is a part of the host's."""
    host_cache: int | str | None = None
    """Most of ``host_memory`` to spend on keeping parameters, then optimizer states too, from step to step; None spends
    what nothing else needs, 0 streams everything. With several ranks it is that of the node."""
    kept_activations: ActivationPolicy | int | str | None = None
    """Outputs of operators inside the blocks that are saved for the backward pass instead of computed again, on the
    device, the host or the SSDs, wherever there is room: this many bytes (or ``"64MiB"``) of a block and micro-batch,
    those that save the most computing per byte; or a :class:`fuyou.ActivationPolicy`. The same numbers, and a shorter
    step where computing is the bound."""
    piece_size: int | str | None = None
    """Largest piece of a block, in bytes of the compute dtype or as ``"256MiB"``: blocks that are larger are cut, and
    each piece comes to the device alone. None cuts blocks only where they do not fit on the device, and as little
    as it takes. A run that continues keeps its pieces."""
    micro_batch: int | None = None
    """Sequences that are computed at once; None takes the largest number that fits."""
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

    adapters: PeftConfig | AdapterOptions | str | os.PathLike[str] | None = None
    """Adapters that are trained while the weights are frozen: a configuration of ``peft``; the few settings of
    :class:`common.models.adapters.options.AdapterOptions`; or the directory of adapters that ``peft`` or an engine has
    saved, whose configuration is taken and whose values are trained further. Frozen weights take 2 bytes per
    parameter on SSD (4 in fp32) and are only read; adapters and their states are fp32, live in host memory, and are
    committed."""
    trainable: Sequence[str] | None = None
    """Names of the parameters that are trained (``*`` stands for anything); the others are frozen also."""
    frozen_dtype: str | None = None
    """Format of frozen matrices in the blocks. ``"int8"`` or ``"nf4"`` keeps them in 1.016 or 0.5625 bytes per
    parameter on SSD, on their way and in the host's cache; the device brings them back into ``dtype``. Not lossless:
    every weight is rounded once, when the store is made. ``"checkpoint"`` keeps them in the bytes of a compressed
    checkpoint (FP8, MXFP4, compressed-tensors), which is lossless, and ``"plain"`` in ``dtype``. None takes
    ``"checkpoint"`` where the checkpoint is compressed, else ``"plain"``."""
    freeze_vision_tower: bool = True
    """Whether a vision-language model's tower is frozen, where neither ``trainable`` nor ``adapters`` say it. What is
    frozen of it stays on the device for the whole run."""
    freeze_multi_modal_projector: bool = True
    """Whether the projector behind that tower is frozen, too."""
