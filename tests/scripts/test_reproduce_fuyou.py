"""The paper's scheme, against its equations worked out by hand, the sizes that its text gives, and its prices."""

from dataclasses import replace

import pytest

from common.hardware.presets import drive_preset, gpu_preset
from fuyou.planner import Machine, TrainingJob, describe_training, preset_machine
from fuyou.planner.rates import TaskRates
from fuyou.schedule.tasks import Resource
from scripts.reproduce_fuyou import PaperScheme, Swap, tokens_per_dollar

RATES = TaskRates(200e12, 25e9, 25e9, 25e9, 25e9, 4e9)


@pytest.fixture(scope="module")
def model() -> TrainingJob:
    return describe_training("gpt3-13b", 1, 1024)


def server(rates: TaskRates = RATES, host: int = 768 << 30) -> Machine:
    return Machine("A100", "drives", rates, 80 << 30, host)


def presets(gpu: str, host_gb: int) -> Machine:
    return preset_machine(gpu_preset(gpu), drive_preset("p5510"), 12, host_gb << 30)


def test_thirty_bytes_per_parameter_and_step(model: TrainingJob) -> None:
    result = PaperScheme(model.with_batch(4), server()).plan()
    elements = sum(record.numel for record in model.shape.records)
    assert result.written_bytes == 14 * elements
    assert 16 * elements * 0.9 < result.read_bytes <= 16 * elements  # what is still there at the turn is not read again
    assert result.to_json()["micro_batches"] == 1 and result.deferred_fraction == 0.0
    assert result.ssd_bytes == 14 * elements


@pytest.mark.parametrize(("batch", "swaps"), [(32, False), (64, True), (80, True)])
def test_swap_coefficients_of_section_5_6(model: TrainingJob, batch: int, swaps: bool) -> None:
    assert (PaperScheme(model.with_batch(batch), server()).swap().coefficient > 0) == swaps


def test_equation_1_by_hand(model: TrainingJob) -> None:
    scheme = PaperScheme(model.with_batch(32), server(replace(RATES, flops_per_second=1e18)))
    p = sum(record.numel for record in model.shape.records)
    inputs = 40 * 2 * 32 * 1024 * 5120
    forward = (2 * p + inputs) / 25e9
    backward = (14 * p + inputs + 14 * p) / 25e9
    assert scheme.iteration_seconds(0, 0.0) == pytest.approx(forward + backward)


def test_equation_1_without_overlap_by_hand(model: TrainingJob) -> None:
    scheme = PaperScheme(model.with_batch(32), server(replace(RATES, flops_per_second=1e18)), overlaps=False)
    p = sum(record.numel for record in model.shape.records)
    inputs = 40 * 2 * 32 * 1024 * 5120
    forward, optimizer = (2 * p + inputs) / 25e9, 28 * p / 25e9
    backward = (2 * p + inputs + 2 * p) / 25e9  # gradients go to the drives
    assert scheme.iteration_seconds(0, 0.0) == pytest.approx(forward + backward + optimizer)


def test_swapping_everything_leaves_nothing_to_recompute(model: TrainingJob) -> None:
    scheme = PaperScheme(model.with_batch(64), server(replace(RATES, flops_per_second=1e12)))
    swap = scheme.swap()
    assert swap.coefficient == 1.0 and swap.linears == (40, 40, 40, 40)
    assert swap.nbytes == 40 * 9 * 64 * 1024 * 5120 * 2
    assert swap.saved_flops == pytest.approx(scheme.forward_flops, rel=0.001)
    none, everything = (scheme.simulate(one)[0].busy[Resource.GPU] for one in (Swap((0, 0, 0, 0)), swap))
    assert everything / none == pytest.approx(6 / 8, rel=0.02)


def test_overlapping_the_optimizer_helps(model: TrainingJob) -> None:
    scheme = PaperScheme(model.with_batch(32), server())
    alone = replace(scheme, overlaps=False)
    together, apart = (one.simulate()[0].step_seconds() for one in (scheme, alone))
    assert 1.05 < apart / together < 2


@pytest.mark.parametrize(("gpu", "host", "fits", "too_large"), [
    ("rtx-4090", 128, "gpt3-65b", "gpt3-135b"),
    ("rtx-4090", 768, "gpt3-276b", "gpt3-412b"),
    ("a100-80g", 768, "gpt3-805b", None),
    ("a100-80g", 384, "gpt3-412b", "gpt3-805b"),
])  # fmt: skip
def test_largest_models_of_section_5_2(gpu: str, host: int, fits: str, too_large: str | None) -> None:
    on = presets(gpu, host)
    assert PaperScheme(describe_training(fits, 1, 1024), on).missing() == ()
    if too_large:
        lacks = PaperScheme(describe_training(too_large, 1, 1024), on).missing()
        assert lacks and "memory" in lacks[0]


def test_six_drives_give_most_tokens_per_dollar() -> None:
    """Section 5.7: for 175B on a 4090 they rise with the drives up to 6, and 12 are too many."""
    few, six, twelve = (tokens_per_dollar(drives)[0] for drives in (2, 6, 12))
    assert few < six > twelve
