"""What an engine reports about its run: memory, bytes, FLOPs, and gradients."""

from common.models.flops import hardware_flops_per_token, model_flops_per_token
from fuyou.engine.opening import OpenRun
from fuyou.engine.steps import Steps
from fuyou.optimizer.clipping import ClipBy
from fuyou.schedule.memory_plan import MemoryPlan


class EngineFigures:
    """What an engine reports about its run; reading it changes nothing in training.

    Args:
        run: what is open.
        steps: that it takes.
    """

    def __init__(self, run: OpenRun, steps: Steps):
        self._run = run
        self._steps = steps

    @property
    def memory_plan(self) -> MemoryPlan:
        """How the memory budgets are divided."""
        return self._run.runtime.memory_plan

    def model_flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of training on a token: 6 per parameter, plus attention; recomputation not counted.

        Args:
            seq_len: tokens of a sequence.
        """
        return model_flops_per_token(self._run.model.stack.model, seq_len)

    def hardware_flops_per_token(self, seq_len: int) -> float:
        """Return :meth:`model_flops_per_token` with the recomputed forward pass counted.

        Args:
            seq_len: tokens of a sequence.
        """
        return hardware_flops_per_token(self._run.model.stack.model, seq_len)

    def io_bytes(self) -> tuple[int, int]:
        """Return the bytes that training has read from and written to the SSDs, in all processes of the engine."""
        return self._run.runtime.io.training

    def planned_io_bytes(self) -> tuple[int, int]:
        """Return what the schedule says that :meth:`io_bytes` comes to, once everything submitted is done."""
        return self._run.runtime.io.planned

    @property
    def ssd_bytes(self) -> int:
        """Bytes of this node's records on all its SSDs: whole pages, in all slots."""
        assert self._run.files is not None
        layout = self._run.files.store.layout
        return sum(layout.file_bytes().values()) * layout.directories

    def host_memory_in_use(self) -> int:
        """Return the proportional set size of the engine's processes in the newest sample, in bytes beyond
        :attr:`host_baseline_bytes`."""
        return max(0, self._run.meter.current_bytes - self.host_baseline_bytes)

    @property
    def host_peak_bytes(self) -> int:
        """Most host memory that the engine's processes held together in any sample, bytes of proportional set size."""
        return self._run.meter.peak_bytes

    @property
    def host_baseline_bytes(self) -> int:
        """Host memory that the engine's processes held just before the model was touched, too."""
        return self._run.meter.baseline_bytes

    @property
    def device_peak_bytes(self) -> int:
        """Most device memory in use. Where the CPU is the device: what the plan gives it."""
        measured = self._run.device.peak_bytes()
        return self.memory_plan.device_bytes if measured is None else measured

    def gradient_norm(self) -> float:
        """Return the norm of the whole gradient before clipping, between the backward pass and :meth:`step`."""
        return self._steps.gradient_norm()

    @property
    def max_grad_norm(self) -> float | None:
        """Norm to which gradients are clipped, if they are."""
        return self._run.config.optimizer.max_grad_norm

    @property
    def clip_by(self) -> ClipBy | None:
        """How gradients are clipped, if they are."""
        return self._run.config.clips_by

    @property
    def io(self) -> str:
        """How parameters get from the SSDs to the device: ``"posix"``, through host memory; ``"kvikio"``, past it,
        where that would not keep them."""
        return self._run.config.store.io
