"""Plans stay within their limits, and what they promise works."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, PreTrainedConfig

from common.errors import UserError
from common.models.adapters.options import AdapterOptions
from fuyou.layout.cutting import BYTES_PER_ELEMENT, filling_bytes, whole_elements
from fuyou.layout.frozen_weights import FrozenDtype
from fuyou.layout.model_layout import ModelLayout, interleaved
from fuyou.layout.record import PAGE_ELEMENTS, Kind, Precision
from fuyou.model.chunk_survey import chunk_survey
from fuyou.pieces.division import in_pieces
from fuyou.planner import describe_training
from fuyou.schedule.batch import Batch
from fuyou.schedule.memory_plan import ADAM_SCRATCH_BYTES, MemoryPlan
from fuyou.schedule.memory_planner import MemoryPlanner
from fuyou.schedule.tasks import Op
from tests.helpers.models.piece_models import PieceModel
from tests.helpers.schedule_model import Machine, build, check_order
from tests.helpers.step_layouts import BF16, step_layout

MEBIBYTE = 1 << 20
FP32 = Precision(torch.float32)


def config(hidden: int = 48, vocabulary: int = 211) -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=hidden, vocab_size=vocabulary, intermediate_size=3 * hidden, num_hidden_layers=3,
        num_attention_heads=2,
    )  # fmt: skip


def planner(
    layout: ModelLayout, device: int, host: int, cpu: bool = True, hidden: int = 48, vocabulary: int = 211,
    saving_layers: int = 0, kept: int = 0,
) -> MemoryPlanner:  # fmt: skip
    """``kept`` are the bytes that each of ``saving_layers`` blocks keeps of a token."""
    return MemoryPlanner(
        layout, config(hidden, vocabulary), device, host, cpu, saving_layers=saving_layers,
        saved_bytes=lambda batch: kept * batch.micro_tokens,
    )  # fmt: skip


def needs(error: UserError) -> dict[str, int]:
    """What the message says would be enough, in bytes, by option."""
    found = re.findall(r"(device|host)_memory of at least (\d+)MiB", str(error))
    assert found, str(error)
    return {name: int(size) * MEBIBYTE for name, size in found}


@st.composite
def situations(draw: st.DrawFn) -> dict:
    """A model, a batch, and limits around what they need."""
    return {
        "layers": draw(st.integers(1, 6)), "tied": draw(st.booleans()), "islands": draw(st.booleans()),
        "precision": draw(st.sampled_from([BF16, FP32])), "rows": draw(st.integers(1, 9)),
        "seq_len": draw(st.sampled_from([1, 7, 128, 1024])), "micro_rows": draw(st.none() | st.integers(1, 4)),
        "cpu": draw(st.booleans()), "hidden": draw(st.sampled_from([48, 1024])),
        "vocabulary": draw(st.sampled_from([211, 50_000])), "saving_layers": draw(st.sampled_from([0, 0, 1, 3])),
        "kept": draw(st.sampled_from([1, 100, 20_000])),
        "device": draw(st.integers(1, 400)) * MEBIBYTE // draw(st.sampled_from([1, 7, 64])),
        "host": draw(st.integers(100, 700)) * MEBIBYTE + draw(st.integers(0, MEBIBYTE)),
    }  # fmt: skip


def saving_count(situation: dict) -> int:
    return min(situation["saving_layers"], situation["layers"])


def layout_of(situation: dict) -> ModelLayout:
    return step_layout(
        situation["layers"], situation["tied"], situation["precision"], islands=situation["islands"]
    )


def plan_of(situation: dict, device: int | None = None, host: int | None = None) -> MemoryPlan:
    made = planner(
        layout_of(situation),
        situation["device"] if device is None else device, situation["host"] if host is None else host,
        situation["cpu"], situation["hidden"], situation["vocabulary"], saving_count(situation), situation["kept"],
    )  # fmt: skip
    return made.plan(situation["rows"], situation["seq_len"], situation["micro_rows"])


@settings(max_examples=200)
@given(situations())
def test_a_plan_is_within_its_limits_or_there_is_none(situation: dict) -> None:
    try:
        plan = plan_of(situation)
    except UserError as error:
        needs(error)
        return
    assert 0 < plan.device_bytes <= situation["device"]
    assert 0 < plan.host_bytes <= situation["host"]
    if situation["cpu"]:
        assert plan.device_bytes < plan.host_bytes
    batch, counts = plan.batch, plan.counts
    assert (batch.rows, batch.seq_len) == (situation["rows"], situation["seq_len"])
    assert 1 <= batch.micro_rows <= min(batch.rows, situation["micro_rows"] or batch.rows)
    if situation["micro_rows"]:
        assert batch.micro_rows == min(batch.rows, situation["micro_rows"])
    assert 1 <= plan.head_columns <= batch.seq_len
    assert plan.ring_chunks >= 2 and plan.chunk_elements % PAGE_ELEMENTS == 0
    width = situation["precision"].parameter_bytes
    assert plan.activation_bytes % 4096 == 0
    assert plan.activation_bytes >= batch.micro_tokens * situation["hidden"] * width
    assert 1 <= counts.host_blocks <= max(4, situation["layers"])
    total = saving_count(situation) * batch.micro_batches
    assert plan.saved_bytes % 4096 == 0 and (plan.saved_bytes > 0) == (total > 0)
    assert min(2, total) <= counts.device_saved <= total
    assert counts.ssd_saved in (0, total) and (
        counts.ssd_saved or counts.device_saved + counts.host_saved >= total
    )
    split = situation["precision"].split
    assert plan.wide_blocks == (split and batch.micro_batches > 1)
    assert plan.wide_non_block == (split and (batch.micro_batches > 1 or plan.head_columns < batch.seq_len))


@settings(max_examples=100)
@given(situations())
def test_what_the_plan_allocates_is_what_it_counts(situation: dict) -> None:
    """Summed up again from what the data plane allocates."""
    try:
        plan = plan_of(situation)
    except UserError:
        assume(False)
        return
    layout, counts = layout_of(situation), plan.counts
    device = counts.device_activations * plan.activation_bytes + counts.device_saved * plan.saved_bytes
    host = (
        counts.host_activations * plan.activation_bytes
        + counts.host_saved * plan.saved_bytes
        + plan.ring_chunks * plan.chunk_elements * layout.precision.state_bytes
    )
    for kind in {record.kind for record in layout.records}:
        elements, widths = zip(
            *((r.numel, r.precision.parameter_bytes) for r in layout.of_kind(kind)), strict=True
        )
        largest = max(elements) * widths[0]
        assert {*widths} == {widths[0]}
        wide, gradients = plan.sums_wide(kind), counts.device_gradients(kind)
        device += counts.device(kind) * largest + 4 * max(elements) * wide
        device += gradients * largest * (not wide or gradients > 1)
        host += (counts.host(kind) + counts.host_gradients(kind)) * largest
    for index in plan.resident:
        record = layout.records[index]
        host += int(record.numel * record.precision.state_bytes)
    assert device + plan.workspace_bytes == plan.device_bytes
    host += sum(len(record.parameters) for record in layout.records) * (15 << 10)
    assert host + (116 << 20) + (plan.device_bytes if situation["cpu"] else 0) == plan.host_bytes


@settings(max_examples=60)
@given(situations(), st.sampled_from([0, 0.5, 1]))
def test_every_plan_can_be_scheduled(situation: dict, defer: float) -> None:
    try:
        plan = plan_of(situation)
    except UserError:
        assume(False)
        return
    micro = plan.batch.micro_batches
    script = [("train", micro, True), ("eval", micro, True), ("train", micro, True), ("train", 1, True)]
    saving_layers = range(situation["layers"] - saving_count(situation), situation["layers"])
    program = build(
        situation["layers"], situation["tied"], plan.counts, script, defer=defer, saving_layers=saving_layers,
        islands=situation["islands"],
    )  # fmt: skip
    check_order(program)
    Machine(program).run_in_order()
    layout = program.layout
    if any(task.op is Op.GRADIENT_WRITE for task in program.tasks):
        assert plan.spills_gradients(layout, interleaved(layout, defer))


@settings(max_examples=100)
@given(situations())
def test_what_the_error_asks_for_works(situation: dict) -> None:
    """Each option alone if only one is too small, both if both are."""
    limits = {"device": situation["device"], "host": situation["host"]}
    try:
        plan_of(situation)
        assume(False)
    except UserError as error:
        wanted = needs(error)
        assert all(size > limits[name] for name, size in wanted.items())
        plan_of(situation, **wanted)


@settings(max_examples=100)
@given(situations())
def test_less_than_the_error_asks_for_does_not_work(situation: dict) -> None:
    # A batch that is not split needs no fp32 sums, so the smallest micro-batch is not always what needs least.
    assume(situation["micro_rows"] or situation["rows"] == 1)
    limits = {"device": situation["device"], "host": situation["host"]}
    try:
        plan_of(situation)
        assume(False)
    except UserError as error:
        wanted = needs(error)
    micro_tokens = min(situation["micro_rows"] or 1, situation["rows"]) * situation["seq_len"]
    activation = micro_tokens * situation["hidden"] * situation["precision"].parameter_bytes + 4096
    kept = situation["kept"] * micro_tokens + 4096 if saving_count(situation) else 0
    for name in wanted:
        # Two block inputs on the host are requested even where the device turns out to have room for all; and two
        # buffers of kept outputs.
        less = {**wanted, name: wanted[name] - MEBIBYTE - 2 * activation - 2 * kept}
        if less[name] > limits[name]:
            with pytest.raises(UserError):
                plan_of(situation, **less)


def test_what_is_left_of_the_host_holds_parameters_and_then_states() -> None:
    layout = step_layout(5, False)
    width, state = layout.precision.parameter_bytes, layout.precision.state_nbytes(1)
    block = layout.block_elements
    outer = [record.numel for record in layout.of_kind(Kind.NON_BLOCK)]

    def plan(cache: int | None) -> MemoryPlan:
        made = planner(layout, 8 << 30, 8 << 30)
        made.host_cache = cache
        return made.plan(8, 64, None)

    streamed, layers = plan(0), len(layout.blocks)
    assert (
        streamed.resident == () and streamed.counts.host_blocks == 4 and streamed.counts.host_non_block == 1
    )
    one = plan(block * width)
    assert one.resident == () and one.counts.host_blocks == 5
    assert one.host_bytes == streamed.host_bytes + block * width
    parameters = (layers - 4) * block * width + max(outer) * width
    assert plan(parameters + outer[0] * state).resident == (0,)
    assert plan(parameters + (sum(outer) + block) * state).resident == (0, 1, layout.blocks[-1][0])
    two = plan(parameters + (sum(outer) + 2 * block) * state)
    assert two.resident == (0, 1, layout.blocks[2][0], layout.blocks[4][0])
    everything = plan(None)
    assert everything.resident == tuple(range(len(layout.records)))
    total = sum(record.numel for record in layout.records) * state
    assert everything.host_bytes == streamed.host_bytes + parameters + total


def test_an_requested_micro_batch_is_kept_or_rejected() -> None:
    shape = step_layout(3, False)
    assert planner(shape, 4 << 30, 8 << 30).plan(16, 256, 3).batch == Batch(16, 256, 3)
    assert planner(shape, 4 << 30, 8 << 30).plan(2, 256, 3).batch == Batch(2, 256, 2)
    with pytest.raises(
        UserError, match=r"micro-batch of 16 x 256 tokens needs .* A smaller micro_batch needs less"
    ):
        planner(shape, 5 * MEBIBYTE, 8 << 30).plan(16, 256, 16)
    with pytest.raises(UserError, match="needs") as caught:
        planner(shape, MEBIBYTE // 4, 8 << 30).plan(16, 256, None)
    assert "micro_batch" not in str(caught.value) and "1 x 256" in str(caught.value)


def test_what_filling_a_store_reads_is_counted_where_blocks_are_in_pieces() -> None:
    """On an accelerator nothing else is idle then but Adam's scratch; of whole blocks it is not counted."""
    model = PieceModel("qwen3_moe")
    cut = in_pieces(model.stack, model.opened.layout, 4096)

    def host_bytes(layout: ModelLayout) -> int:
        planner = MemoryPlanner(layout, model.opened.config, 1 << 30, 1 << 30, False, host_cache=0)
        return planner.plan(1, 16, 1).host_bytes

    largest = max(slot.numel for record in cut.records for slot in record.parameters)
    assert filling_bytes(cut.records) == BYTES_PER_ELEMENT * largest < ADAM_SCRATCH_BYTES  # a single span
    whole, more = 64 << 20, 4 * (64 << 20) + BYTES_PER_ELEMENT * largest - ADAM_SCRATCH_BYTES
    assert host_bytes(replace(cut, read_whole=whole)) - host_bytes(cut) == more
    assert host_bytes(replace(model.opened.layout, read_whole=whole)) == host_bytes(model.opened.layout)
    names = {
        slot.names[0] for record in cut.records for slot in record.parameters if slot.experts is not None
    }
    experts = sum(model.stack.model.get_parameter(name).numel() for name in names)
    assert whole_elements(cut.records, lambda name: name not in names) == experts // len(model.stack.blocks)


