"""The schedule finds the right bytes in the right place, for any buffers and however the lanes interleave."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from fuyou.layout.model_layout import BufferCounts, ModelLayout, Phase
from fuyou.layout.record import Kind, Precision
from fuyou.layout.record_parts import PieceOrder, Stage
from fuyou.layout.share import ALONE, Share
from fuyou.schedule.batch import Batch, LossInputs
from fuyou.schedule.tasks import SSD_READS, SSD_WRITES, ComputeTask, Op, StepList, Task
from tests.helpers.schedule_model import Machine, Program, build, check_order
from tests.helpers.step_layouts import CUTS, Computation, Cut, computations, one_by_one, step_layout

#: The least that works: everything streams, nothing overlaps.
LEAST = BufferCounts(
    device_blocks=1, device_non_block=1, device_block_gradients=1, device_non_block_gradients=1, host_blocks=1,
    host_non_block=1, host_block_gradients=1, host_non_block_gradients=1, device_activations=3, host_activations=2,
    ssd_activations=100,
)  # fmt: skip
#: What a machine with some room has: transfers overlap, block inputs stay on the device.
USUAL = BufferCounts(device_activations=100)


#: A rank alone, two in one node, one in each of two nodes, and the last of two by two.
SHARES = (ALONE, ALONE, Share(1, 2, 0, 1), Share(2, 1, 1, 0), Share(2, 2, 1, 1))


def activations(layers: int, micro: int, reference: bool = False) -> int:
    """How many activations a step may keep at once, as the memory plan counts them."""
    return Batch(micro, 8, 1, LossInputs(1, reference)).activations(layers)


def expected(
    layout: ModelLayout, kind: str, micro: int, steps: StepList, together: int | None
) -> list[Computation]:
    """What the twin computes in such a step or evaluation."""
    reference = any(isinstance(task, ComputeTask) and task.micro >= micro for task in steps.tasks)
    return list(computations(layout, micro, kind == "train", steps.own_loss, reference, together))


@st.composite
def block_cuts(draw: st.DrawFn, layers: int) -> dict[int, Cut]:
    """Blocks in pieces: some, none, or all."""
    some = draw(st.sampled_from([set(), set(range(layers)), draw(st.sets(st.integers(0, layers - 1)))]))
    cuts = {}
    for layer in sorted(some):
        pieces, how = draw(st.integers(2, 4)), draw(st.sampled_from(CUTS))
        held = (
            draw(st.frozensets(st.integers(0, pieces - 1)))
            if how is one_by_one and draw(st.booleans())
            else None
        )
        cuts[layer] = how(pieces) if held is None else one_by_one(pieces, held)
    return cuts


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """What to :func:`build`."""
    layers, tied = draw(st.integers(1, 6)), draw(st.booleans())
    most = draw(st.integers(1, 5))
    reference = draw(st.booleans())
    total = activations(layers, most, reference)
    device = draw(st.integers(3, total))
    # Where the block inputs go: all on the device; device and host; device, host and SSD.
    if device == total:
        host, ssd = draw(st.sampled_from([0, 2])), 0
    elif draw(st.booleans()):
        host, ssd = total - device + draw(st.integers(1, 4)), 0
    else:
        host, ssd = draw(st.integers(2, total)), total
    cuts = draw(block_cuts(layers))
    block_records = layers + sum(cut.pieces - 1 for cut in cuts.values())
    few = st.integers(1, 3)
    saving_layers = draw(st.sets(st.integers(0, layers - 1)))
    kept = len(saving_layers) * most
    device_saved = draw(st.integers(min(1, kept), kept))
    # One place more than what does not fit on the device, or two on the way to the SSDs.
    host_saved, ssd_saved = (
        draw(st.sampled_from([(kept - device_saved + 1, 0), (2, kept)])) if kept else (0, 0)
    )
    counts = BufferCounts(
        device_blocks=draw(st.integers(1, block_records + 1)), device_non_block=draw(st.integers(1, 2)),
        device_block_gradients=draw(few), device_non_block_gradients=draw(st.integers(1, 2)),
        host_blocks=draw(st.integers(1, block_records + 1)), host_non_block=draw(st.integers(1, 2)),
        host_block_gradients=draw(st.integers(1, block_records + 1)), host_non_block_gradients=draw(st.integers(1, 2)),
        device_adapters=draw(st.integers(1, 2)), device_adapter_gradients=draw(st.integers(1, 2)),
        host_adapters=draw(few), host_adapter_gradients=draw(few),
        device_activations=device, host_activations=host, ssd_activations=ssd,
        device_saved=device_saved, host_saved=host_saved, ssd_saved=ssd_saved,
    )  # fmt: skip
    kinds = st.sampled_from(["train", "train", "train", "eval", "flush"])
    entry = st.tuples(kinds, st.integers(1, most), st.booleans())
    script = [("train", most, draw(st.booleans())), *draw(st.lists(entry, min_size=1, max_size=4))]
    speculate = draw(st.booleans())
    return {
        "layers": layers, "tied": tied, "counts": counts, "script": script,
        "defer": draw(st.sampled_from([0, 0.25, 0.5, 1])),
        "slot": draw(st.integers(0, 1)),
        "saving_layers": saving_layers, "speculate": speculate,
        "resident": draw(st.sampled_from([0, 0, 1, 3, 8])), "frozen": draw(st.booleans()),
        "cuts": cuts, "share": ALONE if speculate else draw(st.sampled_from(SHARES)),
        "own": draw(st.sets(st.integers(0, 4))), "reference": reference and not cuts,
        "together": draw(st.sampled_from([None, 1, 2])), "direct_reads": draw(st.booleans()),
        "islands": draw(st.booleans()),
    }  # fmt: skip


@settings(max_examples=200)
@given(scenarios())
def test_everything_that_shares_a_place_is_ordered_and_finds_what_it_needs(scenario: dict[str, Any]) -> None:
    program = build(**scenario)
    check_order(program)
    Machine(program).run_in_order()


@settings(max_examples=80)
@given(scenarios(), st.integers(0, 2**32))
def test_any_order_that_the_executor_may_choose_works(scenario: dict[str, Any], seed: int) -> None:
    program = build(**scenario)
    for number in range(2):
        Machine(program).run(seed + number)


def computed(tasks: list[Task]) -> list[Computation]:
    """What a list computes, as the twin names it."""
    found = []
    for task in tasks:
        if isinstance(task, ComputeTask):
            visit = task.visit
            layer = visit.layer
            found.append(
                Computation(
                    visit.phase, layer, visit.record, task.micro, visit.begins, visit.ends, visit.trained
                )
            )
    return found


@settings(max_examples=60)
@given(scenarios())
def test_every_step_computes_and_updates_everything_once(scenario: dict[str, Any]) -> None:
    program = build(**scenario)
    layout = program.layout
    trained = [(micro, steps) for kind, micro, steps in program.lists if kind == "train"]
    for micro, steps in trained:
        assert computed(steps.tasks) == expected(layout, "train", micro, steps, scenario["together"])
        assert steps.end is not None and steps.end.op is Op.STEP
        for task in steps.tasks:
            if task.op is Op.COMPUTE:
                assert task.visit is not None
                most = max(
                    one.micro
                    for one in steps.tasks
                    if isinstance(one, ComputeTask) and one.visit == task.visit
                )
                assert task.last == (task.micro == most)
                assert tuple(task.gradients) == task.visit.trained
    for kind, micro, steps in program.lists:
        if kind == "eval":
            assert computed(steps.tasks) == expected(layout, "eval", micro, steps, scenario["together"])
            assert not any(task.op in (Op.UPDATE, Op.STATE_WRITE, Op.COMMIT, Op.STEP) for task in steps.tasks)
    done = [task for task in program.tasks if task.op is Op.UPDATE]
    updates = Counter((task.record, task.step) for task in done if not program.is_void(task))
    assert updates == Counter((index, steps.step) for index in layout.trainable for _, steps in trained)


@pytest.mark.parametrize(("layers", "micro"), [(1, 3), (4, 1), (3, 4), (6, 5)])
def test_places_on_ssd_are_used_again(layers: int, micro: int) -> None:
    """With as few places for activations as can be, and slow reads."""
    script = [("train", micro, True), ("eval", micro, True), ("train", micro, True)]
    for places in range(activations(layers, micro)):
        try:
            program = build(layers, True, replace(LEAST, ssd_activations=places), script)
            break
        except IndexError:
            continue
    assert 0 < places < (layers + 1) * micro
    check_order(program)
    for seed in range(5):
        Machine(program).run(seed)


# -- commits ----------------------------------------------------------------------------------------------------------


def commits(program: Program) -> list[tuple[int, int]]:
    return [(task.step, task.target) for task in program.tasks if task.op is Op.COMMIT]


@pytest.mark.parametrize("defer", [0, 0.34, 1])
def test_commits_alternate_between_the_slots(defer: float) -> None:
    program = build(3, False, USUAL, [("train", 1, True)] * 4, defer=defer)
    assert commits(program) == [(1, 1), (2, 0), (3, 1), (4, 0)]
    program = build(3, True, USUAL, [("train", 1, True)] * 3, defer=defer, slot=1)
    assert commits(program) == [(1, 0), (2, 1), (3, 0)]


@pytest.mark.parametrize("defer", [0, 0.34, 1])
def test_steps_that_are_not_committed_stay_in_the_other_slot(defer: float) -> None:
    script = [("train", 1, step % 3 == 0) for step in range(1, 9)]
    program = build(2, False, USUAL, script, defer=defer)
    assert commits(program) == [(3, 1), (6, 0), (8, 1)]  # the last one by the flush at the end
    targets = {task.step: task.target for task in program.tasks if task.op is Op.UPDATE}
    assert targets == {1: 1, 2: 1, 3: 1, 4: 0, 5: 0, 6: 0, 7: 1, 8: 1}


@pytest.mark.parametrize("defer", [0, 0.34, 1])
def test_a_commit_waits_for_all_writes_of_its_step(defer: float) -> None:
    program = build(4, False, LEAST, [("train", 2, True)] * 3, defer=defer)
    newest: dict[int, Task] = {}
    for task in program.tasks:
        if task.op is Op.STATE_WRITE:
            newest[task.record] = task
        if task.op is Op.COMMIT:
            assert set(map(id, newest.values())) <= set(map(id, task.after))
            assert len(newest) == len(program.layout.records)


# -- bytes ------------------------------------------------------------------------------------------------------------


def moved(tasks: list[Task], ops: frozenset[Op]) -> int:
    return sum(task.nbytes for task in tasks if task.op in ops and not task.op.name.startswith("ACTIVATION"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro", [1, 4])
def test_bytes_per_parameter_when_everything_streams(tied: bool, micro: int) -> None:
    program = build(6, tied, LEAST, [("train", micro, True)] * 3)
    elements = sum(record.numel for record in program.layout.records)
    for _, _, steps in program.lists:
        assert moved(steps.tasks, SSD_READS) <= 14 * elements
        assert moved(steps.tasks, SSD_WRITES) == 12 * elements
        assert steps.ssd_read_bytes() == sum(task.nbytes for task in steps.tasks if task.op in SSD_READS)
        assert steps.ssd_written_bytes() == sum(task.nbytes for task in steps.tasks if task.op in SSD_WRITES)


@pytest.mark.parametrize(("host", "device"), [(1, 1), (2, 1), (1, 3), (3, 2), (4, 2)])
@pytest.mark.parametrize("defer", [0, 0.34, 1])
def test_bytes_per_parameter_with_any_few_buffers(host: int, device: int, defer: float) -> None:
    counts = replace(LEAST, host_blocks=host, device_blocks=device)
    program = build(6, False, counts, [("train", 2, True)] * 4, defer=defer)
    elements = sum(record.numel for record in program.layout.records)
    for kind, _, steps in program.lists[1:]:
        gradients = [task for task in steps.tasks if task.op in (Op.GRADIENT_READ, Op.GRADIENT_WRITE)]
        spilled = sum(task.nbytes for task in gradients if task.op is Op.GRADIENT_READ)
        assert defer or not gradients
        if kind == "train":
            assert spilled <= 2 * elements
            assert moved(steps.tasks, SSD_READS) - spilled <= 14 * elements
            assert moved([task for task in steps.tasks if task not in gradients], SSD_WRITES) == 12 * elements


@pytest.mark.parametrize(("precision", "states"), [
    (Precision(torch.bfloat16), 10),
    (Precision(torch.float32), 8),
])  # fmt: skip
def test_bytes_of_every_precision(precision: Precision, states: int) -> None:
    program = build(3, False, LEAST, [("train", 1, True)] * 2, precision=precision)
    width = precision.dtype.itemsize
    for _, _, steps in program.lists:
        for task in steps.tasks:
            if task.record is None:
                continue
            numel = program.layout.records[task.record].numel
            expected = {
                Op.PARAMETER_READ: width, Op.PARAMETER_UPLOAD: width, Op.GRADIENT_DOWNLOAD: width,
                Op.STATE_READ: states, Op.STATE_WRITE: width + states, Op.UPDATE: 1, Op.COMPUTE: 0,
            }  # fmt: skip
            assert task.nbytes == expected[task.op] * numel


def test_nothing_is_read_twice_where_the_host_holds_everything() -> None:
    counts = replace(USUAL, host_blocks=6, host_non_block=2)
    program = build(6, False, counts, [("train", 2, True)] * 3)
    for number, (_, _, steps) in enumerate(program.lists):
        reads = Counter(task.record for task in steps.tasks if task.op is Op.PARAMETER_READ)
        assert reads == (
            Counter(record.index for record in program.layout.records) if number == 0 else Counter()
        )


def test_one_more_host_buffer_saves_one_read() -> None:
    reads = []
    for host in range(1, 8):
        program = build(6, False, replace(LEAST, host_blocks=host), [("train", 1, True)] * 4)
        last = [task for task in program.lists[-1][2].tasks if task.op is Op.PARAMETER_READ]
        reads.append(sum(program.layout.records[task.record].kind is Kind.BLOCK for task in last))
    assert reads == sorted(reads, reverse=True)
    assert reads[0] <= 12 and reads[-1] == 0
    assert all(before - after <= 2 for before, after in pairwise(reads))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("host", [1, 3, 8])
def test_direct_reads_leave_in_host_memory_what_it_keeps(host: int, frozen: bool) -> None:
    """Nothing is read more often for it, and what is there anyway is not read past it."""
    adapters = dict.fromkeys(("device_adapters", "device_adapter_gradients", "host_adapter_gradients"), 1)
    counts, script = replace(LEAST, host_blocks=host, host_adapters=8, **adapters), [("train", 2, True)] * 4
    usual, direct = (
        build(7, False, counts, script, frozen=frozen, direct_reads=way) for way in (False, True)
    )
    blocks = {index for block in direct.layout.blocks for index in block}
    reads = [
        Counter(
            task.op for task in program.lists[-1][2].tasks if task.op in SSD_READS and task.record in blocks
        )
        for program in (usual, direct)
    ]
    assert not reads[0][Op.PARAMETER_READ_DEVICE]
    assert reads[1][Op.PARAMETER_READ] + reads[1][Op.PARAMETER_READ_DEVICE] <= reads[0][Op.PARAMETER_READ]
    assert (reads[1][Op.PARAMETER_READ_DEVICE] > 0) == (host < 7)


def test_updates_and_reads_are_not_held_up_by_what_they_do_not_need() -> None:
    """With three host buffers, the read of the block after next waits for nothing of the next block."""
    program = build(6, False, USUAL, [("train", 1, True)])
    tasks = program.tasks
    computes = {
        task.visit.layer: task for task in tasks if task.visit and task.visit.phase is Phase.BLOCK_FORWARD
    }
    for layer in range(4):
        reads = [
            t for t in tasks if t.op is Op.PARAMETER_READ and t.record == program.layout.blocks[layer + 2][0]
        ]
        reach: set[int] = set()
        todo = list(reads[0].after)
        while todo:
            task = todo.pop()
            if id(task) not in reach:
                reach.add(id(task))
                todo.extend(task.after)
        assert id(computes[layer]) not in reach


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("buffers", [1, 3])
def test_a_reference_moves_no_more_weights(tied: bool, buffers: int) -> None:
    """Step by step the same bytes of parameters, gradients and states as with the engine's own loss."""
    layers, micro, steps = 6, 2, 4
    counts = BufferCounts(
        device_blocks=buffers, host_blocks=buffers, device_adapters=1, device_adapter_gradients=1, host_adapters=1,
        host_adapter_gradients=1, device_activations=activations(layers, micro, True), device_block_gradients=0,
        device_non_block_gradients=0, host_block_gradients=0, host_non_block_gradients=0,
    )  # fmt: skip
    script = [("train", micro, True)] * steps
    own, plain = (
        build(layers, tied, counts, script, frozen=True, own=range(steps) if own else (), reference=True)
        for own in (True, False)
    )
    for (_, _, mine), (_, _, theirs) in zip(own.lists, plain.lists, strict=True):
        for op in Op:
            if op is not Op.COMPUTE:
                assert [t.nbytes for t in mine.tasks if t.op is op] == [
                    t.nbytes for t in theirs.tasks if t.op is op
                ]
    flops = [sum(task.flops for task in program.lists[1][2].tasks) for program in (own, plain)]
    sizes, layout = [record.parameter_count for record in own.layout.records], own.layout
    head = sizes[layout.head] + sizes[layout.head_adapter]
    blocks = sum(
        sizes[index] for index in (*(block for (block,) in layout.blocks), *layout.block_adapters[1:])
    )
    # Once more, and once for the reference
    assert flops[0] - flops[1] == 2.0 * 8 * micro * (2 * head + blocks)


