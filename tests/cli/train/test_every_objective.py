"""Every objective with every kind of model: it trains as a plain loop does, or is refused in a sentence that names
what the user has and what to give."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from common.data.demo_text import train_demo_tokenizer
from tests.cli.conftest import Finetune
from tests.helpers.command.histories import losses
from tests.helpers.models.images import image_checkpoint, image_data
from tests.helpers.models.small_checkpoints import SIZES, TOKENS

STEPS, ITEMS, LR, DECAY, EPS = 2, 3, 1e-3, 0.01, 1e-4
PAIRS = [
    {
        "prompt": f"{i} plus {i} is",
        "chosen": f" surely {2 * i}.",
        "rejected": f" maybe {i * i + 1}, who knows.",
    }
    for i in range(ITEMS)
]
DATA: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS],
    "pretrain": [{"text": f"Document {i} counts to {i * i}."} for i in range(ITEMS)],
    "dpo": PAIRS,
    "reward": PAIRS,
    "classify": [{"text": f"{i} and {i * i} are numbers", "label": i % 3} for i in range(ITEMS)],
}

DECODER = {name: value for name, value in SIZES.items() if name != "max_position_embeddings"} | {
    "max_position_embeddings": 128
}
MIXTURE = DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}
BOTH = TOKENS | {
    "d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 128, "decoder_start_token_id": 1,
    "dropout": 0.0,
}  # fmt: skip
ENCODER = DECODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SPEECH = {"num_mel_bins": 8, "max_source_positions": 30}
WAVES = {
    "vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
PICTURES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
            "image_size": 16, "patch_size": 4}  # fmt: skip
LISTENING = {
    "text_config": DECODER | {"model_type": "qwen2"},
    "audio_config": SPEECH
    | {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48},
}
# Kind of model: its class, its configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "decoder": ("LlamaForCausalLM", "llama", DECODER),
    "decoder without head": ("LlamaModel", "llama", DECODER),
    "mixture": ("MixtralForCausalLM", "mixtral", MIXTURE),
    "state space": ("MambaForCausalLM", "mamba", DECODER | {"state_size": 4}),
    "classifier": ("LlamaForSequenceClassification", "llama", DECODER | {"num_labels": 3}),
    "reward model": ("LlamaForSequenceClassification", "llama", DECODER | {"num_labels": 1}),
    "mixture that classifies": ("MixtralForSequenceClassification", "mixtral", MIXTURE | {"num_labels": 3}),
    "token classifier": ("LlamaForTokenClassification", "llama", DECODER | {"num_labels": 3}),
    "decoder that answers": ("LlamaForQuestionAnswering", "llama", DECODER),
    "encoder": ("BertForMaskedLM", "bert", ENCODER),
    "encoder without head": ("BertModel", "bert", ENCODER),
    "encoder as decoder": ("BertLMHeadModel", "bert", ENCODER | {"is_decoder": True}),
    "encoder for text": ("BertLMHeadModel", "bert", ENCODER),
    "encoder that classifies": ("BertForSequenceClassification", "bert", ENCODER | {"num_labels": 3}),
    "encoder for rewards": ("BertForSequenceClassification", "bert", ENCODER | {"num_labels": 1}),
    "encoder of tokens": ("BertForTokenClassification", "bert", ENCODER | {"num_labels": 3}),
    "new encoder that classifies": (
        "ModernBertForSequenceClassification", "modernbert",
        DECODER | {"num_labels": 3, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "encoder-decoder": ("T5ForConditionalGeneration", "t5", BOTH),
    "encoder of both": ("T5EncoderModel", "t5", BOTH),
    "encoder-decoder that classifies": ("T5ForSequenceClassification", "t5", BOTH | {"num_labels": 3}),
    "other encoder-decoder": ("BartForConditionalGeneration", "bart", BOTH),
    "decoder of both": ("BartForCausalLM", "bart", BOTH),
    "other encoder-decoder that classifies": ("BartForSequenceClassification", "bart", BOTH | {"num_labels": 3}),
    "speech to text": ("WhisperForConditionalGeneration", "whisper", BOTH | SPEECH | {"max_target_positions": 128}),
    "audio and text": ("Qwen2AudioForConditionalGeneration", "qwen2_audio", LISTENING),
    "waves": ("Wav2Vec2ForCTC", "wav2vec2", WAVES),
    "pictures": ("ViTForImageClassification", "vit", PICTURES),
}  # fmt: skip

WRITES = "models that write text: give --objective"
TOKEN = "a token classifier, and --objective {}: use fuyou.Engine, whose batches take its labels."
NO_HEAD = 'is a {}, whose head is none of those that can be trained: .* write "architectures": ..{}"'
BOTH_SIDES = (
    "which has an encoder and a decoder, and models of one of them are trained. Give a decoder such as"
)
NO_TEXT = "whose head is none of those that can be trained: .* classifiers. Give a decoder such as"
PICTURE = "a vision-language model, and --objective {} puts its head on a model of text alone: give a causal"
IMAGES = "--objective {} reads text, and the data hold images: leave it out, or the images."
POOLED = "cannot get the head of a BertForSequenceClassification, which has more .*pooler"
CLASSIFIERS = (
    "classifiers of the family 'bart' have an encoder and a decoder, and models of one of them are trained"
)
FAMILY = "transformers has no sequence classifier of the family 'mamba': take a model of another"


def of_all(text: str) -> dict[str, str]:
    return dict.fromkeys(DATA, text)


# Kind of model: what an objective is refused with; others train.
REFUSED: dict[str, dict[str, str]] = {
    "decoder": {},
    "decoder without head": dict.fromkeys(("sft", "pretrain", "dpo"), "without its head: .* it lacks lm_head"),
    "mixture": {},
    "state space": {"reward": FAMILY, "classify": FAMILY},
    "classifier": of_all(f"{WRITES} classify") | {"reward": "a classifier of 3 classes: give --objective classify"},
    "reward model": of_all(f"{WRITES} reward") | {"classify": "is a reward model: give --objective reward"},
    "token classifier": {
        name: TOKEN.format(f"{name} trains " + ("sequence classifiers" if name in ("reward", "classify") else
                                                "models that write text")) for name in DATA
    },
    "decoder that answers": of_all(NO_HEAD.format("LlamaForQuestionAnswering", "LlamaForCausalLM")),
    "encoder": of_all(NO_HEAD.format("BertForMaskedLM", "BertLMHeadModel")),
    "encoder without head": dict.fromkeys(("sft", "pretrain", "dpo"), "model without its head|sees whole texts"),
    "encoder as decoder": dict.fromkeys(("reward", "classify"), POOLED),
    "encoder for text": of_all('sees whole texts, .* write "is_decoder": true in its config.json')
    | dict.fromkeys(("reward", "classify"), POOLED),
    "encoder-decoder": of_all(BOTH_SIDES),
    "encoder of both": of_all("'t5' model, which transformers cannot build as a causal language model"),
    "encoder-decoder that classifies": of_all(BOTH_SIDES),
    "other encoder-decoder": of_all(BOTH_SIDES),
    "decoder of both": dict.fromkeys(("reward", "classify"), CLASSIFIERS),
    "other encoder-decoder that classifies": of_all(BOTH_SIDES),
    "speech to text": of_all(BOTH_SIDES),
    "audio and text": of_all(NO_TEXT),
    "waves": of_all(NO_TEXT),
    "pictures": of_all(NO_TEXT),
    "vision-language": {name: PICTURE.format(name) for name in ("reward", "classify")},
    "vision-language, images": {name: PICTURE.format(name) for name in ("reward", "classify")}
    | {name: IMAGES.format(name) for name in ("pretrain", "dpo")},
    "vision-language that classifies": of_all(f"{WRITES} classify") | {"reward": "a classifier of 3 classes"},
}  # fmt: skip
for like, kinds in {
    "classifier": ("mixture that classifies", "encoder that classifies", "new encoder that classifies"),
    "reward model": ("encoder for rewards",),
    "token classifier": ("encoder of tokens",),
}.items():
    REFUSED |= dict.fromkeys(kinds, REFUSED[like])
for each in (kind for kind, refused in REFUSED.items() if "classif" in kind and len(refused) == len(DATA)):
    REFUSED[each] = {
        name: text
        for name, text in REFUSED[each].items()
        if (name, text) != ("classify", f"{WRITES} classify")
    }
for each in ("reward model", "encoder for rewards"):
    REFUSED[each] = {name: text for name, text in REFUSED[each].items() if name != "reward"}

FAST = {
    ("mixture", "reward"), ("encoder that classifies", "classify"), ("encoder for rewards", "reward"),
    ("vision-language that classifies", "classify"), ("vision-language", "dpo"), ("decoder of both", "sft"),
}  # fmt: skip
TRAINED = [
    pytest.param(kind, objective, marks=() if (kind, objective) in FAST else pytest.mark.slow)
    for kind, refused in REFUSED.items()
    for objective in DATA
    if objective not in refused
]


@pytest.fixture
def run(finetune: Finetune, tmp_path: Path) -> Callable[[str, str], Any]:
    """Runs an objective with a model of a kind, which is written once."""

    def start(kind: str, objective: str) -> Any:
        model, data = tmp_path / "model", tmp_path / f"{objective}.jsonl"
        if not model.exists():
            write(kind, model)
        data.write_text("".join(json.dumps(record) + "\n" for record in DATA[objective]))
        if kind.endswith("images"):
            data = image_data(tmp_path)
        return finetune(
            "--model", model, "--data", data, "--objective", objective, "--gpu", "cpu", "--dtype", "fp32", "--steps",
            STEPS, "--batch-size", ITEMS, "--seq-len", 128, "--schedule", "constant", "--lr", LR, "--eps", EPS,
            "--output", tmp_path / objective, "--host-memory", "600MiB",
        )  # fmt: skip

    return start


def write(kind: str, folder: Path) -> None:
    """Write a checkpoint of a kind, with random weights."""
    torch.manual_seed(0)
    if kind.startswith("vision-language"):
        image_checkpoint(folder)
        if kind.endswith("classifies"):
            config = AutoConfig.from_pretrained(folder, num_labels=3)
            transformers.Gemma3ForSequenceClassification(config).save_pretrained(folder)
        return
    name, family, fields = MODELS[kind]
    getattr(transformers, name)(AutoConfig.for_model(family, **fields)).save_pretrained(folder)
    train_demo_tokenizer(TOKENS["vocab_size"], folder)


@pytest.mark.parametrize("kind", [kind for kind, refused in REFUSED.items() if refused])
def test_it_is_refused_in_one_sentence(kind: str, run: Callable[[str, str], Any], tmp_path: Path) -> None:
    refused = REFUSED[kind]
    if len(set(refused.values())) == 1 and len(refused) == len(DATA):
        # By its class, before the objective is looked at
        refused = {name: refused[name] for name in ("sft", "classify")}
    for objective, text in refused.items():
        done = run(kind, objective)
        assert done.status in (1, 2) and re.search(text, done.err), (objective, done.err)
        assert done.err.startswith("finetune: error: ") and done.err.count("\n") == 1, done.err
        assert not re.search(r"Error\b|ModuleList|_config\b|block by block", done.err), done.err
        assert not (tmp_path / objective / "config.json").exists()


@pytest.mark.parametrize(("kind", "objective"), TRAINED)
def test_it_trains_as_a_plain_loop_does(
    kind: str, objective: str, run: Callable[[str, str], Any], tmp_path: Path
) -> None:
    done = run(kind, objective)
    assert done.status == 0, done.err
    if kind.endswith("images"):  # tests/fuyou/engine/test_vision.py compares these
        return
    base = tmp_path / objective / "base"
    where = base if base.exists() else tmp_path / "model"
    assert losses(tmp_path / objective) == pytest.approx(in_memory(where, objective), rel=1e-5)


def in_memory(folder: Path, objective: str) -> list[float]:
    """Return the losses of a plain loop."""
    config = AutoConfig.from_pretrained(folder)
    model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trained = list(model.parameters())
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": DECAY}]
    groups += [{"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=EPS)
    rows = {"text": [tokenizer(record["text"]).input_ids for record in DATA["classify"]]}
    for name in ("chosen", "rejected"):
        parts = [tokens(tokenizer, pair, "prompt", name) for pair in PAIRS]
        rows[name] = [[*asked, *answered] for asked, answered in parts]
    before = None
    found = []
    for _ in range(STEPS):
        if objective == "classify":
            labels = torch.tensor([record["label"] for record in DATA[objective]])
            loss = functional.cross_entropy(scores(model, rows["text"]), labels)
        elif objective == "reward":
            better, worse = (scores(model, rows[name]) for name in ("chosen", "rejected"))
            loss = -functional.logsigmoid(better - worse).mean()
        elif objective == "dpo":
            better, worse = (
                likelihoods(model, tokenizer, PAIRS, "prompt", name)[0] for name in ("chosen", "rejected")
            )
            margins = better - worse
            before = margins.detach() if before is None else before
            loss = -functional.logsigmoid(0.1 * (margins - before)).mean()
        else:
            columns = ("prompt", "completion") if objective == "sft" else ("", "text")
            sums, count = likelihoods(model, tokenizer, DATA[objective], *columns)
            loss = -sums.sum() / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def tokens(tokenizer: Any, record: dict[str, Any], prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt, and those of its answer with its end."""
    start = [tokenizer.bos_token_id] * (tokenizer("").input_ids[:1] == [tokenizer.bos_token_id])
    first = tokenizer(record.get(prompt, ""), add_special_tokens=False).input_ids
    rest = tokenizer(record[answer], add_special_tokens=False).input_ids
    return start + first, [*rest, tokenizer.eos_token_id]


def likelihoods(
    model: PreTrainedModel, tokenizer: Any, records: list[dict[str, Any]], prompt: str, answer: str
) -> tuple[torch.Tensor, int]:
    """Return the log-probability of each record's answer, and the number of tokens of all."""
    sums, count = [], 0
    for record in records:
        asked, answered = tokens(tokenizer, record, prompt, answer)
        ids = torch.tensor([asked + answered])
        log_probs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        chosen = log_probs.gather(1, ids[0, 1:, None])[max(len(asked) - 1, 0) :, 0]
        sums.append(chosen.sum())
        count += len(chosen)
    return torch.stack(sums), count


def scores(model: PreTrainedModel, rows: list[list[int]]) -> torch.Tensor:
    """Return what the head gives for each row of tokens: a number, or one for each class."""
    return torch.stack(
        [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in rows]
    ).squeeze(-1)
