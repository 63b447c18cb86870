"""Before a run, a small model shows that streaming changes nothing; a family whose split is broken is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BigBirdConfig,
    DeepseekV3Config,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fuyou
from common.errors import UserError
from common.files import CACHE_VARIABLE
from common.models.adapters.options import AdapterOptions
from fuyou.layout.record import Record
from fuyou.preflight import proof
from fuyou.runtime.compute.task_parameters import TaskParameters


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


# -- a family of our own whose blocks talk behind the model's back -----------------------------------------------------


class WhisperingConfig(LlamaConfig):
    model_type = "whispering"
    keeps_gradients: bool = True


heard: list[torch.Tensor] = []


class WhisperingLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if (
            self.self_attn.layer_idx
            and heard
            and heard[0].shape == hidden_states.shape
            and not hidden_states.is_meta
        ):
            hidden_states = hidden_states + 0.5 * heard[0]
        result = super().forward(hidden_states, *args, **kwargs)
        heard[:] = [result if self.self_attn.config.keeps_gradients else result.detach()]
        return result


class WhisperingForCausalLM(LlamaForCausalLM):
    config_class = WhisperingConfig

    def __init__(self, config: WhisperingConfig):
        super().__init__(config)
        for layer in self.model.layers:
            layer.__class__ = WhisperingLayer


@pytest.fixture
def _whispering() -> Iterator[None]:
    AutoConfig.register("whispering", WhisperingConfig)
    AutoModelForCausalLM.register(WhisperingConfig, WhisperingForCausalLM)
    yield
    del AutoModelForCausalLM._model_mapping._extra_content[WhisperingConfig]
    heard.clear()


@pytest.mark.usefixtures("_whispering")
@pytest.mark.parametrize("keeps_gradients", [True, False])
def test_blocks_that_read_a_global_of_other_blocks_are_rejected(
    keeps_gradients: bool, tmp_path: Path
) -> None:
    config = WhisperingConfig(keeps_gradients=keeps_gradients)
    (tmp_path / "ssd").mkdir()
    with pytest.raises(
        UserError, match=r"whispering cannot be trained out of core: .*(is off by|fails block by)"
    ):
        fuyou.Engine(config, ssd=[tmp_path / "ssd"])
    assert not list((tmp_path / "ssd").iterdir())


# -- families that are what they seem ----------------------------------------------------------------------------------

FAMILIES = [
    LlamaConfig(), GPT2Config(), Qwen3MoeConfig(), DeepseekV3Config(), Gemma4TextConfig(num_kv_shared_layers=10),
]  # fmt: skip


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_families_are_proven(config: PreTrainedConfig) -> None:
    before = torch.get_rng_state()
    fuyou.prove(config)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("head", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_dropout_after_the_blocks_draws_what_is_next(head: str) -> None:
    """The embedding of BERT has dropout, too, and its forward pass runs once more where that of the head does."""
    config = BertConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
        architectures=[head],
    )  # fmt: skip
    proof.prove(config)


@pytest.mark.parametrize("choice", ["auto", "on", "off"])
def test_router_losses_are_proven(choice: str) -> None:
    fuyou.prove(MixtralConfig(output_router_logits=choice == "auto"), router_loss=choice)


def test_what_is_wider_between_blocks_than_inside_is_rejected() -> None:
    """Mamba adds to its residual in fp32, for any dtype of its weights; what streams is bf16."""
    fuyou.prove(LlamaConfig(), dtype=torch.bfloat16)
    fuyou.prove(MambaConfig())
    with pytest.raises(UserError, match=r"hidden states in float32 .* train it with dtype fp32"):
        fuyou.prove(MambaConfig(), dtype=torch.bfloat16)
    fuyou.prove(MambaConfig(residual_in_fp32=False), dtype=torch.bfloat16)


def test_a_loss_that_the_family_rounds_is_computed_in_fp32() -> None:
    """BART computes its loss of logits in bf16."""
    fuyou.prove(BartConfig(), dtype=torch.bfloat16)


def test_modules_that_a_forward_pass_exchanges_are_rejected() -> None:
    config = BigBirdConfig(is_decoder=True, architectures=["BigBirdForCausalLM"])
    for adapters in (None, AdapterOptions(rank=4).peft_config()):
        with pytest.raises(
            UserError, match=r"a forward pass exchanges bert\.encoder\.layer\.0\.attention\.self"
        ):
            fuyou.prove(config, adapters=adapters)
    config.attention_type = "original_full"
    fuyou.prove(config)


def test_what_rounding_alone_changes_is_distinguished() -> None:
    """Without gradients, attention takes another kernel for Doge's masks."""
    with pytest.raises(UserError, match=r"in bfloat16: .* In fp32 they are equal: train it with dtype fp32"):
        fuyou.prove(CONFIG_MAPPING["doge"](), dtype=torch.bfloat16)


