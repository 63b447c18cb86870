"""CUDA's page-locking without a GPU: it refuses what CUDA refuses, and knows what is registered."""

import pytest
import torch

from common.memory import buffers


class FakeCuda:
    """Registers memory as CUDA does: no page twice, and only this many bytes in all."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room, self.registered = room, dict[int, int]()
        self.pending = 0
        """Error that the next kernel would report."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeCuda":
        """Take CUDA's place; a kernel reports the pending error, and only then is it gone."""

        def launch_kernel() -> None:
            pending, self.pending = self.pending, 0
            if pending:
                raise RuntimeError(f"CUDA error {pending}")

        monkeypatch.setattr(buffers, "_launch_kernel", launch_kernel)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        return self

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether these bytes are within one registration."""
        return any(
            there <= address and address + nbytes <= there + size for there, size in self.registered.items()
        )

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1 and nbytes > 0
        if any(
            address < there + size and there < address + nbytes for there, size in self.registered.items()
        ):
            return self._refused(712)
        if sum(self.registered.values()) + nbytes > self.room:
            return self._refused(2)
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def _refused(self, error: int) -> int:
        self.pending = error
        return error
