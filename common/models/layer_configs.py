"""The configuration of each layer of a model."""

from collections.abc import Sequence

from transformers import PreTrainedConfig


def layer_configs(config: PreTrainedConfig) -> Sequence[PreTrainedConfig]:
    """Return the configuration of each layer, in order.

    In some families layers differ (Gemma 4: the width of heads), and a configuration refuses to say what is not the
    same in all of them.
    """
    return getattr(config, "per_layer_config", None) or [config] * (getattr(config, "num_hidden_layers", None) or 1)
