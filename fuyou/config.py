"""Every option of a run, validated, and what the options come to."""

import os
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from peft import PeftConfig

from common.docstrings import attribute_docstrings
from common.errors import UserError, did_you_mean
from common.hardware.directory_drive import UNKNOWN_ENDURANCE, warranted_bytes
from common.models.adapters.options import AdapterOptions, SavedAdapter
from common.models.vision import TowerFreezing
from common.units import parse_bytes
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.record import Precision
from fuyou.model.recompute.policy import ActivationPolicy
from fuyou.optimizer.adam import AdamConfig, check_max_grad_norm
from fuyou.optimizer.clipping import ClipBy, UpdatePolicy, clip_by_named, speculation_obstacle
from fuyou.option_groups import (
    AUTO,
    GROUPS,
    OPTION_NAMES,
    EngineOptions,
    MemoryConfig,
    OptimizerConfig,
    RunConfig,
    StoreConfig,
    WeightsConfig,
    typed_as,
)
from fuyou.schedule.batch import LossInputs

DEFAULT_DTYPE = "bf16"
"""The dtype that replaces :data:`AUTO` until the decision is made."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(RunConfig):
    """Everything that can be said about a run of :class:`fuyou.Engine`, validated.

    >>> config = EngineConfig(store=StoreConfig(ssd=["/mnt/nvme0"]), optimizer=OptimizerConfig(lr=1e-5))
    >>> config == EngineConfig.of(ssd=["/mnt/nvme0"], lr=1e-5)

    Raises:
        UserError: an option has a value that it cannot have.
    """

    store: StoreConfig
    """What the run has on the SSDs."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer, clipping, and when updates are done."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Memory budgets."""
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    """Which weights are trained."""

    @classmethod
    @typed_as(EngineOptions)
    def of(cls, **options: Any) -> "EngineConfig":
        """Build a configuration from options by their names alone, whichever group they belong to.

        Raises:
            TypeError: an option is unknown, or ``ssd`` is missing.
            UserError: an option has a value that it cannot have.
        """
        unknown = next((name for name in options if name not in OPTION_NAMES), None)
        if unknown is not None:
            hint = did_you_mean(unknown, OPTION_NAMES)
            raise TypeError(f"Engine.__init__() got an unexpected keyword argument {unknown!r}.{hint}")
        if "ssd" not in options:
            raise TypeError("Engine.__init__() missing 1 required keyword-only argument: 'ssd'")
        groups: dict[str, Any] = {
            name: group(
                **{item.name: options.pop(item.name) for item in fields(group) if item.name in options}
            )
            for name, group in GROUPS.items()
        }
        return cls(**groups, **options)

    def with_options(self, **options: Any) -> "EngineConfig":
        """Return this configuration with other values of some options, by their names alone."""
        groups = {}
        for name, group in GROUPS.items():
            changed = {item.name: options.pop(item.name) for item in fields(group) if item.name in options}
            groups[name] = replace(getattr(self, name), **changed)
        return replace(self, **groups, **options)

    def __post_init__(self) -> None:
        self._check_types()
        check_max_grad_norm(self.optimizer.max_grad_norm)
        # Everything that has to be parsed is parsed here, so that mistakes come out before anything is opened.
        _ = (
            self.precision,
            self.adam,
            self.clip_by,
            self.host_cache,
            self.piece_bytes,
            self.adapters,
            self.frozen_dtype,
        )
        policy = self.saved_activations
        checks = {
            "micro_batch": (
                self.memory.micro_batch,
                self.memory.micro_batch is None or self.memory.micro_batch > 0,
            ),
            "chunk": (self.memory.chunk, self.memory.chunk is None or self.memory.chunk > 0),
            "piece_size": (self.memory.piece_size, self.piece_bytes is None or self.piece_bytes > 0),
            "token_outputs": (self.memory.token_outputs, self.memory.token_outputs >= self.memory.reference),
            "commit_every": (self.store.commit_every, self.store.commit_every > 0),
            "drive_life": (self.store.drive_life, (self.store.drive_life or 0) >= 0),
            "deferred_fraction": (
                self.optimizer.deferred_fraction,
                0 <= self.optimizer.deferred_fraction <= 1,
            ),
            "saved_activations": (policy, isinstance(policy, ActivationPolicy) or policy >= 0),
        }
        for name, (value, good) in checks.items():
            if not good:
                raise UserError(f"{name} must be positive, not {value}.")
        if self.store.drive_life is not None and not self.automatic:
            raise UserError(
                "drive_life is a limit for the planner: open the engine with automatic=True, or leave it out."
            )
        if self.store.drive_life and warranted_bytes(self.store.drives) is None:
            raise UserError(UNKNOWN_ENDURANCE.format(drives=", ".join(map(str, self.store.drives))))

    def _check_types(self) -> None:
        """Refuse values of types that would go unnoticed until the run is half open."""
        adapters = self.weights.adapters
        shape = self.memory.batch_shape
        name = self.store.run_name
        for group in (self, *(getattr(self, name) for name in GROUPS)):
            for item in fields(group):
                value = getattr(group, item.name)
                if item.type in (int, float, bool) and isinstance(value, str):
                    raise UserError(
                        f"{item.name} is a number, not text: {item.name}={value}, without quotation marks."
                    )
        if isinstance(self.weights.trainable, str):
            raise UserError(f"trainable takes a list of names: trainable=[{self.weights.trainable!r}].")
        if adapters is not None and not isinstance(adapters, PeftConfig | AdapterOptions | str | os.PathLike):
            raise UserError(
                f"adapters takes a peft configuration or a directory, not a {type(adapters).__name__}."
            )
        pair = isinstance(shape, tuple | list) and len(shape) == 2
        if shape is not None and not (pair and all(isinstance(size, int) and size > 0 for size in shape)):
            raise UserError(f"batch_shape takes (sequences, tokens), two positive integers, not {shape!r}.")
        if not name or "/" in name or name in (".", ".."):
            raise UserError(f"run_name is the name of a folder in each directory of ssd, not {name!r}.")

    def check_clipping(self, ranks: int) -> None:
        """See whether gradients can be clipped as requested.

        Raises:
            UserError: they cannot.
        """
        obstacle = speculation_obstacle(commit_every=self.store.commit_every, ranks=ranks)
        if self.update_policy.speculative and obstacle is not None:
            raise UserError(
                f"--clip-by speculation is not possible: {obstacle}. Leave it out, or change that."
            )

    # -- what the options come to ---------------------------------------------------------------------------------

    @cached_property
    def precision(self) -> Precision:
        """Dtype of computing, and the optimizer."""
        return Precision.named(DEFAULT_DTYPE if self.dtype == AUTO else self.dtype, self.optimizer.optimizer)

    @cached_property
    def adam(self) -> AdamConfig:
        """Hyper-parameters of the optimizer."""
        options = self.optimizer
        return AdamConfig(options.lr, options.betas, options.eps, options.weight_decay)

    @cached_property
    def clip_by(self) -> ClipBy | None:
        """Way to clip that the caller chose; None leaves it to the planner, and without one it is deferral."""
        return clip_by_named(self.optimizer.clip_by)

    @cached_property
    def host_cache(self) -> int | None:
        """Most bytes of host memory to spend on keeping parameters and states from step to step."""
        return None if self.memory.host_cache is None else parse_bytes(self.memory.host_cache)

    @property
    def loss_inputs(self) -> LossInputs:
        """What the loss is computed from, as far as that is known from the start."""
        return LossInputs(self.memory.token_outputs, self.memory.reference)

    @cached_property
    def piece_bytes(self) -> int | None:
        """Most bytes of a piece of a block, if that was requested."""
        return None if self.memory.piece_size is None else parse_bytes(self.memory.piece_size)

    @cached_property
    def saved_activations(self) -> ActivationPolicy | int:
        """Policy of which activations are saved, or the bytes of each block and micro-batch that they may take."""
        asked = self.memory.saved_activations
        return asked if isinstance(asked, ActivationPolicy) else parse_bytes(asked or 0)

    @cached_property
    def adapters(self) -> PeftConfig | None:
        """Configuration of the adapters that are trained, if any are."""
        if self.saved_adapter is not None:
            return self.saved_adapter.config()
        asked = self.weights.adapters
        assert not isinstance(asked, str | os.PathLike)
        return asked.peft_config() if isinstance(asked, AdapterOptions) else asked

    @cached_property
    def saved_adapter(self) -> SavedAdapter | None:
        """The adapter that training begins with, if that is one that was saved."""
        asked = self.weights.adapters
        return SavedAdapter(asked) if isinstance(asked, str | os.PathLike) else None

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
        return None if self.optimizer.max_grad_norm is None else self.clip_by or ClipBy.DEFERRAL

    @property
    def update_policy(self) -> UpdatePolicy:
        """When updates run: which are deferred, and whether others are done provisionally."""
        return UpdatePolicy(self.clips_by, self.optimizer.deferred_fraction)


def explained_options() -> list[tuple[Field[Any], str]]:
    """Return the field of every option, and what it means."""
    meanings = [(cls, attribute_docstrings(cls)) for cls in (*GROUPS.values(), RunConfig)]
    return [(item, texts[item.name]) for cls, texts in meanings for item in fields(cls)]