def test_adapters_parts_and_packed_rows_are_proven() -> None:
    fuyou.prove(LlamaConfig(), adapters=AdapterOptions(rank=4).peft_config())
    one_layer = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[30], task_type="CAUSAL_LM")
    fuyou.prove(LlamaConfig(), adapters=one_layer)
    assert one_layer.layers_to_transform == [30]
    named = LoraConfig(r=4, target_modules=["model.layers.30.self_attn.q_proj"], task_type="CAUSAL_LM")
    fuyou.prove(LlamaConfig(), adapters=named)
    for expert in (["layers.20.mlp.experts.gate_up_proj"], ["model.layers.20.mlp.experts.down_proj"]):
        fuyou.prove(
            Qwen3MoeConfig(), adapters=LoraConfig(r=4, target_modules=["q_proj"], target_parameters=expert)
        )
        fuyou.prove(Qwen3MoeConfig(), adapters=LoraConfig(r=4, target_modules=["q_proj", *expert]))
    ranks = {r"layers\.30\..*q_proj": 2, "v_proj": 8}
    last = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], rank_pattern=ranks)
    last.exclude_modules = ["layers.30.self_attn.v_proj"]
    fuyou.prove(LlamaConfig(), adapters=last)
    assert last.rank_pattern == ranks
    more = {"modules_to_save": ["lm_head"], "trainable_token_indices": {"embed_tokens": [31_998, 31_999]}}
    fuyou.prove(
        LlamaConfig(), adapters=LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **more)
    )
    fuyou.prove(LlamaConfig(), trainable=["model.layers.31.*", "model.layers.0.*", "lm_head.weight"])
    fuyou.prove(LlamaConfig(), packed=True)
    fuyou.prove(LlamaConfig(), adapters=AdapterOptions(4, dropout=0.1).peft_config(), packed=True)


def test_noise_of_routers_is_no_difference_of_packed_rows() -> None:
    """Documents alone draw other numbers, as they do for dropout."""
    fuyou.prove(MixtralConfig(router_jitter_noise=0.5), packed=True)
    fuyou.prove(MixtralConfig(router_jitter_noise=0.5))


@pytest.mark.parametrize("wanted", [1, 5, 9, 14])  # in each of the three steps
def test_every_difference_is_seen(wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, seen = TaskParameters._finish_gradient, []

    def disturbed(self: TaskParameters, record: Record, buffer: int) -> None:
        seen.append(record)
        if len(seen) == wanted:
            self._sums[record.index].flat[:4096] += 1e-3
        finish(self, record, buffer)

    monkeypatch.setattr(TaskParameters, "_finish_gradient", disturbed)
    with pytest.raises(UserError, match=r"gradient of (lm_head|model)"):
        fuyou.prove(LlamaConfig())


def test_a_proof_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    run = proof._Proof.run
    monkeypatch.setattr(proof._Proof, "run", lambda self: (ran.append(1), run(self)))
    fuyou.prove(LlamaConfig())
    fuyou.prove(
        LlamaConfig(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, intermediate_size=22016)
    )
    assert len(ran) == 1  # the same small model
    fuyou.prove(LlamaConfig(num_key_value_heads=8))
    assert len(ran) == 2
    monkeypatch.setattr(proof, "own_code", lambda: "changed")
    fuyou.prove(LlamaConfig())
    assert len(ran) == 3


def test_what_does_not_train_in_memory_is_not_called_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no such attention")

    monkeypatch.setattr(LlamaForCausalLM, "forward", fails)
    with pytest.raises(UserError, match=r"cannot be shown: .* does not train in memory|cannot be split"):
        fuyou.prove(LlamaConfig())