# -- blocks in pieces -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("cut", CUTS)
def test_pieces_with_the_fewest_buffers(cut: Callable[[int], Cut], frozen: bool) -> None:
    counts = replace(
        LEAST, device_adapters=1, device_adapter_gradients=1, host_adapters=1, host_adapter_gradients=1
    )
    program = build(3, True, counts, [("train", 3, True)] * 3, frozen=frozen, cuts={0: cut(2), 2: cut(4)})
    check_order(program)
    for seed in range(5):
        Machine(program).run(seed)


@pytest.mark.parametrize("cut", CUTS)
def test_each_piece_is_written_once_and_read_at_most_once_per_stage(cut: Callable[[int], Cut]) -> None:
    cuts = {layer: cut(3) for layer in range(5)}
    program = build(5, False, LEAST, [("train", 4, True)] * 3, cuts=cuts)
    layout = program.layout
    parameters = sum(layout.records[index].parameter_nbytes for index in (layout.embedding, layout.head))
    states = sum(record.state_nbytes for record in layout.records)
    for layer, records in enumerate(layout.blocks):
        order = layout.orders[layer]
        pieces = [*order.forward, *(stage.piece for stage in order.backward)]
        parameters += sum(layout.records[records[piece]].parameter_nbytes for piece in pieces)
    # The embedding is read for its forward and its backward pass.
    parameters += layout.records[layout.embedding].parameter_nbytes
    for _, _, steps in program.lists:
        assert moved(steps.tasks, SSD_READS) <= parameters + states
        assert moved(steps.tasks, SSD_WRITES) == states + sum(
            record.parameter_nbytes for record in layout.records
        )


