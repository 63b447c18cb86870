"""Vision-language models train on text and on images as they do in memory, and are exported whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import fuyou
from common.errors import UserError
from common.models.adapters.options import AdapterOptions
from common.models.vision import tower_parameters
from fuyou.model.blocks.calls import BlockCalls
from tests.helpers.models.vision_families import (
    NAMED,
    OTHERS,
    PlainLoop,
    image_batch,
    save_checkpoint,
    text_batch,
)

# At 1e-8, gradients that are rounding become updates
OPTIONS = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}


def engine(checkpoint: Path, ssd: Path, **options: Any) -> fuyou.Engine:
    ssd.mkdir()
    usual = {
        "dtype": "fp32",
        "host_memory": "600MiB",
        "micro_batch": 2,
        "batch_shape": (3, 44),
        "prove": False,
    }
    options = {**usual, **OPTIONS, **options}
    return fuyou.Engine(checkpoint, ssd=[ssd], **options)


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()
    }


def train(trained: fuyou.Engine, loop: PlainLoop, batches: list[dict[str, Any]]) -> None:
    for batch in batches:
        out = trained(**batch)
        out.loss.backward()
        trained.step()
        assert out.loss.item() == pytest.approx(loop.step(batch, 2), abs=2e-6)
    masters = dict(trained.named_parameters())
    for name, parameter in loop.model.named_parameters():
        if name in masters:  # else it is tied to one that is
            torch.testing.assert_close(masters[name], parameter.detach(), rtol=0, atol=1e-5, msg=name)


def check_export(source: Path, directory: Path, untouched: frozenset[str]) -> None:
    before, after = tensors(source), tensors(directory)
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == untouched
    _, info = AutoModelForImageTextToText.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values())


def _some(families: tuple[str, ...], *fast: str) -> list[Any]:
    """The families; the slow tests have those that differ from the ``fast`` ones by numbers alone."""
    return [pytest.param(name, marks=[] if name in fast else pytest.mark.slow) for name in families]


@pytest.mark.parametrize("family", _some(NAMED, "qwen3_vl", "gemma4", "llama4"))
def test_text_and_images_with_frozen_towers(family: str, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", family)
    frozen = frozenset(tower_parameters(AutoModelForImageTextToText.from_pretrained(source)))
    assert frozen
    loop = PlainLoop(source, frozen, **OPTIONS)
    with engine(source, tmp_path / "ssd", prove=True) as trained:
        train(trained, loop, [text_batch(1), image_batch(family, 2), image_batch(family, 3), text_batch(4)])
        trained.save_pretrained(tmp_path / "tuned")
    on_disk = {name for name, value in tensors(source).items() if _is_frozen(name, value, loop, frozen)}
    check_export(source, tmp_path / "tuned", frozenset(on_disk))


def _is_frozen(name: str, value: torch.Tensor, loop: PlainLoop, frozen: frozenset[str]) -> bool:
    """Whether a tensor on disk is one of ``frozen`` or a buffer: by its values, as its name may be another."""
    parameters = dict(loop.model.named_parameters())
    if any(torch.equal(parameters[one], value) for one in frozen if parameters[one].shape == value.shape):
        return True
    return any(torch.equal(buffer, value) for buffer in loop.model.buffers() if buffer.shape == value.shape)


@pytest.mark.parametrize("family", _some(("qwen3_vl", "gemma4"), "qwen3_vl"))
def test_towers_that_are_trained_rest_in_steps_without_images(family: str, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", family)
    loop = PlainLoop(source, frozenset(), **OPTIONS)
    options = {"freeze_vision_tower": False, "freeze_multi_modal_projector": False}
    with engine(source, tmp_path / "ssd", **options) as trained:
        train(trained, loop, [image_batch(family, 2), text_batch(1), image_batch(family, 3)])


def test_a_projector_alone_is_trained_next_to_the_language_model(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", "internvl")
    model = AutoModelForImageTextToText.from_pretrained(source)
    frozen = frozenset(name for name in tower_parameters(model) if "multi_modal_projector" not in name)
    loop = PlainLoop(source, frozen, **OPTIONS)
    with engine(source, tmp_path / "ssd", freeze_multi_modal_projector=False) as trained:
        train(trained, loop, [image_batch("internvl", 2), text_batch(1)])


@pytest.mark.parametrize("family", _some(OTHERS, "qwen2_vl", "gemma3", "llava", "idefics3"))
def test_one_step_on_images_is_that_of_memory(family: str, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", family)
    frozen = frozenset(tower_parameters(AutoModelForImageTextToText.from_pretrained(source)))
    loop = PlainLoop(source, frozen, **OPTIONS)
    with engine(source, tmp_path / "ssd") as trained:
        train(trained, loop, [image_batch(family, 2)])
        trained.save_pretrained(tmp_path / "tuned")
    assert tensors(source).keys() == tensors(tmp_path / "tuned").keys()


def test_adapters_stay_out_of_towers_and_a_merged_checkpoint_is_whole(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", "qwen3_5")
    with engine(source, tmp_path / "ssd", adapters=AdapterOptions(4)) as trained:
        for batch in (image_batch("qwen3_5", 2), text_batch(1)):
            trained(**batch).loss.backward()
            trained.step()
        trained.save_pretrained(tmp_path / "tuned", merge=True)
    adapters = tensors(tmp_path / "tuned")
    assert adapters and not any("visual" in name for name in adapters)
    before, after = tensors(source), tensors(tmp_path / "tuned" / "merged")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.endswith("proj.weight") or "in_proj" in name for name in changed)


def test_what_is_frozen_is_exported_in_the_dtype_of_the_run(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", "qwen3_5")  # fp32
    with engine(source, tmp_path / "ssd", dtype="bf16") as trained:
        trained(**text_batch(1)).loss.backward()
        trained.step()
        trained.save_pretrained(tmp_path / "tuned")
    before, after = tensors(source), tensors(tmp_path / "tuned")
    for name, value in after.items():
        if "visual" in name:
            assert torch.equal(value, before[name].bfloat16())
        else:
            assert value.dtype == torch.bfloat16 and not torch.equal(value.float(), before[name])


def test_images_of_a_batch_that_is_split_come_as_lists(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", "internvl")
    batch = image_batch("internvl", 2)
    batch["pixel_values"] = torch.zeros(5, 3, 16, 16)
    with (
        engine(source, tmp_path / "ssd") as trained,
        pytest.raises(UserError, match="give a list of 3 tensors"),
    ):
        trained(**batch)


def test_a_tower_that_does_not_fit_is_rejected_with_its_size(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", "qwen3_vl")
    with pytest.raises(UserError, match=r"in towers that stay on the device\) with a micro-batch"):
        engine(source, tmp_path / "ssd", host_memory="100MiB")


def test_memory_for_images_is_planned_when_they_come(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", "qwen3_vl")
    with engine(source, tmp_path / "ssd") as trained:
        text = trained.memory_plan.device_bytes
        trained(**image_batch("qwen3_vl", 2)).loss.backward()
        trained.step()
        assert trained.memory_plan.device_bytes > text


def test_a_gradient_that_only_images_bring_into_a_block_is_not_lost_silently() -> None:
    calls = BlockCalls()
    features = torch.ones(3, requires_grad=True)
    calls.add((), {"told": torch.ones(3)}, None)
    assert calls.lost_gradient() is None
    calls.add((), {"told": features * 2}, None)
    block, path = calls.lost_gradient() or (-1, "")
    assert block == 1 and "told" in path
