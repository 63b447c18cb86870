"""Make a small checkpoint and pairs of answers from what ships with Python, for docs/objectives.md.

    python scripts/make_preferences.py DIR

Prompts are signatures of functions in the standard library. The preferred answer begins the docstring as PEP 257 asks,
with a command ("Return the ..."), the rejected one with a description ("Returns the ..."). The texts that the model
learns from first have one or the other by chance, so that it begins with no preference. Functions of every fifth module
are held out.
"""

import ast
import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.data.demo_text import train_demo_tokenizer

VERBS = (  # separated by spaces
    "Add Apply Build Call Change Check Close Compare Compute Convert Copy Create Decode Delete Determine Display Emit "
    "Encode Execute Extract Find Format Generate Get Give Handle Initialize Insert Install Invoke Join Load Look Make "
    "Match Move Open Parse Perform Prepare Print Process Put Raise Read Register Remove Replace Report Return Run "
    "Search Send Set Show Skip Split Start Stop Store Take Test Tell Translate Turn Update Use Wait Wrap Write Yield"
)
LONGEST = 110
"""Characters of a docstring's first sentence."""


def third_person(verb: str) -> str:
    """Return "Returns" for "Return"."""
    if verb.endswith(("s", "x", "ch", "sh")):
        return f"{verb}es"
    return f"{verb[:-1]}ies" if verb[-1] == "y" and verb[-2] not in "aeiou" else f"{verb}s"


def sentences() -> Iterator[tuple[str, str, str]]:
    """Yield module, signature, and the first sentence of each function that begins with one of the verbs."""
    commands = {verb: verb for verb in VERBS.split()} | {third_person(verb): verb for verb in VERBS.split()}
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        module = file.relative_to(library).as_posix()
        if any(part in module for part in ("site-packages", "test", "lib2to3", "idlelib")):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".")
            verb, _, rest = first.partition(" ")
            if verb in commands and rest and len(first) <= LONGEST:
                yield module, f"def {node.name}({ast.unparse(node.args)}):\n", f"{commands[verb]} {rest}."


def main(folder: Path) -> None:
    """Write checkpoint, texts and pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    lines: dict[str, list[str]] = {"texts": [], "pairs": [], "held-out": []}
    for module, prompt, command in dict.fromkeys(sentences()):
        verb, _, rest = command.partition(" ")
        described = f"{third_person(verb)} {rest}"
        held_out = hashlib.sha256(module.encode()).digest()[0] % 5 == 0
        pair = {"prompt": prompt, "chosen": command, "rejected": described}
        lines["held-out" if held_out else "pairs"].append(json.dumps(pair))
        if not held_out:
            text = {"prompt": prompt, "completion": chance.choice([command, described])}
            lines["texts"].append(json.dumps(text))
    known = set(lines["pairs"])  # some functions are in several modules
    lines["held-out"] = [line for line in lines["held-out"] if line not in known]
    for name, content in lines.items():
        (folder / f"{name}.jsonl").write_text("\n".join(content) + "\n")
        print(f"{name}: {len(content):,}")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "checkpoint")
    train_demo_tokenizer(config.vocab_size, folder / "checkpoint")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
