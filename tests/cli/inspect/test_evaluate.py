"""``finetune evaluate`` and ``finetune export``, against transformers and peft in memory."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from common.files import CACHE_VARIABLE
from tests.cli.conftest import Finetune
from tests.helpers.command.messages import check
from tests.helpers.models.gguf_files import FAMILIES, FIELDS, write_gguf

FP32 = ("--dtype", "fp32")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters that change what the model says, saved by peft."""
    directory = tmp_path_factory.mktemp("adapter")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(checkpoint),
        LoraConfig(r=4, target_modules=["q_proj", "down_proj"]),
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("adapted", [False, True])
def test_the_loss_is_that_of_a_plain_loop(
    adapted: bool, finetune: Finetune, checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    texts = [f"{number} and {number * number} are numbers" for number in range(5)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ("--adapter", adapter) if adapted else ()
    shape = ("--seq-len", 64, "--batch-size", 2)
    done = finetune("evaluate", "--model", checkpoint, "--data", file, "--gpu", "cpu", *FP32, *shape, *words)
    assert done.status == 0, done.err

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(checkpoint),
        AutoTokenizer.from_pretrained(checkpoint),
    )
    model = (PeftModel.from_pretrained(model, str(adapter)) if adapted else model).eval()
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=ids).loss) * (ids.numel() - 1)
        count += ids.numel() - 1
    shown = re.search(
        r"^eval     loss ([\d.]+), perplexity [\d.]+ over ([\d,]+) tokens$", done.out, re.MULTILINE
    )
    assert shown is not None, done.out
    assert float(shown[1]) == pytest.approx(total / count, abs=1e-4)
    assert int(shown[2].replace(",", "")) == count
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "nothing is left"


def test_lines_about_the_data_are_indented(finetune: Finetune, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "completion": " b"}\n')
    done = finetune("evaluate", "--model", checkpoint, "--data", file, "--gpu", "cpu", *FP32)
    assert done.status == 0 and "\n         prompts: 1 record" in done.out, done.out + done.err


def test_a_loss_that_is_not_a_number_is_an_error(
    finetune: Finetune, own_checkpoint: Path, data: Path
) -> None:
    weights = load_file(own_checkpoint / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, own_checkpoint / "model.safetensors", {"format": "pt"})
    done = finetune(
        "evaluate", "--model", own_checkpoint, "--data", data, "--gpu", "cpu", *FP32, "--seq-len", 64
    )
    check(done, 1, "The loss is nan: a weight of", "is not finite")
    assert "eval  " not in done.out


