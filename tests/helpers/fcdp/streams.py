"""CUDA's streams on a CPU: operators run at once, and two accesses to the same bytes that no event orders fail."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Event:
    """How much of every stream comes before a point."""

    clock: dict["Stream", int]


@dataclass(eq=False)
class Stream:
    """A queue of kernels, with what it has waited for."""

    device: Any = None
    priority: int = 0
    is_deaf: bool = False
    clock: dict["Stream", int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _made.append(self)

    def record_event(self) -> Event:
        return Event(dict(self.clock))

    def wait_event(self, event: Event) -> None:
        if not self.is_deaf:
            for stream, time in event.clock.items():
                self.clock[stream] = max(time, self.clock.get(stream, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


@dataclass(frozen=True)
class _Access:
    places: frozenset[int]
    stream: Stream
    time: int
    is_write: bool


_made: list[Stream] = []
_current: list[Stream] = []


class _Accesses(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, list[_Access]] = {}
        self._alive: list[Any] = []  # or another tensor would get the same address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._alive.append((args, kwargs, result))
        if (
            func._schema.name.split("::")[1] in ("empty", "new_empty", "empty_like", "empty_strided")
            or func.is_view
        ):
            return result
        written, read = [], []
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_write else read).extend(tree_leaves(value))
        stream = _current[-1]
        time = stream.clock[stream] = stream.clock.get(stream, 0) + 1
        for values, is_write in ((read, False), (written + tree_leaves(result), True)):
            for value in values:
                if isinstance(value, torch.Tensor) and value.numel():
                    self._note(value, _Access(_places(value), stream, time, is_write), func)
        return result

    def _note(self, value: torch.Tensor, access: _Access, func: Any) -> None:
        seen = self._seen.setdefault(value.untyped_storage().data_ptr(), [])
        for other in seen:
            ordered = access.stream is other.stream or access.stream.clock.get(other.stream, 0) >= other.time
            if (access.is_write or other.is_write) and not ordered and access.places & other.places:
                raise AssertionError(f"{func} races with what another stream does to the same memory")
        seen.append(access)


def _places(value: torch.Tensor) -> frozenset[int]:
    size, last = (
        value.element_size(),
        sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)),
    )
    elements = torch.arange(last + 1).as_strided(value.shape, value.stride()).flatten().tolist()
    first = value.storage_offset()
    return frozenset((first + element) * size + byte for element in elements for byte in range(size))


@contextlib.contextmanager
def _entered(stream: Stream) -> Iterator[None]:
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


@contextlib.contextmanager
def emulated_streams() -> Iterator[list[Stream]]:
    """Have ``torch.cuda`` make and enter such streams, and tensors call themselves CUDA's. Yield all that are made."""
    replaced = [
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "current_stream", lambda device=None: _current[-1]),
        (torch.cuda, "stream", _entered),
        (torch.Tensor, "is_cuda", property(lambda tensor: True)),
    ]
    before = [(place, name, place.__dict__.get(name)) for place, name, _ in replaced]
    _made.clear()
    try:
        for place, name, value in replaced:
            setattr(place, name, value)
        with _entered(Stream()), _Accesses():
            yield _made
    finally:
        for place, name, value in before:
            delattr(place, name) if value is None else setattr(place, name, value)
