"""Every option of a run, said once: its name, its default, and what it means."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig

from common.errors import UserError
from common.models.adapters.options import AdapterOptions
from common.models.vision.towers import TowerFreezing
from common.units import parse_bytes
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record import Precision
from fuyou.model.recompute.policy import ActivationPolicy
from fuyou.optimizer.adam import AdamConfig, check_max_grad_norm
from fuyou.optimizer.clipping import ClipBy, clip_by_named, speculation_obstacle
from fuyou.optimizer.nonfinite import NonFinitePolicy
from fuyou.runtime.ranks.topology import ClusterTopology
from fuyou.schedule.memory_plan import LossInputs
from fuyou.schedule.update_policy import UpdatePolicy

AUTO = "auto"
"""The dtype that asks for a decision by what the device multiplies faster."""
DEFAULT_DTYPE = "bf16"
"""The dtype that stands in the place of :data:`AUTO` until the decision is made."""


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Options of what a run has on the SSDs."""

    ssd: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    """Existing directories, one per drive; a single one may stand alone. The store takes 24 bytes per parameter in
    ``<ssd>/<run_name>`` (12 with ``single_slot``), striped over them."""
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
    """Number of steps from one commit to the next: what lives in host memory is not written in between. A crash loses
    up to so many steps."""
    single_slot: bool = False
    """Whether to take half the space and no protection: a crash in the middle of a step loses the run."""
    io: str = "auto"
    """Way to the SSDs: ``"posix"``, which ``"auto"`` takes: all traffic goes through host memory, which kvikio reaches
    by the same calls; or ``"kvikio"``, which is checked and not used further."""

    def __post_init__(self) -> None:
        for name in ("ssd", "leave_ssd"):  # which are gone through more than once
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str | os.PathLike) else tuple(given))

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


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Options of AdamW, of clipping, and of when updates are done."""

    lr: float = 1e-5
    """Learning rate; ``engine.lr`` may be set before each step."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running mean of gradients and of their squares."""
    eps: float = 1e-8
    """Number that is added to the denominator of an update."""
    weight_decay: float = 0.01
    """Decoupled weight decay. Biases and norms do not decay."""
    optimizer_dtype: str = "fp32"
    """Dtype of the moments: ``"fp32"``, or ``"bf16"`` with stochastic rounding."""
    max_grad_norm: float | None = None
    """Global norm to which gradients are clipped, exactly; None does not clip."""
    clip_by: str = "auto"
    """Way to clip, see :mod:`fuyou.optimizer.clipping`: ``"deferral"`` of all updates into the next forward pass, when
    the norm is known, which costs 4 more bytes of SSD traffic per parameter where gradients find no room in host
    memory; or ``"speculation"``, updates in the backward pass, done again in steps that are clipped, which costs 2, and
    needs two slots, ``commit_every=1`` and a single rank. ``"auto"`` takes the planner's choice, if ``automatic`` lets
    it choose; else deferral. All give the same numbers."""
    deferred_fraction: float = 0.0
    """Fraction of the blocks, interleaved over the stack, that are updated during the next forward pass: the same
    numbers, and a shorter step where computing and the SSDs take about as long. Costs host memory for gradients."""
    on_nonfinite: str = "stop"
    """What becomes of a step whose loss or gradient is NaN or infinite. ``"stop"`` raises NonFiniteLoss; ``"skip"``
    leaves it out, and weights and moments stay as they are, exactly. For that, updates are deferred or speculative
    (``clip_by``) as with ``max_grad_norm``, at the same cost."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Options of how much memory a run takes, and what for."""

    host_memory: int | str | None = None
    """Budget of host memory, in bytes or as ``"64GiB"``; None takes four fifths of what is available. With several
    ranks it is that of the node."""
    device_memory: int | str | None = None
    """Budget of device memory, likewise. On a CPU the device's memory is a part of the host's."""
    host_cache: int | str | None = None
    """Most of ``host_memory`` to spend on keeping parameters, then optimizer states too, from step to step; None spends
    what nothing else needs, 0 streams everything. With several ranks it is that of the node."""
    kept_activations: ActivationPolicy | int | str | None = None
    """Outputs of operators inside the blocks that are saved for the backward pass instead of computed again, on the
    device, the host or the SSDs, wherever there is room: so many bytes (or ``"64MiB"``) of each block and micro-batch,
    those that save the most computing per byte; or a :class:`fuyou.ActivationPolicy`. The same numbers, and a shorter
    step where computing is the bound."""
    piece_size: int | str | None = None
    """Largest piece of a block, in bytes of the compute dtype or as ``"256MiB"``: blocks that are larger are cut, and
    each piece comes to the device by itself. None cuts blocks only where they do not fit on the device, and as little
    as it takes. A run that goes on keeps its pieces."""
    micro_batch: int | None = None
    """Sequences that are computed at once; None takes the largest number that fits."""
    batch_shape: tuple[int, int] | None = None
    """(sequences, tokens per sequence) of the batches to come; without it, buffers are planned for one micro-batch and
    made again if the first batch is larger."""
    token_outputs: int = 0
    """Numbers for each token that :meth:`fuyou.Engine.tokens` is going to be asked for (``outputs``, and what ``head``
    returns), to plan memory for them from the start. Without it, that happens when it is first called."""
    reference: bool = False
    """Whether it is going to be asked for the model's without adapters, too (``reference``), likewise."""
    images: bool = False
    """Whether to plan memory for batches with images from the start. Without it, that happens when the first comes."""


