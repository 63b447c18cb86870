"""Records: nothing overlaps, everything is aligned, chunks cover exactly."""

import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.memory.buffers import PAGE
from common.store import Layout
from common.store.layout import pieces
from fuyou.layout.record import (
    FROZEN_FILE,
    PAGE_ELEMENTS,
    Kind,
    Precision,
    Record,
    allocate_extents,
    weights_file,
)
from fuyou.layout.record_parts import ALIGN_ELEMENTS, is_matrix
from fuyou.layout.share import Share

DTYPES = (torch.bfloat16, torch.float32)
PRECISIONS = [Precision(dtype) for dtype in DTYPES]

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 5000)),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    wanted = draw(st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=8))
    parameters = [((f"p{index}", f"alias{index}") if index % 3 == 0 else (f"p{index}",), shape, decay)
                  for index, (shape, decay) in enumerate(wanted)]  # fmt: skip
    return Record.build(
        draw(st.integers(0, 5)), "block 3", draw(st.sampled_from(Kind)), draw(st.sampled_from(PRECISIONS)), parameters,
        trainable=draw(st.booleans()),
    )  # fmt: skip


@given(records())
def test_layout(record: Record) -> None:
    owner = [None] * record.numel
    for slot in record.parameters:
        assert slot.offset % ALIGN_ELEMENTS == 0
        assert slot.name == slot.names[0]
        for element in range(slot.offset, slot.offset + slot.numel):
            assert owner[element] is None, f"{slot.name} overlaps {owner[element]}"
            owner[element] = slot.name
        inside = slot.offset + slot.numel <= record.decayed if slot.decay else slot.offset >= record.decayed
        assert inside, f"{slot.name} is in the wrong part"
    assert record.numel % PAGE_ELEMENTS == 0 and record.decayed % PAGE_ELEMENTS == 0
    assert record.numel * 2 % PAGE == 0
    assert record.parameter_count == sum(torch.Size(slot.shape).numel() for slot in record.parameters)
    # No more padding than alignment costs.
    assert record.numel < record.parameter_count + ALIGN_ELEMENTS * len(record.parameters) + 2 * PAGE_ELEMENTS


@given(records(), st.integers(1, 4).map(lambda pages: pages * PAGE_ELEMENTS))
def test_chunks_cover_exactly(record: Record, size: int) -> None:
    chunks = record.chunks(size)
    position = 0
    for chunk in chunks:
        assert chunk.start == position and chunk.start % PAGE_ELEMENTS == 0
        assert 0 < chunk.stop - chunk.start <= size and (chunk.stop - chunk.start) % PAGE_ELEMENTS == 0
        assert chunk.decay == (chunk.start < record.decayed)
        assert not (chunk.start < record.decayed < chunk.stop)
        position = chunk.stop
    assert position == record.numel
    assert len(chunks) == -(-record.decayed // size) + -(-(record.numel - record.decayed) // size)


# -- on SSD -----------------------------------------------------------------------------------------------------------


@given(st.lists(records(), min_size=1, max_size=5), st.integers(1, 4))
def test_extents(wanted: list[Record], directories: int) -> None:
    layout = Layout(directories)
    extents = allocate_extents(layout, wanted)
    assert len(extents) == len(wanted)
    for record, places in zip(wanted, extents, strict=True):
        if not record.trainable:
            assert (
                len(places.parameters) == 1 and not places.states and places.parameters[0].file == FROZEN_FILE
            )
            assert places.parameters[0].nbytes == record.numel * record.precision.parameter_bytes
            continue
        assert len(places.parameters) == len(places.states) == 2
        for slot in range(2):
            assert places.parameters[slot].file == places.states[slot].file == weights_file(slot)
            assert places.parameters[slot].nbytes == record.numel * record.precision.parameter_bytes
            assert places.states[slot].nbytes == record.numel * record.precision.state_bytes
    # No two of them share a byte.
    everything = [extent for places in extents for extent in (*places.parameters, *places.states)]
    for file in layout.file_bytes():
        taken: list[tuple[int, int, int]] = []
        for extent in everything:
            if extent.file == file:
                for piece in pieces(extent, directories, 0, extent.nbytes):
                    taken.append((piece.directory, piece.offset, piece.offset + piece.nbytes))
        taken.sort()
        for (directory, _, stop), (other, start, _) in pairwise(taken):
            assert directory != other or stop <= start
    assert set(layout.file_bytes()) == {extent.file for extent in everything}
    # The optimizer process computes the same places on its own.
    again = pickle.loads(pickle.dumps(wanted))
    assert allocate_extents(Layout(directories), again) == extents


@given(records(), st.sampled_from(PRECISIONS))
def test_chunks_of_states_and_parameters_are_whole_pages(record: Record, precision: Precision) -> None:
    for chunk in record.chunks(PAGE_ELEMENTS * 2):
        for width in (precision.parameter_bytes, precision.state_bytes):
            assert chunk.start * width % PAGE == 0 and chunk.stop * width % PAGE == 0


@pytest.mark.parametrize(("name", "shape", "matrix"), [
    ("model.embed_tokens.weight", (211, 48), True),
    ("model.layers.0.mlp.up_proj.weight", (72, 48), True),
    ("model.layers.0.mlp.experts.gate_up_proj", (4, 48, 96), True),
    ("model.layers.0.input_layernorm.weight", (48,), False),
    ("model.layers.0.self_attn.q_proj.bias", (48,), False),
    ("model.layers.0.mlp.experts.down_proj_bias", (4, 48), False),
    ("scale", (), False),
])  # fmt: skip
def test_which_parameters_are_rounded(name: str, shape: tuple[int, ...], matrix: bool) -> None:
    assert is_matrix(name, shape) is matrix


@pytest.mark.parametrize("trainable", [True, False])
def test_a_share_does_not_depend_on_an_earlier_share(trainable: bool) -> None:
    """Ranks that continue a run of other ranks know both layouts."""
    parameters = [(("matrix",), (64, 70), True), (("bias",), (7,), False)]
    record = Record.build(
        0, "block 0", Kind.BLOCK, Precision(torch.bfloat16), parameters, trainable=trainable
    )
    shares = [Share(), Share(1, 2, 0, 1), Share(3, 1, 2, 0)]
    for first in shares:
        for second in shares:
            assert record.shared(first).shared(second) == record.shared(second)
    assert record.shared(Share()) == record
