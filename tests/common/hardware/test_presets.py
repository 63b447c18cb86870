"""Presets of GPUs and drives: the numbers of the paper's own hardware, names people type, and what is not known."""

import pytest

from common.errors import UserError
from common.hardware.presets import drive_names, drive_preset, gpu_names, gpu_preset


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("4090", "rtx-4090"), ("RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("a100", "a100-80g"),
        ("A100-80GB", "a100-80g"), ("h100", "h100"), ("NVIDIA H100 80GB HBM3", "h100"), ("H100 PCIe", "h100-pcie"),
        ("a6000", "rtx-a6000"),
    ],
)  # fmt: skip
def test_gpus_are_found_as_people_write_them(typed, name):
    assert gpu_preset(typed).name == name


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("p5510", "intel-p5510-3.84tb"), ("Intel D7-P5510", "intel-p5510-3.84tb"), ("P44 Pro", "solidigm-p44-pro-2tb"),
        ("990 Pro 4TB", "samsung-990-pro-4tb"), ("sn850x-2tb", "wd-sn850x-2tb"), ("t500", "crucial-t500-2tb"),
    ],
)  # fmt: skip
def test_drives_are_found_as_people_write_them(typed, name):
    assert drive_preset(typed).name == name


@pytest.mark.parametrize(("find", "typed", "message"), [
    (gpu_preset, "rtx-4900", "'rtx-4900' is not a GPU preset. Did you mean 'rtx-4090'?"),
    (gpu_preset, "quantum", "There are a100-80g, h100,"),
    (gpu_preset, "", "is not a GPU preset"),
    (drive_preset, "990-pro", "matches several drive presets: samsung-990-pro-2tb, samsung-990-pro-4tb. Name one"),
    (drive_preset, "crucial-t600-2tb", "Did you mean 'crucial-t"),
])  # fmt: skip
def test_a_missing_thing_is_reported_with_the_alternatives(find, typed, message):
    with pytest.raises(UserError) as caught:
        find(typed)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", gpu_names())
def test_gpus_are_plausible(name):
    gpu = gpu_preset(name)
    assert gpu.name == name
    assert 20e9 <= gpu.upload_bytes_per_second <= gpu.link_bytes_per_second
    assert 20e9 <= gpu.download_bytes_per_second <= gpu.link_bytes_per_second
    assert (gpu.block_flops_per_second or 0) <= gpu.bf16_flops_per_second


@pytest.mark.parametrize("name", drive_names())
def test_drives_are_plausible(name):
    drive = drive_preset(name)
    assert drive.name == name
    assert (drive.sustained_write_bytes_per_second or 0) <= drive.write_bytes_per_second <= drive.read_bytes_per_second
    assert (drive.cache_bytes or 0) < drive.capacity_bytes
    assert drive.endurance_bytes is None or 100 <= drive.endurance_bytes / drive.capacity_bytes <= 5000
