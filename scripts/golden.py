"""Record what a checkout trains, resumes, exports, and plans, and compare two records.

    python scripts/golden.py --tree ../before > before.json
    python scripts/golden.py --tree . > after.json
    python scripts/golden.py --compare before.json after.json

Run before and after a change that must not change numbers. Each case is a short run of the command on small
checkpoints made here from fixed seeds: losses and gradient norms of every step, and a hash of the exported weights.
Plans are compared number by number from ``--plan --json``.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

BYTE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIZES = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
WIDE = {
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 264, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
    | {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "llama": SIZES | WIDE,
    "qwen3": SIZES | WIDE | {"head_dim": 8},
    "gemma3_text": SIZES | WIDE | {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
    "mixtral": SIZES | WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
BASE = "--gpu cpu --steps 4 --batch-size 4 --seq-len 64 --lr 1e-3 --schedule constant "
CASES = {
    "full": "--model llama --data text.jsonl --dtype fp32 --host-memory 256MiB",
    "full, all on SSD": "--model gpt2 --data text.jsonl --dtype fp32 --host-cache 0 --micro-batch 1",
    "bf16": "--model gemma3_text --data text.jsonl --dtype bf16 --micro-batch 2",
    "speculation": "--model qwen3 --data text.jsonl --dtype fp32 --max-grad-norm 3 --clip-by speculation",
    "8-bit moments": "--model llama --data text.jsonl --dtype fp32 --optimizer adamw8bit",
    "mixture": "--model mixtral --data text.jsonl --dtype fp32",
    "mixture in pieces": "--model mixtral --data text.jsonl --dtype fp32 --piece-size 16KiB",
    "chats": "--model qwen3 --data chats.jsonl --dtype fp32",
    "LoRA": "--model llama --data chats.jsonl --dtype fp32 --lora-rank 4",
    "LoRA, nf4": "--model qwen3 --data chats.jsonl --dtype fp32 --lora-rank 4 --frozen-dtype nf4",
    "LoRA, int8": "--model gpt2 --data chats.jsonl --dtype fp32 --lora-rank 4 --frozen-dtype int8 --lora-dropout 0.1",
    "dpo": "--model llama --data pairs.jsonl --dtype fp32 --objective dpo",
    "reward": "--model llama --data pairs.jsonl --dtype fp32 --objective reward",
    "classify": "--model llama --data labelled.jsonl --dtype fp32 --objective classify",
    "two ranks in memory": "--model llama --data text.jsonl --dtype fp32 --nodes 1 --gpus-per-node 2 --strategy fcdp",
    "two ranks out of core": "--model llama --data text.jsonl --dtype fp32 --nodes 1 --gpus-per-node 2 --ssd drive",
}
RESUMED = {"full", "LoRA, nf4", "dpo", "two ranks out of core"}
PLANS = {
    "175B": "--gpu 4090 --drive p5510 --ssds 12 --host-memory 768GiB --model gpt3-175b --batch-size 64",
    "13B": "--gpu 4090 --drive samsung-990-pro-4tb --ssds 4 --host-memory 64GiB --model gpt3-13b --batch-size 32",
    "7B": "--gpu 4090 --drive samsung-990-pro-4tb --ssds 2 --host-memory 64GiB --model llama-7b --batch-size 16",
    "7B LoRA": "--gpu 4090 --drive samsung-990-pro-4tb --ssds 1 --host-memory 32GiB --model llama-7b --lora-rank 16",
    "two nodes": "--gpu 4090 --drive p5510 --host-memory 64GiB --model llama-7b --nodes 2 --network 25Gbit/s",
    "cluster": "--cluster frontier --model llama-7b --batch-size 1024 --nodes 8",
}


def make_materials(folder: Path) -> None:
    """Write checkpoints, a byte tokenizer, and data files, the same on every machine with the same versions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    special = ["<s>", "<|im_end|>", "<|im_start|>", "<pad>"]
    vocab = {
        token: index for index, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    byte_level = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level, eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = BYTE_TEMPLATE
    for family, fields in FAMILIES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **fields, pad_token_id=3, bos_token_id=None, eos_token_id=1)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    nouns = ["river", "stone", "engine", "garden", "letter", "window", "forest", "bridge"]
    texts = [
        f"The {a} is near the {b}, and number {i} of them is old." for i, a in enumerate(nouns) for b in nouns
    ]
    chats = [
        [
            {"role": "user", "content": f"Where is the {a}?"},
            {"role": "assistant", "content": f"Near the {b}."},
        ]
        for a in nouns
        for b in nouns
    ]
    files: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": text} for text in texts], "chats": [{"messages": chat} for chat in chats],
        "pairs": [{"prompt": f"{text} So", "chosen": " it is near.", "rejected": " it is far away."} for text in texts],
        "labelled": [{"text": text, "label": nouns[i % 3]} for i, text in enumerate(texts)],
    }  # fmt: skip
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def run(tree: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command of a checkout in ``folder``."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"FINETUNE_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "cli.main", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=580)


