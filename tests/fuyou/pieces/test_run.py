"""A pass that waits for pieces: one baton, its own state, and an end in every case."""

import threading

import pytest
import torch

from common.errors import FinetuneError
from common.randomness import random_states
from fuyou.layout.record_parts import PiecePart
from fuyou.pieces.run import PieceRun, Use, current_supply
from fuyou.runtime.compute.piece_visits import replayed

PART = PiecePart("weight")


def need(piece: int) -> torch.Tensor:
    return current_supply().need(frozenset({piece}), Use.FORWARD)[PART]


def weights(value: float) -> dict[PiecePart, torch.Tensor]:
    return {PART: torch.tensor(value)}


def test_continues_with_the_piece_it_waits_for_and_no_other():
    seen = []

    def work() -> float:
        seen.append(float(need(0)))
        seen.append(float(need(0)))
        seen.append(float(need(2)))
        return sum(seen)

    run = PieceRun(work)
    assert run.wanted is None
    assert not run.advance(1, weights(10))
    assert (run.wanted, seen) == (0, [])
    assert not run.advance(2, weights(20))
    assert not run.advance(0, weights(30))
    assert (run.wanted, seen) == (2, [30.0, 30.0])
    with pytest.raises(FinetuneError, match="no result"):
        run.result()
    assert run.advance(2, weights(40))
    assert run.result() == 100.0
    assert run.advance(5, weights(50))  # has ended: nothing happens


def test_an_error_in_a_backward_pass_reaches_the_caller():
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            need(1)
            raise FinetuneError("in the backward pass")

    def work() -> None:
        Waits.apply(torch.ones(2, requires_grad=True)).sum().backward()

    run = PieceRun(work)
    assert not run.advance(0, weights(0))
    with pytest.raises(FinetuneError, match="in the backward pass"):
        run.advance(1, weights(0))


@pytest.mark.parametrize("in_backward", [False, True])
def test_closing_ends_the_pass_and_undoes_what_it_has_open(in_backward):
    left = []

    def work() -> None:
        state = torch.get_rng_state()
        try:
            torch.manual_seed(99)
            if in_backward:
                leaf = torch.ones(2, requires_grad=True)
                leaf.register_hook(lambda gradient: need(7) * gradient)
                leaf.sum().backward()
            need(7)
        finally:
            left.append(True)
            torch.set_rng_state(state)

    before = torch.get_rng_state()
    run = PieceRun(work)
    assert not run.advance(0, weights(0))
    run.close()
    assert left and run.ended
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(FinetuneError, match="closed"):
        run.advance(7, weights(0))
    run.close()


def test_closing_a_pass_that_computes_waits_for_its_next_piece():
    """As after Ctrl-C: the caller has been interrupted while it waited."""
    begun, go_on = threading.Event(), threading.Event()
    after = []

    def work() -> None:
        torch.manual_seed(5)
        begun.set()
        assert go_on.wait(60)
        need(1)
        after.append(1)

    before = torch.get_rng_state()
    run = PieceRun(work)
    take = run._to_caller.acquire

    def interrupted() -> bool:
        assert begun.wait(60)
        raise KeyboardInterrupt

    run._to_caller.acquire = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.advance(0, weights(0))
    run._to_caller.acquire = take  # type: ignore[method-assign]
    go_on.set()
    run.close()
    assert run.ended and not after
    assert torch.equal(torch.get_rng_state(), before)


def test_on_a_gpu_both_generators_draw_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some families draw from the CPU's in their blocks."""
    gpus = torch.Generator().manual_seed(5)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: gpus.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: gpus.set_state(state))
    device = torch.device("cuda", 0)

    def draw() -> torch.Tensor:
        return torch.cat([torch.rand(3), torch.rand(3, generator=gpus)])

    states = random_states(device)
    first, between = draw(), random_states(device)
    with replayed(states, device):
        assert torch.equal(draw(), first)
    assert all(map(torch.equal, random_states(device), between))
