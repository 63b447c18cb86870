"""What blocks keep while a model generates; and families that keep something else."""

import pytest
import torch

from common.errors import UserError
from common.models.meta_model import build_meta_model
from fuyou.layout.key_values import SLACK, KeyValueCache, LayerKeyValues
from fuyou.model.caching import find_key_values
from fuyou.model.streamed_model import StreamedModel
from tests.helpers.models.families import family_config
from tests.helpers.models.small_models import small_config


def found(config) -> tuple[LayerKeyValues, ...]:
    return find_key_values(StreamedModel(build_meta_model(config, dtype=torch.float32), torch.device("cpu")))


def test_heads_and_windows_of_each_block() -> None:
    wide = LayerKeyValues((2, 16), (2, 16))
    sliding = LayerKeyValues((2, 16), (2, 16), 8)
    assert found(family_config("gemma3_text")) == (sliding, sliding, wide)
    assert found(family_config("gpt2")) == (LayerKeyValues((4, 8), (4, 8)),) * 3


@pytest.mark.parametrize("family", ["mamba", "gemma3n_text", "qwen3_next"])
def test_what_is_no_key_and_no_value_is_refused(family: str) -> None:
    with pytest.raises(UserError, match=r"cannot keep keys and values .*: generate with use_cache=False, which comp"):
        found(small_config(family))


def test_bytes_by_tier() -> None:
    layers = (LayerKeyValues((2, 16), (2, 8)), LayerKeyValues((2, 16), (2, 8), window=20))
    cache = KeyValueCache(layers, itemsize=2, rows=6, tokens=200, device_layers=2)
    first, second = 6 * 200 * 48 * 2, 6 * (19 + SLACK) * 48 * 2
    moved = 2 * 4 * 200 * 48 * 2  # a micro-batch's prompt, of which a sliding block keeps the end
    assert cache.nbytes == first + second
    assert (cache.device_bytes(4), cache.host_bytes) == (first + second + moved, 0)
    one = cache.on_device(1)
    assert (one.device_bytes(4), one.host_bytes) == (first + second * 4 // 6 + moved, second)
    assert cache.covers(cache.sized(5, 200)) and not cache.covers(cache.sized(6, 201))