def test_adapters_are_merged_without_a_run(
    finetune: Finetune, checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    words = ("export", "--model", checkpoint, "--adapter", adapter, "--output", tmp_path / "merged", *FP32)
    done = finetune(*words)
    assert done.status == 0, done.err
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), str(adapter))
    wanted = plain.merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert merged.keys() == wanted.keys()
    assert all(torch.equal(merged[name], wanted[name]) for name in wanted)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged")("one") == AutoTokenizer.from_pretrained(
        checkpoint
    )("one")
    check(finetune(*words), 2, "holds a checkpoint already", "--overwrite")
    check(
        finetune("export", "--model", "llama-10m", "--adapter", adapter, "--output", "x"), 2, "random weights"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_merging_into_a_gguf_file_says_the_loss_before_and_after(
    finetune: Finetune, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the held-out data of the adapters' run, on ``--eval-data``, or, without either, with what to type."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "model.gguf", FAMILIES["llama"][0], FIELDS, kinds=("Q4_0",))
    held_out, other = (tmp_path / f"{name}.jsonl" for name in ("held-out", "other"))
    held_out.write_text('{"text": "Held out, again and again."}\n')
    other.write_text('{"text": "Another one, also held out."}\n')
    adapter, place = tmp_path / "adapter", ("--gpu", "cpu")
    run = (
        "--lora-rank",
        4,
        "--lr",
        "1e-2",
        "--steps",
        3,
        "--batch-size",
        2,
        "--seq-len",
        16,
        "--eval-data",
        held_out,
    )
    done = finetune("--model", file, "--data", data, *place, "--dtype", "bf16", *run, "--output", adapter)
    assert done.status == 0, done.err

    def exported(name: str, *words: object) -> str:
        words = ("--adapter", adapter, "--output", tmp_path / name, "--dtype", "bf16", *words)
        done = finetune("export", "--model", file, *words)
        assert done.status == 0, done.err
        return done.out

    def loss(model: Path, on: Path, *words: object) -> str:
        shape = ("--batch-size", 2, "--seq-len", 16, "--dtype", "bf16", *place)
        done = finetune("evaluate", "--model", model, "--data", on, *shape, *words)
        shown = re.search(r"^eval     (.*)$", done.out, re.MULTILINE)
        assert shown is not None
        return shown[1]

    own, given = exported("own"), exported("given", "--eval-data", other)
    for text, name, on in ((own, "own", held_out), (given, "given", other)):
        assert f"before   {loss(file, on, '--adapter', adapter)}\n" in text
        assert f"data     {on}\n" in text and text.endswith(f"after    {loss(tmp_path / name, on)}\n")
    held_out.unlink()
    unknown = exported("unknown")
    assert "loss     not compared: the weights were GGUF (Q4_0), and are bf16" in unknown
    assert f"finetune evaluate --model {file} --adapter {adapter} --data FILE; " in unknown
    assert not [path for path in tmp_path.iterdir() if "scratch" in path.name]
    check(
        finetune("export", "--output", adapter, "--eval-data", other),
        2,
        "Without --adapter, export evaluates nothing",
    )


@pytest.mark.parametrize("adapts_head", [False, True])
def test_adapters_of_a_classifier_name_their_model(
    adapts_head: bool, finetune: Finetune, checkpoint: Path, tmp_path: Path
) -> None:
    model, adapter = tmp_path / "classifier", tmp_path / "adapter"
    config = LoraConfig(r=2, target_modules=["q_proj", "score"] if adapts_head else ["q_proj"])
    config.modules_to_save = None if adapts_head else ["score"]
    AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=2).save_pretrained(model)
    get_peft_model(AutoModelForSequenceClassification.from_pretrained(model), config).save_pretrained(adapter)
    words = ("--adapter", adapter, "--output", tmp_path / "merged", *FP32)
    refused = finetune("export", "--model", checkpoint, *words)
    check(refused, 2, "score", f"give the --model that it was made for: --model {model}\n")
    assert "--lora-targets" not in refused.err
    done = finetune("export", "--model", model, *words)
    assert done.status == 0, done.err


def test_wider_weights_are_rounded_with_a_line(
    finetune: Finetune, own_checkpoint: Path, data: Path, adapter: Path, tmp_path: Path
) -> None:
    """In training, in ``export``, and in ``evaluate``; with ``--dtype fp32`` they are kept."""
    small = ("--batch-size", 2, "--seq-len", 16, "--gpu", "cpu", "--data", data)
    commands = {
        "trained": (*small, "--steps", 1, "--no-save"),
        "merged": ("export", "--adapter", adapter),
        "evaluated": ("evaluate", *small),
    }

    def lines(stored: str, dtype: str) -> list[int]:
        counts = []
        for name, words in commands.items():
            output = () if name == "evaluated" else ("--output", tmp_path / f"{name}-{stored}-{dtype}")
            done = finetune(*words, "--model", own_checkpoint, "--dtype", dtype, *output)
            assert done.status == 0, done.err
            line = f"weights  the checkpoint is in {stored}; its weights are rounded to bf16 (--dtype fp32 keeps them)"
            counts.append(done.out.splitlines().count(line))
        return counts

    assert lines("fp32", "bf16") == [1, 1, 1]
    AutoModelForCausalLM.from_pretrained(own_checkpoint, dtype=torch.float16).save_pretrained(own_checkpoint)
    assert lines("fp16", "bf16") == [1, 1, 1]
    assert lines("fp16", "fp32") == [0, 0, 0]


def test_the_checkpoint_of_a_run_from_its_output_alone(
    finetune: Finetune, checkpoint: Path, tmp_path: Path
) -> None:
    run = (
        "--model",
        checkpoint,
        "--gpu",
        "cpu",
        "--steps",
        1,
        "--batch-size",
        2,
        "--seq-len",
        16,
        "--lr",
        "1e-3",
    )
    assert finetune(*run, "--output", tmp_path / "saved").status == 0
    assert finetune(*run, "--output", tmp_path / "kept", "--no-save").status == 0
    done = finetune("export", "--output", tmp_path / "kept")
    assert done.status == 0 and "as step 1 of 1 left it" in done.out, done.err
    saved, exported = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("saved", "kept"))
    assert all(torch.equal(value, exported.state_dict()[name]) for name, value in saved.state_dict().items())


@pytest.mark.parametrize("objective", ["classify", "reward"])
@pytest.mark.slow
def test_the_loss_of_a_classifier_is_that_of_its_run(
    objective: str, finetune: Finetune, checkpoint: Path, tmp_path: Path
) -> None:
    """The objective is the one that its head is for."""
    sides = {"prompt": "It", "chosen": " is", "rejected": " was"}
    records = [{"text": f"Text {i}", "label": "ab"[i % 2], **sides} for i in range(6)]
    file = tmp_path / "data.jsonl"
    names = ("text", "label") if objective == "classify" else tuple(sides)
    file.write_text("".join(json.dumps({name: record[name] for name in names}) + "\n" for record in records))
    words = ("--data", file, "--batch-size", 2, "--seq-len", 16, "--gpu", "cpu", *FP32)
    run = ("--model", checkpoint, "--eval-data", file, "--objective", objective, "--steps", 2, "--lr", "1e-2")
    done = finetune(*run, *words, "--output", tmp_path / "out")
    assert done.status == 0, done.err
    last = re.findall(r"eval at step 2: (loss [\d.]+)", done.out)
    shown = finetune("evaluate", "--model", tmp_path / "out", *words)
    assert shown.status == 0, shown.err
    assert re.findall(r"eval     (loss [\d.]+)", shown.out) == last


def test_adapters_without_their_model_are_rejected(finetune: Finetune, adapter: Path, tmp_path: Path) -> None:
    outcome = finetune("export", "--adapter", adapter, "--output", tmp_path)
    assert outcome.status == 2
    assert "Give the model that --adapter was made for" in outcome.err
