"""The simulator runs the engine's task lists: no resource is faster than its rate, no task is early."""

import functools
import random
from dataclasses import replace

import pytest

from fuyou.layout.model_layout import Recomputation
from fuyou.planner.evaluate import busy_seconds
from fuyou.planner.simulator import SimulatedDrives, Simulation, Simulator, TaskRates
from fuyou.schedule.batch import BatchShape
from fuyou.schedule.scheduler import Scheduler
from fuyou.schedule.tasks import Op, Resource, StepList, Task
from tests.helpers.simulation import BF16, CHUNK, COUNTS, FAST, LAYERS, run
from tests.helpers.step_layouts import step_layout


def work(lists: list[StepList], rates: TaskRates) -> dict[Resource, float]:
    """Seconds that the last step takes of each resource, by its tasks' costs."""
    tasks = lists[-1].tasks
    moved = {
        resource: sum(task.nbytes for task in tasks if task.op.resource is resource)
        for resource in (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST, Resource.ADAM)
    }
    return {
        Resource.GPU: sum(task.flops for task in tasks) / rates.flops_per_second,
        Resource.HOST_TO_DEVICE: moved[Resource.HOST_TO_DEVICE] / rates.upload_bytes_per_second,
        Resource.DEVICE_TO_HOST: moved[Resource.DEVICE_TO_HOST] / rates.download_bytes_per_second,
        Resource.ADAM: moved[Resource.ADAM] / rates.adam_parameters_per_second,
        Resource.SSD: lists[-1].ssd_read_bytes() / rates.read_bytes_per_second
        + lists[-1].ssd_written_bytes() / rates.write_bytes_per_second,
    }


@pytest.mark.parametrize(
    ("slow", "resource"),
    [("read_bytes_per_second", Resource.SSD), ("upload_bytes_per_second", Resource.HOST_TO_DEVICE)],
)
def test_what_goes_past_host_memory_keeps_drives_and_link_busy(slow: str, resource: Resource) -> None:
    rates = replace(FAST, **{slow: 1e6})
    simulation, lists = run(rates, 0.5, direct=True, host_block_gradients=2)
    tasks = lists[-1].tasks
    past = sum(task.nbytes for task in tasks if task.op is Op.PARAMETER_READ_DEVICE)
    up = sum(task.nbytes for task in tasks if task.op.resource is Resource.HOST_TO_DEVICE)
    assert past
    expected = (past + up if resource is Resource.HOST_TO_DEVICE else lists[-1].ssd_read_bytes()) / 1e6
    assert simulation.step_seconds() == pytest.approx(expected, rel=0.02)
    assert busy_seconds(lists[-1], rates)[resource] == pytest.approx(expected, rel=1e-6)


def one_by_one(transfers: list[tuple[float, int, int]], piece_seconds: float) -> list[float]:
    """Return when each transfer (its time, pool, and pieces) is done, piece by piece, alternately for two pools."""
    queues: list[list[list[int]]] = [[], []]
    ends, now, turn, waiting = [0.0] * len(transfers), 0.0, 0, list(range(len(transfers)))
    while waiting or any(queues):
        if not any(queues):
            now = max(now, transfers[waiting[0]][0])
        while waiting and transfers[waiting[0]][0] <= now:
            number = waiting.pop(0)
            queues[transfers[number][1]].append([number, transfers[number][2]])
        queue = queues[turn] or queues[1 - turn]
        turn = 1 - queues.index(queue) if queues[0] != queues[1] else 1 - turn
        now += piece_seconds
        queue[0][1] -= 1
        if not queue[0][1]:
            ends[queue.pop(0)[0]] = now
    return ends


def test_drives_alternate_between_pools_piece_by_piece() -> None:
    """What comes while the other pool has the drives waits for one piece; pieces of one pool alone are one event."""
    draw = random.Random(5)
    transfers = sorted(
        (round(draw.uniform(0, 40), 3), draw.randrange(2), draw.randrange(1, 9)) for _ in range(60)
    )
    clock, rates, ends = Simulation(), replace(FAST, read_bytes_per_second=10.0), [0.0] * len(transfers)
    drives = SimulatedDrives(clock, rates, 1)
    for number, (time, pool, pieces) in enumerate(transfers):

        def done(number: int = number) -> None:
            ends[number] = clock.now

        clock.call_at(time, functools.partial(drives.move, pool, True, pieces, done))
    clock.run()
    assert ends == pytest.approx(one_by_one(transfers, 0.1))
    alone = Simulation()
    SimulatedDrives(alone, rates, 1).move(0, True, 1000, lambda: None)
    assert len(alone._events) == 1 and alone._events[0][0] == pytest.approx(100)


def test_two_resources_overlap_but_no_step_beats_its_largest_bound() -> None:
    layout = step_layout(LAYERS, False, BF16)
    elements = sum(record.numel for record in layout.records)
    for flops in (2e8, 1e9, 5e9):
        rates = replace(
            FAST,
            flops_per_second=flops,
            read_bytes_per_second=26 * elements,
            write_bytes_per_second=26 * elements,
        )
        simulation, lists = run(rates)
        bounds = work(lists, rates)
        seconds = simulation.step_seconds()
        assert max(bounds.values()) * 0.999 <= seconds < bounds[Resource.GPU] + bounds[Resource.SSD]


