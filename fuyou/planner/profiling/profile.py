"""The result of profiling: rates and times, which are JSON on disk."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from fuyou.layout.visits import Phase
from fuyou.planner.rates import Contention, TaskRates

FORMAT = 4  # Version of the JSON: profiles of another one are not read, but measured again


@dataclass(frozen=True)
class OperatorTime:
    """One call of an operator in a block's forward pass."""

    name: str  # Such as `aten.addmm.default`
    ordinal: int  # Number of the call among this operator's calls in the block, from 0
    seconds: float
    output_bytes: int  # Bytes of its results, without those that are views of older memory


@dataclass(frozen=True)
class PartTimes:
    """Seconds of one micro-batch, part by part, as the engine's tasks do it."""

    # Tokens in the micro-batch that was run: fewer where a whole one took too long, with times scaled up.
    measured_tokens: int
    matmul_flops_per_second: float  # FLOPs per second of matrix products with the shapes of the block's parameters
    embed_forward_seconds: float
    block_forward_seconds: float
    block_backward_seconds: float  # Seconds with the forward pass computed again, as far as it is needed
    # Seconds in a block that saves all outputs that save FLOPs; 0 where nothing can be saved. So is the next.
    kept_forward_seconds: float
    kept_backward_seconds: float
    kept_bytes: int  # Bytes of these outputs
    # Seconds for squaring a block's gradient for its norm, once per visit for all micro-batches.
    block_finish_seconds: float
    head_seconds: float  # Seconds of forward and backward pass
    head_forward_seconds: float
    embed_backward_seconds: float
    operators: tuple[OperatorTime, ...]  # Operators of the block's forward pass, in order


@dataclass(frozen=True)
class Profile(PartTimes):
    """Rates and times of one machine with one model and one micro-batch."""

    device: str  # Name of the device that computes
    tokens: int  # Tokens in a micro-batch
    block_parameters: float  # Parameters of a block that one token uses: of routed experts those that it visits
    upload_bytes_per_second: float  # Bytes per second from host to device, while nothing goes the other way
    download_bytes_per_second: float
    upload_beside_bytes_per_second: float  # Bytes per second from host to device while both directions are busy
    download_beside_bytes_per_second: float

    read_bytes_per_second: float  # Bytes per second from all SSDs together, through the store, reading only
    write_bytes_per_second: float
    mixed_bytes_per_second: float  # Bytes per second of reads and writes together, as many of each
    commit_seconds: float  # Seconds for `fdatasync` and manifest

    adam_parameters_per_second: float  # Parameters per second that the optimizer process updates with nothing beside it
    adam_threads: int
    # Slowdown of Adam and drives beside each other, and beside computing and copying on the same cores.
    contention: Contention

    measured_at: float  # Time of the measurement, in seconds since the epoch
    measured_in_seconds: float
    versions: dict[str, str]  # Versions of PyTorch and transformers

    def rates(self, recomputed: float = 1.0) -> TaskRates:
        """Return the rates for the simulator.

        Args:
            recomputed: fraction of a block's forward FLOPs that the measured backward pass computed again.
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
        """Return the seconds of one micro-batch's compute task in each phase."""
        return {
            Phase.EMBED_FORWARD: self.embed_forward_seconds,
            Phase.BLOCK_FORWARD: self.block_forward_seconds,
            Phase.HEAD: self.head_seconds,
            Phase.HEAD_EVAL: self.head_forward_seconds,
            Phase.BLOCK_BACKWARD: self.block_backward_seconds,
            Phase.EMBED_BACKWARD: self.embed_backward_seconds,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as JSON."""
        return {**asdict(replace(self, contention=Contention())), "contention": self.contention.to_list()}

    @staticmethod
    def from_dict(content: dict[str, Any]) -> "Profile":
        """Return the profile that :meth:`to_dict` described.

        Raises:
            ValueError: ``content`` is not a profile.
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