@dataclass(frozen=True, kw_only=True)
class WeightsConfig:
    """Options of which weights are trained, and how the frozen ones are stored."""

    adapters: PeftConfig | AdapterOptions | None = None
    """Adapters that are trained while the weights are frozen: a configuration of ``peft``, or the few settings of
    :class:`common.models.adapters.adapters.AdapterOptions`. Frozen weights take 2 bytes per parameter on SSD (4 in
    fp32) and are only read; adapters and their states are fp32, live in host memory, and are committed."""
    trainable: Sequence[str] | None = None
    """Names of the parameters that are trained (``*`` stands for anything); the others are frozen likewise."""
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
    """Whether the projector behind that tower is frozen, likewise."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that can be said about a run of :class:`fuyou.Engine`, validated.

    >>> config = EngineConfig(store=StoreConfig(ssd=["/mnt/nvme0"]), optimizer=OptimizerConfig(lr=1e-5))
    >>> config == EngineConfig.of(ssd=["/mnt/nvme0"], lr=1e-5)

    Raises:
        UserError: an option has a value that it cannot have.
    """

    store: StoreConfig
    """What the run has on the SSDs."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW, clipping, and when updates are done."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Memory budgets."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """Which weights are trained."""
    device: str | torch.device = AUTO
    """Where blocks compute: ``"auto"``, which is the first GPU, or the CPU where PyTorch can use none; ``"cpu"``, a
    CUDA device (``"cuda:1"``), or an accelerator that is only timed, to measure overlap:
    ``"emulated:tflops=165,memory=24GiB,link=25GB/s"``, see :mod:`fuyou.runtime.devices.emulated`."""
    dtype: str = AUTO
    """``"bf16"`` computes in bf16 with exact fp32 masters; ``"fp32"`` computes in fp32; ``"auto"`` takes what a run
    that is continued began with, else what the device (of several ranks, the first one's) multiplies faster."""
    seed: int = 0
    """Seed of random weights, dropout and stochastic rounding."""
    router_loss: str = AUTO
    """Whether a mixture of experts' load-balancing loss is a part of the loss, as it is in transformers where the
    configuration has ``output_router_logits`` on: ``"auto"`` goes by the configuration, ``"on"`` and ``"off"`` do not.
    Its coefficient is the family's own. It is that of the whole batch of all ranks, however that is split."""
    automatic: bool = False
    """Whether the planner chooses ``deferred_fraction``, ``kept_activations`` and ``clip_by`` where they are not given,
    by simulation of this run on this machine. Needs ``batch_shape`` and a profile of this machine with this model
    (``finetune --profile``); without one nothing is chosen. Costs 0.1 to 3 s at the start, and changes no number. Of
    several ranks the first one chooses for all, by its own profile and the links between them, which are measured (a
    second)."""
    topology: ClusterTopology | None = None
    """The other ranks, if there are any (an ``fcdp.Topology``). Every rank makes an engine, with directories of its own
    and otherwise alike, gives it its own part of every batch, and calls everything that the others call. Every node
    keeps one copy of the parameters, of which each of its M ranks stores 1/M; optimizer states are sharded over all W
    ranks. An error on one rank leaves the others waiting for it: end their processes, as torchrun does."""
    prove: bool = True
    """Whether to show first, on a small model of the same family, that training it out of core gives the losses and
    gradients that it has in memory (:func:`fuyou.prove`: a second or two, once for each family and version). Of several
    ranks the first one does it for all."""
    packed: bool = False
    """Whether batches are going to have several documents in a row, with ``position_ids`` that start again: then
    ``prove`` shows it for such rows, too."""
    max_clipped_share: float = math.inf
    """Share of the steps up to which speculation pays: while more of them are clipped, all updates are deferred. The
    planner sets it; it is no keyword of the engine."""

    @classmethod
    def of(cls, **options: Any) -> "EngineConfig":
        """Build a configuration from options by their names alone, whichever group they belong to.

        Raises:
            TypeError: an option is unknown, or ``ssd`` is missing.
            UserError: an option has a value that it cannot have.
        """
        unknown = [name for name in options if name not in OPTION_NAMES]
        if unknown:
            raise TypeError(f"Engine.__init__() got an unexpected keyword argument {unknown[0]!r}")
        if "ssd" not in options:
            raise TypeError("Engine.__init__() missing 1 required keyword-only argument: 'ssd'")
        groups = {
            name: group(**{key: options.pop(key) for key in _names(group) if key in options})
            for name, group in _GROUPS.items()
        }
        return cls(**groups, **options)

    def with_options(self, **options: Any) -> "EngineConfig":
        """Return this configuration with other values of some options, by their names alone."""
        groups = {}
        for name, group in _GROUPS.items():
            changed = {key: options.pop(key) for key in _names(group) if key in options}
            groups[name] = replace(getattr(self, name), **changed)
        return replace(self, **groups, **options)

    def __post_init__(self) -> None:
        NonFinitePolicy(self.optimizer.on_nonfinite)
        check_max_grad_norm(self.optimizer.max_grad_norm)
        # Whatever has to be parsed is parsed here, in this order, so that mistakes come out before anything is opened.
        _ = self.precision, self.adam, self.clip_by, self.host_cache, self.kept_activations, self.piece_bytes
        _ = self.adapters, self.frozen_dtype
        checks = {
            "micro_batch": (self.memory.micro_batch, self.memory.micro_batch is None or self.memory.micro_batch > 0),
            "piece_size": (self.memory.piece_size, self.piece_bytes is None or self.piece_bytes > 0),
            "token_outputs": (self.memory.token_outputs, self.memory.token_outputs >= self.memory.reference),
            "commit_every": (self.store.commit_every, self.store.commit_every > 0),
            "deferred_fraction": (self.optimizer.deferred_fraction, 0 <= self.optimizer.deferred_fraction <= 1),
            "kept_activations": (
                self.kept_activations,
                isinstance(self.kept_activations, ActivationPolicy) or self.kept_activations >= 0,
            ),
        }
        for name, (value, good) in checks.items():
            if not good:
                raise UserError(f"{name} must be positive, not {value}.")

    def check_clipping(self, ranks: int) -> None:
        """See whether gradients can be clipped as asked for.

        Raises:
            UserError: they cannot.
        """
        obstacle = speculation_obstacle(
            single_slot=self.store.single_slot, commit_every=self.store.commit_every, ranks=ranks
        )
        if self.update_policy.speculative and obstacle is not None:
            raise UserError(f"--clip-by speculation is not possible: {obstacle}. Leave it out, or change that.")

    # -- what the options come to ---------------------------------------------------------------------------------

    @cached_property
    def precision(self) -> Precision:
        """Dtypes of computing and of the moments."""
        return Precision.named(DEFAULT_DTYPE if self.dtype == AUTO else self.dtype, self.optimizer.optimizer_dtype)

    @cached_property
    def adam(self) -> AdamConfig:
        """Hyper-parameters of AdamW."""
        options = self.optimizer
        return AdamConfig(options.lr, options.betas, options.eps, options.weight_decay)

    @property
    def max_grad_norm(self) -> float | None:
        """Norm beyond which a gradient is clipped. Infinite if it is never reached, but must be known before any update
        counts, for a step that is not finite to be skipped."""
        skips = self.optimizer.on_nonfinite == "skip"
        return self.optimizer.max_grad_norm or (math.inf if skips else None)

    @cached_property
    def clip_by(self) -> ClipBy | None:
        """Way to clip that was asked for; None leaves it to the planner, and without one it is deferral."""
        return clip_by_named(self.optimizer.clip_by)

    @cached_property
    def host_cache(self) -> int | None:
        """Most bytes of host memory to spend on keeping parameters and states from step to step."""
        return None if self.memory.host_cache is None else parse_bytes(self.memory.host_cache)

    @property
    def loss_inputs(self) -> LossInputs:
        """What the loss is computed from, as far as that is said from the start."""
        return LossInputs(self.memory.token_outputs, self.memory.reference)

    @cached_property
    def piece_bytes(self) -> int | None:
        """Most bytes of a piece of a block, if that was asked for."""
        return None if self.memory.piece_size is None else parse_bytes(self.memory.piece_size)

    @cached_property
    def kept_activations(self) -> ActivationPolicy | int:
        """Policy of which activations are saved, or the bytes of each block and micro-batch that they may take."""
        asked = self.memory.kept_activations
        return asked if isinstance(asked, ActivationPolicy) else parse_bytes(asked or 0)

    @cached_property
    def adapters(self) -> PeftConfig | None:
        """Configuration of the adapters that are trained, if any are."""
        asked = self.weights.adapters
        return asked.peft_config() if isinstance(asked, AdapterOptions) else asked

    @property
    def trainable(self) -> tuple[str, ...] | None:
        """Names of the parameters that are trained, if not all are."""
        return None if self.weights.trainable is None else tuple(self.weights.trainable)

    @cached_property
    def frozen_dtype(self) -> FrozenDtype | None:
        """Format of frozen matrices; None leaves it to the checkpoint."""
        return FrozenDtype.named(self.weights.frozen_dtype)

    @property
    def towers(self) -> TowerFreezing:
        """What is frozen of a vision-language model's towers."""
        return TowerFreezing(self.weights.freeze_vision_tower, self.weights.freeze_multi_modal_projector)

    @property
    def clips_by(self) -> ClipBy | None:
        """How gradients are clipped, if they are."""
        return None if self.max_grad_norm is None else self.clip_by or ClipBy.DEFERRAL

    @property
    def update_policy(self) -> UpdatePolicy:
        """When updates run: which are deferred, and whether others are done provisionally."""
        return UpdatePolicy(self.clips_by, self.optimizer.deferred_fraction)


def _names(group: type) -> list[str]:
    return [one.name for one in fields(group)]


_GROUPS: dict[str, type] = {
    "store": StoreConfig,
    "optimizer": OptimizerConfig,
    "memory": MemoryConfig,
    "weights": WeightsConfig,
}
OPTION_NAMES = frozenset(
    {name for group in (EngineConfig, *_GROUPS.values()) for name in _names(group)} - {*_GROUPS, "max_clipped_share"}
)
"""Names of all options: what :meth:`EngineConfig.of`, and so the engine, takes as keywords."""
