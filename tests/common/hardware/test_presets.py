"""Presets of GPUs and drives: the numbers of the paper's own hardware, names people type, and what is not known."""

from dataclasses import replace

import pytest

from common.errors import UserError
from common.files import preset_files
from common.hardware.presets import drive_names, drive_preset, gpu_names, gpu_preset


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("4090", "rtx-4090"), ("RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("a100", "a100-80g"),
        ("A100-80GB", "a100-80g"), ("h100", "h100"), ("NVIDIA H100 80GB HBM3", "h100"), ("H100 PCIe", "h100-pcie"),
        ("a6000", "rtx-a6000"), ("3060", "rtx-3060-12gb"), ("MI300X", "mi300x"),
        ("4060 Ti", "rtx-4060-ti-16gb"), ("L4", "l4"), ("A10", "a10"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super"), ("RTX PRO 6000", "rtx-pro-6000"),
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
    (gpu_preset, "quantum", "There are a10, a100-80g, a40, h100,"),
    (gpu_preset, "", "is not a GPU preset"),
    (drive_preset, "990-pro", "matches several drive presets: samsung-990-pro-2tb, samsung-990-pro-4tb. Name one"),
    (drive_preset, "crucial-t600-2tb", "Did you mean 'crucial-t"),
])  # fmt: skip
def test_a_missing_thing_is_reported_with_the_alternatives(find, typed, message):
    with pytest.raises(UserError) as caught:
        find(typed)
    assert message in str(caught.value)


GPU_FILE, DRIVE_FILE = (
    preset_files(kind)[name] for kind, name in (("gpus", "rtx-3090"), ("drives", "wd-sn850x-2tb"))
)


def test_a_file_describes_what_no_preset_does(tmp_path):
    gpu, drive = tmp_path / "my gpu.toml", tmp_path / "drive.toml"
    gpu.write_text(GPU_FILE.read_text().replace('"24GiB"', '"20GiB"'))
    drive.write_text(DRIVE_FILE.read_text())
    assert gpu_preset(str(gpu)) == replace(gpu_preset("3090"), name="my gpu", memory_bytes=20 << 30)
    assert drive_preset(str(drive)) == replace(drive_preset("wd-sn850x-2tb"), name="drive")


@pytest.mark.parametrize(("change", "message"), [
    (lambda text: None, "gpu.toml cannot be read: No such file or directory"),
    (lambda text: text.replace("bf16_tflops", "tflops"), "gpu.toml does not give 'bf16_tflops'. The files in configs"),
    (lambda text: text.replace("link_gb_per_s =", "link_gb_per_s ="[:3]), "is not in the form of the files in configs"),
    (lambda text: text.replace('"24GiB"', '"much"'), "'much' is not a size"),
    (lambda text: text.replace("link_gb_per_s = 31.5", 'link_gb_per_s = "31.5"'), "is not in the form"),
    (lambda text: text.replace("link_gb_per_s = 31.5", "link_gb_per_s = 0"), "link_bytes_per_second = 0, and it must"),
])  # fmt: skip
def test_a_file_that_describes_no_gpu_is_rejected(change, message, tmp_path):
    text = change(GPU_FILE.read_text())
    if text is not None:
        (tmp_path / "gpu.toml").write_text(text)
    with pytest.raises(UserError) as caught:
        gpu_preset(str(tmp_path / "gpu.toml"))
    assert message in str(caught.value)


@pytest.mark.parametrize("name", gpu_names())
def test_gpus_are_plausible(name):
    gpu = gpu_preset(name)
    assert gpu.name == name
    assert 12e9 <= gpu.upload_bytes_per_second <= gpu.link_bytes_per_second
    assert 12e9 <= gpu.download_bytes_per_second <= gpu.link_bytes_per_second
    rates = gpu.compute
    assert 0.3 * rates.dense <= rates.experts <= rates.dense <= gpu.bf16_flops_per_second
    assert 0.4 * rates.dense <= rates.flash2.backward < rates.flash2.forward <= rates.dense
    assert all(
        kernel.backward <= kernel.forward <= gpu.bf16_flops_per_second for kernel in rates.attention.values()
    )
    assert 200e9 <= rates.memory <= 5e12


def test_hopper_reaches_no_more_in_attention_than_was_measured():
    """FlashAttention-2's paper has 335 TFLOP/s at most on an H100 (section 4.1)."""
    for name in ("h100", "h200", "h100-pcie"):
        assert gpu_preset(name).compute.flash2.forward <= 335e12
    assert gpu_preset("h100").compute.dense < 795e12  # the best single product that was measured


def test_a_gpu_without_rates_reaches_as_much_of_its_peak_as_another(tmp_path):
    assert gpu_preset("h100").like is None
    pcie, sxm = gpu_preset("h100-pcie"), gpu_preset("h100")
    assert pcie.like == "h100"
    assert pcie.compute.dense / pcie.bf16_flops_per_second == pytest.approx(sxm.compute.dense / 989e12)
    assert pcie.compute.memory == pytest.approx(0.85 * 2000e9)
    unknown = tmp_path / "new.toml"
    unknown.write_text('name = "new"\nmemory = "24GiB"\nlink_gb_per_s = 31.5\nbf16_tflops = 312\n')
    assert gpu_preset(str(unknown)).compute == gpu_preset("a100").compute
    unknown.write_text(unknown.read_text() + 'like = "h1000"\n')
    with pytest.raises(UserError, match="no preset 'h1000'"):
        gpu_preset(str(unknown))


@pytest.mark.parametrize("name", drive_names())
def test_drives_are_plausible(name):
    drive = drive_preset(name)
    assert drive.name == name
    assert (
        (drive.sustained_write_bytes_per_second or 0)
        <= drive.write_bytes_per_second
        <= drive.read_bytes_per_second
    )
    assert (drive.cache_bytes or 0) < drive.capacity_bytes
    assert drive.endurance_bytes is None or 100 <= drive.endurance_bytes / drive.capacity_bytes <= 5000
