"""What a directory may hold that is named as a model."""

from pathlib import Path

import pytest

from common.errors import UserError
from common.models.names import check_model


@pytest.mark.parametrize("weights", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_adapters_next_to_a_whole_model_are_refused(weights: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / weights).touch()
    check_model(str(tmp_path))
    (tmp_path / "adapter_config.json").touch()
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(UserError, match=r"holds adapter_config\.json next to the weights of a whole model"):
        check_model(str(tmp_path))
