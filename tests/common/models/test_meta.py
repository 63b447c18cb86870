import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from tests.helpers.models.families import FAMILIES, family_config


class LargestCpuTensor(TorchDispatchMode):
    """Records the largest tensor that any operation makes on the CPU."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self.numel = max(self.numel, leaf.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_those_of_a_real_model(family, dtype):
    config = family_config(family)
    meta, real = build_meta_model(config, dtype=dtype), AutoModelForCausalLM.from_config(config, dtype=dtype)
    expected = dict(real.named_buffers())
    assert dict(meta.named_buffers()).keys() == expected.keys()
    for name, buffer in meta.named_buffers():
        assert buffer.device.type == "cpu" and buffer.dtype == expected[name].dtype
        assert torch.equal(buffer, expected[name]), name
    assert [n for n, _ in meta.named_non_persistent_buffers()] == [
        n for n, _ in real.named_non_persistent_buffers()
    ]
    for (name, parameter), (real_name, real_parameter) in zip(
        meta.named_parameters(), real.named_parameters(), strict=True
    ):
        assert parameter.is_meta and parameter.requires_grad
        assert (name, parameter.shape, parameter.dtype) == (
            real_name,
            real_parameter.shape,
            real_parameter.dtype,
        )
    assert meta.training and all(module.training for module in meta.modules())
    assert meta.config.use_cache is False


def test_the_largest_preset_allocates_no_parameter():
    config, _ = load_config("gpt3-805b")
    with LargestCpuTensor() as largest:
        build_meta_model(config)
    assert largest.numel < 20_480 * 2_048  # its smallest matrix


def test_generation_config_comes_from_the_checkpoint(tmp_path):
    family_config("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 7}')
    assert build_meta_model(load_config(tmp_path)[0]).generation_config.max_new_tokens == 7
