import json
import time
from decimal import Decimal

import pytest
from transformers import LlamaConfig

from common.errors import UserError
from common.models.flops import active_parameters
from common.models.meta_model import build_meta_model
from common.models.presets import load_config
from tests.helpers.models.families import family_config

# Where the name is not the size: counts by the tables that the presets come from.
PUBLISHED = {"llama-7b": 6.7e9, "llama-30b": 32.5e9, "gpt-10b": 11.3e9, "gpt-15b": 16.2e9, "gpt-20b": 21.6e9}

# Mixtures of experts: parameters in all and used by a token, in billions as their authors write them, and how many of
# the two embedding matrices (input, output) the latter counts. (arXiv:2412.19437 and its README_WEIGHTS; 2507.20534;
# 2505.09388; 2508.10925; 2508.06471; the model card of Qwen3-Next.)
MIXTURES = {
    "deepseek-v3": ("671", "36.6", 1), "kimi-k2": ("1e3", "32", 1), "qwen3-30b-a3b": ("30.5", "3", 2),
    "qwen3-235b-a22b": ("235", "22", 2), "gpt-oss-20b": ("20.91", "3.61", 1), "gpt-oss-120b": ("116.83", "5.13", 1),
    "glm-4.5-air": ("106", "12", 0), "qwen3-next-80b-a3b": ("80", "3", 0),
}  # fmt: skip

EXPECTED = [
    *(
        f"gpt3-{size}"
        for size in ["1.3b", "2.7b", "13b", "33b", "65b", "135b", "175b", "276b", "412b", "805b"]
    ),
    *(f"gpt-{size}" for size in ["10b", "15b", "20b", "25b", "30b"]),
    *(f"llama-{size}" for size in ["10m", "7b", "3-8b", "13b", "30b", "65b"]),
    *("gpt-neox-10b", "gpt-neox-20b", "gpt2-125m", "gpt2-350m"),
]


@pytest.mark.parametrize("name", EXPECTED)
def test_preset_has_the_size_in_its_name(name):
    config, directory = load_config(name)
    model = build_meta_model(config)
    number, unit = name.rpartition("-")[2][:-1], name[-1]
    expected = PUBLISHED.get(name, float(number) * {"m": 1e6, "b": 1e9}[unit])
    assert directory is None
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(expected, rel=0.03)
    assert all(p.is_meta for p in model.parameters())
    dropouts = {
        k: v for k, v in config.to_dict().items() if k.endswith(("_pdrop", "_dropout")) and "summary" not in k
    }
    dropouts.pop("classifier_dropout", None)
    assert dropouts and not any(dropouts.values()), dropouts


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_its_published_size(name):
    total, active, counted = MIXTURES[name]
    start = time.process_time()
    model = build_meta_model(load_config(name)[0])
    assert time.process_time() - start < 10
    embeddings = model.get_input_embeddings().weight.numel() + model.get_output_embeddings().weight.numel()
    assert _agrees(sum(p.numel() for p in model.parameters()), total)
    assert _agrees(active_parameters(model, model) - embeddings * (2 - counted) / 2, active)


def _agrees(count: float, published: str) -> bool:
    """Whether a count is within 1 % of a figure in billions, or would be rounded to it."""
    half = 0.5 * 10.0 ** Decimal(published).as_tuple().exponent
    return abs(count / 1e9 - float(published)) <= max(0.01 * float(published), half)


def test_a_directory_wins_over_a_preset_and_says_where_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-7b").mkdir()
    # An empty directory of that name is not in the way
    assert load_config("llama-7b")[0].num_hidden_layers == 32
    family_config("llama").save_pretrained("llama-7b")
    config, directory = load_config("llama-7b")
    assert isinstance(config, LlamaConfig) and config.num_hidden_layers == 3
    assert directory.samefile(tmp_path / "llama-7b")


def test_an_unknown_type_of_a_known_class(tmp_path):
    """Kimi K2's config.json, as it is published: DeepSeek-V3's class, with its own code that is not run."""
    preset, _ = load_config("kimi-k2")
    published = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "_name_or_path": "a directory of its authors",
        "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "bos_token_id": 163584,
        "eos_token_id": 163585, "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168,
        "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
        "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.48.3", "use_cache": True,
        "v_head_dim": 128, "vocab_size": 163840,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    config, directory = load_config(tmp_path)
    assert (
        directory == tmp_path and config.name_or_path == str(tmp_path) and config.model_type == "deepseek_v3"
    )
    assert not hasattr(config, "quantization_config")
    others = {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "eos_token_id",
        "dtype",
        "transformers_version",
    }
    for name in preset.to_dict().keys() - others - {"rope_parameters"}:
        assert getattr(config, name) == getattr(preset, name), name
    assert config.rope_parameters.items() >= preset.rope_parameters.items()
    shapes = [
        {name: parameter.shape for name, parameter in build_meta_model(one).named_parameters()}
        for one in (config, preset)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(("name", "words"), [
    ("gpt3-175", ["gpt3-175b"]),
    ("zzz", ["neither", "gpt3-175b", "llama-7b"]),
    ("./lama", ["'llama'", "in "]),
    ("nowhere/model", ["neither a directory nor in the local cache", "hf download nowhere/model"]),
    ("file.txt", ["is a file"]),
    ("empty", ["no config.json"]),
    ("outer", ["no config.json", "outer/inner"]),
    ("adapter", ["PEFT adapter"]),
    ("damaged", ["damaged/config.json"]),
    ("unknown", ["unknown/config.json", "no_such_type"]),
    ("t5", ["'t5'", "causal"]),
    ("quantized", ["quantized", "gptq"]),
])  # fmt: skip
def test_not_a_model_is_rejected(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("llama", "empty", "outer/inner", "adapter", "damaged", "unknown", "t5", "quantized"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "file.txt").touch()
    (tmp_path / "adapter/adapter_config.json").touch()
    (tmp_path / "outer/inner/config.json").write_text("{}")
    (tmp_path / "damaged/config.json").write_text("{")
    (tmp_path / "unknown/config.json").write_text(json.dumps({"model_type": "no_such_type"}))
    (tmp_path / "t5/config.json").write_text(json.dumps({"model_type": "t5"}))
    quantized = {
        **family_config("llama").to_dict(),
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    }
    (tmp_path / "quantized/config.json").write_text(json.dumps(quantized))
    with pytest.raises(UserError) as error:
        load_config(name)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(("changes", "message"), [
    ({"rope_theta": 500.0, "rope_parameters": None}, None),
    ({"rope_theta": 777.0}, None),
    ({"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, None),
    ({"rope_theta": 500.0}, "rope_theta = 500.0, and transformers reads 777.0"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_theta = 777.0, and transformers reads 10000.0"),
    ({"rope_theta": 777.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
      "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 777.0}}, "factor = 4.0"),
])  # fmt: skip
def test_rotary_embeddings_in_two_forms_that_differ_are_refused(changes, message, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 777.0}
    fields = {**LlamaConfig(num_hidden_layers=1).to_dict(), "rope_parameters": rope, **changes}
    written = {name: value for name, value in fields.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(written))
    if message is None:
        read = load_config(tmp_path)[0].rope_parameters
        assert read["rope_theta"] == changes["rope_theta"] and read.get("factor", 1.0) in (1.0, 2.0)
    else:
        with pytest.raises(UserError, match=f"config.json says {message}"):
            load_config(tmp_path)