def exported(output: Path) -> dict[str, str]:
    """Return a hash of each tensor file's values in an output directory, by its path there."""
    from safetensors.torch import load_file

    hashes = {}
    for path in sorted(output.rglob("*.safetensors")):
        if "checkpoints" in path.parts or "store" in path.parts:
            continue
        digest = hashlib.sha256()
        for name, tensor in sorted(load_file(path).items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.float().numpy().tobytes())
        hashes[str(path.relative_to(output))] = digest.hexdigest()[:16]
    return hashes


def train(tree: Path, folder: Path, name: str) -> dict[str, Any]:
    """Run one case, in two calls if it is to be resumed, and return its losses, norms, and hashes."""
    options, output = f"{BASE}{CASES[name]}".split(), folder / "output"
    shutil.rmtree(output, ignore_errors=True)
    shutil.rmtree(folder / "drive", ignore_errors=True)
    (folder / "drive").mkdir()
    calls = [["--max-hours", "1e-9"], ["--resume"]] if name in RESUMED else [[]]
    for words in calls:
        result = run(tree, folder, *options, "--output", "output", *words)
        if result.returncode:
            return {"error": result.stderr.strip().splitlines()[-1]}
    lines = [json.loads(line) for line in (output / "losses.jsonl").read_text().splitlines()]
    figures = [
        {key: line[key] for key in ("step", "loss", "grad_norm", "eval_loss") if key in line}
        for line in lines
    ]
    return {"figures": figures, "weights": exported(output)}


def numbers(value: Any, path: str = "") -> dict[str, Any]:
    """Flatten nested JSON to leaves by path."""
    if isinstance(value, dict):
        return {k: v for name, item in value.items() for k, v in numbers(item, f"{path}/{name}").items()}
    if isinstance(value, list):
        return {k: v for index, item in enumerate(value) for k, v in numbers(item, f"{path}/{index}").items()}
    return {path: value}


@click.command(help=__doc__)
@click.option("--tree", type=click.Path(exists=True, file_okay=False, path_type=Path), default=".")
@click.option("--only", multiple=True, help="Cases to run; default: all.")
@click.option("--compare", nargs=2, type=click.Path(exists=True, path_type=Path), help="Two records.")
def main(tree: Path, only: tuple[str, ...], compare: tuple[Path, Path] | None) -> None:
    if compare:
        before, after = (numbers(json.loads(path.read_text())) for path in compare)
        shared = before.keys() & after.keys()
        differing = sorted(path for path in shared if before[path] != after[path])
        for path in differing:
            click.echo(f"{path}: {before[path]} -> {after[path]}")
        for path in sorted(before.keys() - after.keys()):
            click.echo(f"{path}: gone (was {before[path]})")
        click.echo(f"{len(shared) - len(differing)} of {len(shared)} shared values identical")
        sys.exit(bool(differing))
    record: dict[str, Any] = {"runs": {}, "plans": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_materials(folder)
        for name in CASES:
            if not only or name in only:
                record["runs"][name] = train(tree.resolve(), folder, name)
                click.echo(f"{name}: {record['runs'][name].get('error', 'done')}", err=True)
        for name, options in PLANS.items():
            if not only or name in only:
                result = run(tree.resolve(), folder, "--plan", "--json", *options.split())
                record["plans"][name] = json.loads(result.stdout) if not result.returncode else result.stderr
    click.echo(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
