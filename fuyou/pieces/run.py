"""A pass through a block as a coroutine: it computes until it needs a piece that is not on the device, and waits there.

A pass is ordinary code, some of it in autograd's engine, so it can only wait on a separate thread. One baton goes to
and fro between that thread and the caller: they never compute at once. What belongs to the process and not to a thread
(random generators, the documents of a packed row) is exchanged with the baton.
"""

import contextvars
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

import torch

from common.data.documents import current_documents, replace_documents
from common.errors import FinetuneError
from common.randomness import random_states, set_random_states
from fuyou.layout.record_parts import Piece, PiecePart

T = TypeVar("T")
Weights = Mapping[PiecePart, torch.Tensor]
_CPU = torch.device("cpu")


class Use(Enum):
    """What a piece is needed for."""

    FORWARD = "operators of the forward pass"
    BACKWARD = "operators of the backward pass"
    GRADIENT = "the gradient of its parameters"


class Supply(Protocol):
    """Where parameters in pieces come from."""

    computes: bool  # Whether they have values

    def need(self, pieces: frozenset[int], use: Use) -> Weights:
        """Return the parameters of ``pieces``, and wait until they are on the device."""
        ...


class _Local(threading.local):
    supply: Supply | None = None


_local = _Local()


def current_supply() -> Supply:
    """Return where this thread gets pieces from."""
    if _local.supply is None:
        raise FinetuneError(
            "A parameter that is cut in pieces was used outside of a pass that waits for pieces (PieceRun)."
        )
    return _local.supply


@contextmanager
def supplying(supply: Supply) -> Iterator[None]:
    """Let this thread get pieces from ``supply`` while the context is open."""
    before = _local.supply
    _local.supply = supply
    try:
        yield
    finally:
        _local.supply = before


class PieceSource:
    """Where handles get real parameters from, and where their gradients go.

    Args:
        pieces: the parts that each piece of the block holds.
        on_gradient: called with a part and its gradient, in the dtype of the weights, as soon as autograd has it. It
            must copy what it wants to keep, and may be called for several micro-batches in turn.
    """

    def __init__(self, pieces: Sequence[Piece], on_gradient: Callable[[PiecePart, torch.Tensor], None]):
        self.piece_of = {part: index for index, piece in enumerate(pieces) for part in piece}
        self.on_gradient = on_gradient

    def fetch(self, parts: Collection[PiecePart], use: Use | None = None) -> Weights:
        """Return the parameters of these parts, and wait until they are on the device.

        ``use`` is what for; None: operators of the pass that is running.
        """
        if use is None:
            use = Use.FORWARD if torch._C._current_graph_task_id() == -1 else Use.BACKWARD
        return current_supply().need(frozenset(self.piece_of[part] for part in parts), use)

    def take_gradient(self, part: PiecePart, gradient: torch.Tensor) -> None:
        """Pass on the gradient of ``part``, once its piece is on the device."""
        weights = self.fetch((part,), Use.GRADIENT)
        self.on_gradient(part, gradient.to(weights[part].dtype))


class _Abandoned(BaseException):
    """Ends a thread whose run has been closed."""


