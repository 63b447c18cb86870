"""A second CUDA stream next to the current one. On the CPU it does nothing: messages are in the background anyway."""

import torch


class SideStream:
    """A CUDA stream for work that overlaps with the current stream's: what is enqueued inside ``with side:``."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._entered: list[torch.cuda.StreamContext] = []

    def start(self, data: torch.Tensor) -> "SideStream":
        """Begin on the device of ``data``, after all that the current stream has been given."""
        if data.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(data.device)
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
        """Order what is enqueued here from now on after what the current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def mark(self) -> torch.cuda.Event | None:
        """Return an event at this point of what is enqueued here; None on the CPU."""
        return None if self._stream is None else self._stream.record_event()

    def join(self, until: torch.cuda.Event | None = None) -> None:
        """Order the current stream from now on after what is enqueued here, all of it or up to ``until``."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(until or self._stream.record_event())