def test_tasks_wait_for_what_they_wait_for() -> None:
    rates = TaskRates(1e9, 1e7, 1e7, 1e7, 1e7, 1e7)
    _, lists = run(rates, deferred=0.25)
    for tasks in lists:
        for task in tasks.tasks:
            assert task.finished_at >= task.started_at
            for earlier in task.after:
                assert earlier.finished_at <= task.started_at + 1e-9, f"{task} before {earlier}"


def test_deferring_helps_where_computing_and_the_drives_take_as_long() -> None:
    layout = step_layout(LAYERS, False, BF16)
    elements = sum(record.numel for record in layout.records)
    rates = replace(FAST, read_bytes_per_second=26 * elements, write_bytes_per_second=26 * elements)
    flops = work(run(rates)[1], replace(rates, flops_per_second=1.0))[Resource.GPU]
    balanced = replace(rates, flops_per_second=flops)  # a second of each
    fractions = [count / LAYERS for count in range(LAYERS // 2 + 1)]
    fraction = min(fractions, key=lambda part: run(balanced, part)[0].step_seconds())
    assert 0 < fraction < 0.5
    best, without, half = (run(balanced, part)[0].step_seconds() for part in (fraction, 0.0, 0.5))
    assert best < 0.99 * without and best < half


def keep(
    layers: list[int], device: int, micro: int, rates: TaskRates, saved_bytes: int = 10_000
) -> tuple[float, StepList]:
    """Seconds of a step in which ``layers`` keep outputs that save three quarters of their recomputation."""
    layout = step_layout(LAYERS, False, BF16)
    total = len(layers) * micro
    counts = replace(
        COUNTS, device_saved=min(device, total), host_saved=2 if total > device else 0, ssd_saved=total
    )
    scheduler = Scheduler(layout, counts, recomputation=Recomputation(frozenset(layers), 0.75))
    lists = [scheduler.training_step(step, BatchShape(micro, 4096, 8, saved_bytes)) for step in range(1, 5)]
    return Simulator(layout.records, rates, 3, CHUNK).run(lists).step_seconds(), lists[-1]


def test_keeping_outputs_helps_where_computing_is_the_bound_and_hurts_where_the_drives_are() -> None:
    layout = step_layout(LAYERS, False, BF16)
    layers, micro = list(range(LAYERS)), 2
    blocks = sum(layout.block_parameters(layer) for layer in range(len(layout.blocks)))
    saved = 0.75 * 2 * blocks * 8 * micro  # 2 FLOPs per parameter and token
    kept = LAYERS * micro * 10_000
    compute = replace(FAST, flops_per_second=1e6)
    before, _ = keep([], 0, micro, compute)
    for device in (2, 100):  # on SSD; on the device
        after, tasks = keep(layers, device, micro, compute)
        assert before - after == pytest.approx(saved / 1e6, rel=0.01)
        moved = sum(task.nbytes for task in tasks.tasks if task.op is Op.ACTIVATION_WRITE)
        # Two on the device, two on the host stay
        assert moved == (0 if device > micro * LAYERS else kept - 4 * 10_000)
    drives = replace(FAST, read_bytes_per_second=1e6, write_bytes_per_second=1e6)
    before, _ = keep([], 0, micro, drives)
    after, _ = keep(layers, 2, micro, drives)
    assert after - before == pytest.approx(2 * (kept - 4 * 10_000) / 1e6, rel=0.02)
    assert keep(layers, 100, micro, drives)[0] == pytest.approx(before)


@pytest.mark.parametrize("in_one_order", [False, True])
def test_exchanges_of_a_gpu_wait_behind_each_other(in_one_order: bool) -> None:
    """The sum over nodes waits for the sum in the node, and what is gathered next for both where the order is one."""
    rates = replace(
        FAST, intra_node_bytes_per_second=1e6, inter_node_bytes_per_second=1e5, message_seconds=0.0,
        exchanges_in_one_order=in_one_order,
    )  # fmt: skip
    reduce = Task(Op.GRADIENT_REDUCE, [], nbytes=1_000_000)
    exchange = Task(Op.GRADIENT_EXCHANGE, [reduce], nbytes=1_000_000)
    gather = Task(Op.PARAMETER_GATHER, [], nbytes=1_000_000)
    layout = step_layout(LAYERS, False, BF16)
    Simulator(layout.records, rates, 3, CHUNK).run([StepList(1, [reduce, exchange, gather])])
    times = [(round(task.started_at), round(task.finished_at)) for task in (reduce, exchange, gather)]
    # Without the one order the gather is not behind what goes between nodes, though last in the list.
    assert times == ([(0, 1), (1, 11), (11, 12)] if in_one_order else [(1, 2), (2, 12), (0, 1)])