def test_whole_rows_are_planned_without_a_look_at_keys_and_values() -> None:
    """To find them, all blocks run without values, which takes seconds with large models."""
    model, looks = PieceModel("qwen3_moe"), []
    layout = replace(
        model.opened.layout, key_memory=lambda: looks.append(1) or chunk_survey(model.stack).memory
    )
    planner = MemoryPlanner(layout, model.opened.config, 1 << 30, 1 << 30, False)
    for chunk in (None, 16, 64):
        assert planner.plan(1, 16, 1, chunk=chunk).batch.chunks == 1
    assert not looks
    assert planner.plan(1, 16, 1, chunk=8).batch.chunks == 2
    assert looks


def test_no_chunks_are_tried_where_a_decoded_block_exceeds_the_device() -> None:
    adapters = AdapterOptions(rank=4).peft_config()
    job, looks = describe_training(config(), 1, 4096, adapters=adapters, frozen=FrozenDtype.NF4), []
    layout = replace(job.layout, key_memory=lambda: looks.append(1) or chunk_survey(job.stack).memory)
    limit = layout.decoded_nbytes + layout.sizes[Kind.BLOCK].device_nbytes
    for device in (limit - 1, limit):
        assert not looks
        with pytest.raises(UserError):
            MemoryPlanner(layout, job.config, device, 1 << 30, False).plan(1, 4096, 1)
    assert looks
