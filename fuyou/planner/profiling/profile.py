"""The result of profiling: rates and times, as JSON on disk."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fuyou.layout.visits import Phase
from fuyou.planner.contention import Contention
from fuyou.planner.simulator import TaskRates

FORMAT = 3
"""Version of the JSON. Another one is not read, but measured again."""


@dataclass(frozen=True)
class OperatorTime:
    """One call of an operator in a block's forward pass."""

    name: str
    """Such as ``aten.addmm.default``."""
    ordinal: int
    """Which of this operator's calls in the block, from 0."""
    seconds: float
    output_bytes: int
    """Bytes of its results, those that are views of older memory left out."""


@dataclass(frozen=True)
class Profile:
    """What one machine does with one model at one micro-batch. Bytes, seconds, and numbers per second."""

    device: str
    """Name of what computes."""
    tokens: int
    """Of a micro-batch."""
    measured_tokens: int
    """Of the micro-batch that was run: fewer where a whole one would have taken too long, with times scaled up."""
    block_parameters: int

    matmul_flops_per_second: float
    """Matrix products with the shapes of the block's own parameters."""
    embed_forward_seconds: float
    """Times of a whole micro-batch, each as the engine's tasks do it."""
    block_forward_seconds: float
    block_backward_seconds: float
    """With the forward pass computed again, as far as anything of it is needed."""
    kept_forward_seconds: float
    """The same two, of a block that keeps all outputs that save FLOPs; 0 where nothing can be kept."""
    kept_backward_seconds: float
    kept_bytes: int
    """Of these outputs."""
    block_finish_seconds: float
    """Squaring a block's gradient for its norm, once per visit however many micro-batches there are."""
    head_seconds: float
    """Forward and backward."""
    head_forward_seconds: float
    embed_backward_seconds: float
    operators: tuple[OperatorTime, ...]
    """Of the block's forward pass, in order. Empty for an emulated device, whose operators take their FLOPs' time."""

    upload_bytes_per_second: float
    """Host to device, while nothing goes the other way."""
    download_bytes_per_second: float
    upload_beside_bytes_per_second: float
    """The same while both directions are busy."""
    download_beside_bytes_per_second: float

    read_bytes_per_second: float
    """All SSDs together, through the store, reading only."""
    write_bytes_per_second: float
    mixed_bytes_per_second: float
    """Reads and writes together, as many bytes of each."""
    commit_seconds: float
    """``fdatasync`` and manifest."""

    adam_parameters_per_second: float
    """Of the optimizer process, with nothing beside it."""
    adam_threads: int
    contention: Contention
    """How much slower Adam and the drives get beside each other, and computing and copying where they share cores."""

    measured_at: float
    """Seconds since the epoch."""
    measured_in_seconds: float
    versions: dict[str, str]
    """Of PyTorch and transformers."""

    def rates(self, recomputed: float = 1.0) -> TaskRates:
        """TaskRates for the simulator.

        Args:
            recomputed: part of a block's forward FLOPs that its backward pass computed again when it was measured.
        """
        flops = 2.0 * self.block_parameters * self.tokens
        return TaskRates(
            flops_per_second=flops / self.block_forward_seconds,
            backward_flops_per_second=(2 + recomputed) * flops / self.block_backward_seconds,
            upload_bytes_per_second=self.upload_beside_bytes_per_second,
            download_bytes_per_second=self.download_beside_bytes_per_second,
            read_bytes_per_second=self.read_bytes_per_second,
            write_bytes_per_second=self.write_bytes_per_second,
            adam_parameters_per_second=self.adam_parameters_per_second,
            commit_seconds=self.commit_seconds,
            non_block_seconds=tuple(
                (phase, self.phase_seconds()[phase] / self.tokens)
                for phase in (Phase.EMBED_FORWARD, Phase.HEAD, Phase.HEAD_EVAL, Phase.EMBED_BACKWARD)
            ),
            finish_seconds=self.block_finish_seconds,
            contention=self.contention,
        )

    def phase_seconds(self) -> dict[Phase, float]:
        """How long one micro-batch's compute task takes in each phase."""
        return {
            Phase.EMBED_FORWARD: self.embed_forward_seconds,
            Phase.BLOCK_FORWARD: self.block_forward_seconds,
            Phase.HEAD: self.head_seconds,
            Phase.HEAD_EVAL: self.head_forward_seconds,
            Phase.BLOCK_BACKWARD: self.block_backward_seconds,
            Phase.EMBED_BACKWARD: self.embed_backward_seconds,
        }

    def to_dict(self) -> dict[str, Any]:
        """What JSON can carry."""
        return {**asdict(replace(self, contention=Contention())), "contention": self.contention.to_list()}

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "Profile":
        """The profile that :meth:`to_dict` described.

        Raises:
            ValueError: it is not one.
        """
        try:
            operators = tuple(OperatorTime(**one) for one in content["operators"])
            contention = Contention.from_list(content["contention"])
            profile = Profile(**{**content, "operators": operators, "contention": contention})
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"not a profile: {error}") from error
        numbers = {field.name: getattr(profile, field.name) for field in fields(profile) if field.type in (int, float)}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ValueError(f"not a profile: {name} is {value!r}")
        for name in [name for name in numbers if name.endswith("_per_second")] + ["tokens", "block_parameters"]:
            if not numbers[name]:
                raise ValueError(f"not a profile: {name} is 0")
        return profile
