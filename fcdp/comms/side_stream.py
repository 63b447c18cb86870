"""A second CUDA stream beside the current one; on the CPU nothing, where messages are in the background anyway."""

import torch


class SideStream:
    """Work that is enqueued inside ``with beside:`` runs beside what the current stream is given meanwhile."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._main: torch.cuda.Stream | None = None
        self._entered: list[torch.cuda.StreamContext] = []

    def start(self, data: torch.Tensor) -> "SideStream":
        """From now on beside the stream that is current, on the device of ``data``, and after all it has been given."""
        if data.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(data.device)
            self._main = torch.cuda.current_stream(data.device)
            self.follow()
        return self

    def __enter__(self) -> None:
        if self._stream is not None:
            self._entered.append(torch.cuda.stream(self._stream))
            self._entered[-1].__enter__()

    def __exit__(self, *exception: object) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def follow(self) -> None:
        """What is enqueued beside from now on comes after what the main stream has been given so far."""
        if self._stream is not None and self._main is not None:
            self._stream.wait_stream(self._main)

    def mark(self) -> torch.cuda.Event | None:
        """This point of what is enqueued beside."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, until: torch.cuda.Event | None = None) -> None:
        """What the main stream is given from now on comes after what is enqueued beside, now or at ``until``."""
        if self._stream is not None and self._main is not None:
            if until is None:
                self._main.wait_stream(self._stream)
            else:
                self._main.wait_event(until)