class PieceRun(Generic[T]):
    """One micro-batch's pass through one block, which waits for the pieces that it needs.

    Args:
        work: the pass. It runs in a separate thread, with the caller's context variables and grad mode. Modes and
            hooks that are to hold in it (saved tensors, dispatch) must be entered in ``work`` itself.
        device: where it computes, with the caller's current stream.
        random_state: states of the generators, as :attr:`random_state` has them; None: the caller's own now.
            The caller's are as they were whenever it has the baton.
    """

    computes = True

    def __init__(
        self,
        work: Callable[[], T],
        device: torch.device = _CPU,
        random_state: tuple[torch.Tensor, ...] | None = None,
    ):
        self.random_state = random_states(device) if random_state is None else random_state
        """States of the generators where the pass is now: the CPU's and, on a GPU, its own."""
        # Piece that the pass waits for; None before it has begun and when it has ended
        self.wanted: int | None = None
        self.ended = False  # Whether the pass has ended
        self._work: Callable[[], T] | None = work
        self._device = device
        self._grad = torch.is_grad_enabled()
        self._context = contextvars.copy_context()
        self._documents = current_documents()
        self._piece: int | None = None
        self._weights: Weights | None = None
        self._value: T | None = None
        self._error: BaseException | None = None
        self._closed = False
        self._to_run = threading.Semaphore(0)
        self._to_caller = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._stream: Any = None

    # -- the caller's side ----------------------------------------------------------------------------------------

    def advance(self, piece: int, weights: Weights) -> bool:
        """Let the pass continue while it needs only ``piece``.

        It returns at once if the pass waits for another piece. The first call starts the pass.

        Args:
            piece: index of the piece that is on the device.
            weights: its parameters there, contiguous. No reference to them is kept.

        Returns:
            Whether the pass has ended.

        Raises:
            Exception: of any kind raised by the pass; FinetuneError if the run was closed.
        """
        if self._closed:
            raise FinetuneError("A pass through a block in pieces was continued after it was closed.")
        if self.ended or (self._thread is not None and self.wanted != piece):
            return self.ended
        self._piece = piece
        self._weights = weights
        self.wanted = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)
        with self._own_state():
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="pass in pieces", daemon=True)
                self._thread.start()
            else:
                self._to_run.release()
            self._to_caller.acquire()
        error = self._error
        self._error = None
        if error is not None:
            raise error
        return bool(self.ended)

    def result(self) -> T:
        """Return what the pass has returned."""
        if not self.ended or self._closed:
            raise FinetuneError("A pass through a block in pieces has no result before it has ended.")
        return self._value  # type: ignore[return-value]

    def close(self) -> None:
        """Abandon the pass, wherever it is; a pass that computes (after Ctrl-C here) stops at the next piece."""
        self._closed = True
        if self._thread is not None and not self.ended:
            with self._own_state():  # for what the pass undoes at its end
                self._to_run.release()
                self._thread.join()
            self._error = None

    @contextmanager
    def _own_state(self) -> Iterator[None]:
        """Let the process have the pass's generators and documents while the context is open."""
        outer = random_states(self._device), current_documents()
        set_random_states(self.random_state, self._device)
        replace_documents(self._documents)
        try:
            yield
        finally:
            self.random_state = random_states(self._device)
            self._documents = current_documents()
            set_random_states(outer[0], self._device)
            replace_documents(outer[1])

    # -- the pass's side ------------------------------------------------------------------------------------------

    def need(self, pieces: frozenset[int], use: Use) -> Weights:
        """Return the parameters of the piece, and wait until it is on the device: :meth:`Supply.need`."""
        if len(pieces) != 1:
            raise FinetuneError(
                f"One operator of a block needs the pieces {sorted(pieces)} at the same time."
            )
        if self._closed:
            raise _Abandoned
        (piece,) = pieces
        if piece != self._piece:
            self._piece = None
            self._weights = None
            self.wanted = piece
            self._to_caller.release()
            self._to_run.acquire()
            if self._closed:
                raise _Abandoned
            self._use_stream()
        assert self._weights is not None
        return self._weights

    def _main(self) -> None:
        try:
            self._context.run(self._compute)
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._work = self._piece = self._weights = self.wanted = None
            self.ended = True
            self._to_caller.release()

    def _compute(self) -> None:
        assert self._work is not None
        self._use_stream()
        # A backward pass stays in this thread, which is the one that can wait, on a GPU as well.
        with (
            torch.autograd.set_multithreading_enabled(False),
            torch.set_grad_enabled(self._grad),
            supplying(self),
        ):
            self._value = self._work()

    def _use_stream(self) -> None:
        if self._stream is not None:
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)
