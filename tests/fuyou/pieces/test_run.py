"""A pass that waits for pieces: one baton, its own state, and an end in every case."""

import threading
import time

import pytest
import torch

from common.data.documents import Documents, current_documents, replace_documents
from common.errors import FinetuneError
from fuyou.layout.record_parts import PiecePart
from fuyou.pieces.run import PieceRun, Use, current_supply, random_states
from fuyou.runtime.compute.piece_visits import RandomReplay

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


def test_never_computes_while_the_caller_does():
    inside = False

    def work() -> None:
        nonlocal inside
        for piece in range(20):
            need(piece)
            inside = True
            time.sleep(0.0005)
            inside = False

    runs = [PieceRun(work) for _ in range(3)]
    for piece in range(20):
        for run in runs:
            run.advance(piece, weights(0))
            assert not inside
    assert all(run.ended for run in runs)


def test_an_error_reaches_the_caller_where_it_happens():
    def work() -> None:
        need(1)
        raise ValueError("in the block")

    run = PieceRun(work)
    run.advance(0, weights(0))
    with pytest.raises(ValueError, match="in the block"):
        run.advance(1, weights(0))
    assert run.ended


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
        assert go_on.wait(10)
        need(1)
        after.append(1)

    before = torch.get_rng_state()
    run = PieceRun(work)
    take = run._to_caller.acquire

    def interrupted() -> bool:
        assert begun.wait(10)
        raise KeyboardInterrupt

    run._to_caller.acquire = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        run.advance(0, weights(0))
    run._to_caller.acquire = take  # type: ignore[method-assign]
    go_on.set()
    run.close()
    assert run.ended and not after
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pass_that_has_not_begun_can_be_closed():
    PieceRun(lambda: None).close()


def test_each_pass_has_separate_random_numbers():
    def work() -> torch.Tensor:
        found = [torch.rand(3)]
        for piece in (1, 2):
            need(piece)
            found.append(torch.rand(3))
        return torch.cat(found)

    torch.manual_seed(1)
    first = (torch.get_rng_state(),)
    expected_first = torch.rand(9)
    torch.manual_seed(2)
    second = (torch.get_rng_state(),)
    expected_second = torch.rand(9)
    after_second = torch.get_rng_state()
    torch.manual_seed(3)
    expected_outside = torch.rand(3)
    torch.manual_seed(3)
    runs = [PieceRun(work, random_state=first), PieceRun(work, random_state=second)]
    outside = []
    for piece in range(3):
        for run in runs:
            run.advance(piece, weights(0))
        outside.append(torch.rand(1))
    assert torch.equal(runs[0].result(), expected_first)
    assert torch.equal(runs[1].result(), expected_second)
    assert torch.equal(torch.cat(outside), expected_outside)
    assert torch.equal(runs[1].random_state[0], after_second)


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
    with RandomReplay(states, device):
        assert torch.equal(draw(), first)
    assert all(map(torch.equal, random_states(device), between))


def test_state_of_the_thread_and_of_the_process():
    documents = Documents(1, 4, (0, 0, 2, 0, 2, 4))

    def work() -> tuple[bool, bool]:
        before = replace_documents(documents)
        with torch.enable_grad():
            need(1)
            inside = torch.is_grad_enabled(), current_documents() is documents
        replace_documents(before)
        assert not torch.is_grad_enabled()
        return inside

    with torch.no_grad():
        run = PieceRun(work)
    run.advance(0, weights(0))
    assert current_documents() is None and torch.is_grad_enabled()
    assert run.advance(1, weights(0))
    assert run.result() == (True, True)
    assert current_documents() is None


def test_threads_are_used_again():
    threads = set()

    def work() -> None:
        threads.add(threading.get_ident())
        need(1)

    for _ in range(20):
        runs = [PieceRun(work) for _ in range(2)]
        for run in runs:
            run.advance(0, weights(0))
        runs[0].advance(1, weights(0))
        runs[1].close()
    assert len(threads) == 2


def test_no_reference_to_weights_stays():
    import weakref

    def work() -> None:
        need(0)
        need(1)

    run = PieceRun(work)
    given = weights(1)
    gone = weakref.ref(given[PART])
    run.advance(0, given)
    del given
    assert gone() is None
    run.close()


def test_outside_of_a_pass_there_are_no_pieces():
    with pytest.raises(FinetuneError, match="PieceRun"):
        current_supply()
