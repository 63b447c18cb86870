"""Which weights are the same."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common.models.checkpoint.identity import weights_identity

WEIGHTS = {"a": torch.arange(5000.0), "b": torch.ones(3, 4, dtype=torch.bfloat16), "c": torch.zeros(())}


def saved(folder: Path, **files: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return weights_identity(folder)


def test_the_same_weights_in_other_files_are_the_same(tmp_path: Path) -> None:
    first = saved(tmp_path / "one", model=WEIGHTS)
    again = saved(tmp_path / "two", model=dict(reversed(WEIGHTS.items())))
    assert first == again != ""


def test_others_of_the_same_shapes_are_others(tmp_path: Path) -> None:
    first = saved(tmp_path / "first", model=WEIGHTS)
    for name, value in WEIGHTS.items():
        assert saved(tmp_path / name, model={**WEIGHTS, name: value + 1}) != first
        assert saved(tmp_path / f"{name}-fp64", model={**WEIGHTS, name: value.double()}) != first


def test_what_cannot_be_read_has_none(tmp_path: Path) -> None:
    assert weights_identity(None) == weights_identity(tmp_path) == ""
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert weights_identity(tmp_path) == ""


def test_the_start_of_a_tensor_is_where_its_values_are(tmp_path: Path) -> None:
    """Only that, whose middle is read, changes the identity."""
    first = saved(tmp_path / "model", model=WEIGHTS)
    file = tmp_path / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    place = content.index(WEIGHTS["a"][2500:2501].numpy().tobytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert not torch.equal(load_file(file)["a"], WEIGHTS["a"])
    assert weights_identity(tmp_path / "model") != first


def test_the_configuration_is_a_part_of_the_identity(tmp_path: Path) -> None:
    """The same weights compute otherwise with another one; who wrote it says nothing."""
    saved(tmp_path / "model", model=WEIGHTS)
    model, file = tmp_path / "model", tmp_path / "model" / "config.json"
    config = {"rms_norm_eps": 1e-6, "transformers_version": "5"}
    file.write_text(json.dumps(config))
    first = weights_identity(model)
    for change, is_same in (({"transformers_version": "9"}, True), ({"rms_norm_eps": 0.1}, False)):
        file.write_text(json.dumps(config | change))
        assert (weights_identity(model) == first) is is_same