def test_frozen_pieces_are_uploaded_once_for_each_micro_batch_of_the_backward_pass() -> None:
    """With one buffer on the device, and none is uploaded again from one stage to the next of the same piece."""
    counts = replace(
        LEAST, device_adapters=1, device_adapter_gradients=1, host_adapters=4, host_adapter_gradients=2
    )
    program = build(2, False, counts, [("train", 3, True)], frozen=True, cuts={1: one_by_one(4)})
    uploads = Counter(task.record for task in program.tasks if task.op is Op.PARAMETER_UPLOAD)
    first, *between, last = program.layout.blocks[1]
    assert [uploads[index] for index in between] == [1 + 2 * 3] * 2
    assert uploads[first] == 1 + 3 + 1  # it ends the pass of a micro-batch, and begins that of the next
    assert uploads[last] == 1 + 3


def test_pieces_take_the_flops_of_their_block() -> None:
    whole = build(3, False, USUAL, [("train", 2, True)])
    parts = build(3, False, USUAL, [("train", 2, True)], cuts={1: one_by_one(4)})
    for program in (whole, parts):
        flops = Counter[tuple[Phase, int]]()
        for task in program.tasks:
            if isinstance(task, ComputeTask) and task.visit.layer is not None:
                flops[task.visit.phase, task.visit.layer] += task.flops
        parameters = [
            sum(program.layout.records[index].parameter_count for index in one)
            for one in program.layout.blocks
        ]
        for layer, count in enumerate(parameters):
            assert flops[Phase.BLOCK_FORWARD, layer] == 2 * 2 * 8 * count
            assert flops[Phase.BLOCK_BACKWARD, layer] == 6 * 2 * 8 * count


def test_pieces_whose_gradients_would_be_there_at_the_same_time_are_rejected() -> None:
    stages = [Stage(1, True, True, True), Stage(0, True, True, True), Stage(1, False, True, True)]
    cuts = {0: Cut(PieceOrder((0, 1), tuple(stages)))}
    with pytest.raises(UserError, match="comes back to parameters"):
        step_layout(1, False, cuts=cuts)
    assert len(step_layout(1, False, frozen=True, cuts=cuts).blocks[0]) == 2  # there are none


def test_a_trained_piece_that_nothing_uses_is_rejected() -> None:
    """It would never be updated, and what is committed would not be all of one step."""
    for order in (
        PieceOrder((0, 1), (Stage(0, True, True, True),)),
        PieceOrder((1,), one_by_one(2).order.backward),
    ):
        with pytest.raises(UserError, match="no pass through the block uses it"):
            step_layout(1, False, cuts={0: Cut(order)})
