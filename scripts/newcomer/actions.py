"""What newcomers did in their first hours, as command lines, and what the docs say must come out."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One command line and how it must end."""

    command: str
    status: int = 0
    says: Sequence[str] = ()
    never: Sequence[str] = ()  # What its output must not hold
    leaves: Sequence[str] = ()  # Files that must be there afterwards
    within: float = 600.0  # Seconds, without those in which it waited for a core
    send: tuple[signal.Signals, str] | None = None  # Signal to send, as soon as the output holds a text


SMALL = "--model models/small --batch-size 2 --seq-len 256 --gpu cpu"
TEXTS = f"{SMALL} --lr 1e-3 --data data/texts.jsonl"
CHATS = f"{SMALL} --data data/sharegpt.jsonl --chat-template chatml"
RUN = f"finetune {TEXTS} --output out"
LONG = f"{RUN} --steps 400 --schedule constant --no-save"
PLANS = "finetune plan --gpu 4090 --drive p5510 --ssds 2 --host-memory 64GiB"
LOADS = """python -c 'from transformers import pipeline
print(pipeline("text-generation", "out")("The", max_new_tokens=3))'"""


def does(command: str, *says: str, leaves: Sequence[str] = (), never: Sequence[str] = ()) -> Step:
    """Return a step that must succeed."""
    return Step(command, 0, says, never, leaves)


def rejects(command: str, *says: str, within: float = 600.0) -> Step:
    """Return a step that must be rejected in one message before anything is trained."""
    return Step(command, 2, says, ("step 1/",), within=within)


def at_once(command: str, *says: str) -> Step:
    """Return a step that must be rejected before PyTorch is loaded."""
    return rejects(command, *says, within=1.0)


ACTIONS = {
    "1 no options at all": [at_once("finetune", "--model DIR", "finetune demo")],
    "2 LoRA as in the README, and peft loads it": [
        does(f"finetune {CHATS} --lora-rank 4 --steps 2 --output out",
             "0.0002", "step 2/2", leaves=["out/adapter_config.json", "out/chat_template.jinja"]),
        does(LOADS, "generated_text")],
    "3 a look at the data": [
        does(f"finetune {CHATS} --show-data 1 --output out && test ! -e out", "row 1", "«Paris.<|im_end|>»",
             never=("row 2", "«What"))],
    "4 options by their names elsewhere": [
        at_once(f"finetune --{name}", here) for name, here in {
            "dataset x": "--data", "learning_rate 1": "--lr", "load-in-4bit": "--frozen-dtype nf4",
            "gradient-accumulation-steps 4": "--batch-size", "chat": "finetune chat"}.items()],
    "5 a hub's model that is not in the cache, 6 a path with a typo": [
        at_once("finetune --model me/tiny --data data/texts.jsonl", "hf download me/tiny", "--download"),
        at_once("finetune --model models/smal --data data/texts.jsonl", "Did you mean 'small' in models?"),
        at_once("finetune --model ./modls/small --data data/texts.jsonl", "no directory modls"),
        at_once("finetune --model llama-7x --data random", "llama-7x", "Did you mean")],
    "7 a data file with a typo": [
        at_once(f"finetune {SMALL} --data data/texs.jsonl", "Did you mean 'texts.jsonl'?"),
        Step(f"finetune {SMALL} --data data/quux.jsonl", 2, ("data/quux.jsonl",), ("Did you mean",), within=1.0)],
    "9 full fine-tuning with everything, and transformers loads it": [
        does(f"{RUN} --eval-split 10% --eval-every 2 --warmup 2 --save-every 3 --steps 6",
             "held out 4 documents", "eval at step 6", leaves=["out/checkpoints/best", "out/run/index.html"]),
        does(LOADS, "generated_text")],
    "11 kill -9, the same line again, and --config with --resume": [
        Step(LONG, -9, send=(signal.SIGKILL, "step 3/")),
        rejects(LONG, "--resume", "--overwrite"),
        does("finetune --config out/run/config.toml --resume --max-hours 0.003", "resume   after step",
             never=["step 1/"])],
    "13 a resumed run with other options": [
        does(f"{RUN} --steps 2"),
        rejects(f"{RUN} --steps 2", "--overwrite", "--resume"),
        does(f"{RUN} --steps 2 --resume", "all 2 steps are done"),
        does(f"{RUN} --steps 4 --resume --lr 2e-3", "--lr 0.002 instead of --lr 0.001", "extended from 2 steps to 4"),
        rejects(f"{RUN} --steps 4 --resume --batch-size 4", "--batch-size 2", "--batch-size 4"),
        rejects(f"{RUN} --steps 4 --resume --lora-rank 4", "began with no --lora-rank, and now it is --lora-rank 4")],
    "19 a merged model, from the adapter alone": [
        does(f"{RUN} --lora-rank 4 --steps 2"),
        does("rm -r out/store && finetune export --model models/small --adapter out --output merged",
             leaves=["merged/model.safetensors"]),
        at_once("finetune --model out --data data/texts.jsonl", "holds a PEFT adapter", "--adapter out"),
        at_once(f"finetune {TEXTS} --adapter ot", "'ot'", "Did you mean 'out'")],
    "22 DPO on the adapter of an earlier run": [
        does(f"finetune {SMALL} --data data/texts.jsonl --lora-rank 4 --steps 2 --output first"),
        does(f"finetune {SMALL} --data data/pairs.jsonl --objective dpo --adapter first --steps 2", "0.6931"),
        rejects(f"finetune {SMALL} --data data/pairs.jsonl --output other", "--objective dpo")],
    "8 a tracker": [rejects(f"{RUN} --report_to wandb", "Here it is --log-to")],
    "15 fewer steps on resume": [
        does(f"{RUN} --steps 2"),
        rejects(f"{RUN} --steps 1 --resume", "--steps 2", "--steps 1")],
    "17 two data sets with weights, 30 columns of other names": [
        does(f"finetune {SMALL} --data data/texts.jsonl=0.7 data/sharegpt.jsonl=0.3 --chat-template chatml "
             "--steps 1 --output mixed", "step 1/1"),
        does(f"finetune {SMALL} --data data/table.csv --columns prompt=q completion=a --chat-template chatml --steps 1",
             "step 1/1")],
    "24 a chat with the result": [
        does(f"finetune {CHATS} --steps 2 --output out"),
        does("echo 'Hello' | finetune chat --model out", "Type a line"),
        Step("printf 'Hello\\n%.0s' $(seq 60) | finetune chat --model out", 2, ("the model's context 512",))],
    "25 no data, 26 only an evaluation": [
        at_once(f"finetune {SMALL}", "nothing to train on", "--data FILE"),
        does("finetune evaluate --model models/small --data data/texts.jsonl --seq-len 64 --gpu cpu", "perplexity"),
        at_once("finetune evaluate --model models/small", "--data FILE")],
    "31 broken data": [
        rejects(f"finetune {SMALL} --data data/broken.jsonl", "broken.jsonl, line 2 is not JSON"),
        rejects(f"finetune {SMALL} --data data/questions.jsonl", "question", "--columns"),
        rejects(f"finetune {SMALL} --data data/empty.jsonl", "empty.jsonl")],
    "34 options that do not go together, or with the model": [
        at_once(f"{RUN} --lora-alpha 4", "--lora-rank"),
        at_once(f"{RUN} --steps 2 --epochs 3", "exclude each other")],
    "37 Ctrl-C while it loads, in a step, and SIGTERM": [
        Step(LONG, 130, ("stopped",), send=(signal.SIGINT, "steps    400")),
        Step(f"{LONG} --overwrite", 130, ("is committed. To continue: finetune",), send=(signal.SIGINT, "step 3/")),
        does(f"{RUN} --resume --export", "of 400 left it", leaves=["out/model.safetensors"]),
        Step(f"{LONG} --resume auto", 143, ("is committed",), send=(signal.SIGTERM, "resume   after"))],
    "55 packages of one's own with the names of ours": [
        Step("mkdir common && touch common/__init__.py && python -c 'import fuyou'", 1, ("common", "ImportError")),
        does("rm -r common; mkdir configs cli && touch configs/__init__.py cli/__init__.py && "
             "python -c 'import fuyou; from common.files import preset_files; print(len(preset_files(\"gpus\")))'")],
    "66 a look at the machine, 68 plans": [
        does("finetune check --ssd .", "drive"),
        does(f"{PLANS} --model llama-7b --steps 1000 --html plan.html", "1,000 steps", leaves=["plan.html"]),
        does(f"{PLANS} --model llama-7b --json", '"fits": true'),
        Step(f"{PLANS} --model gpt3-175b --host-memory 4GiB", 1, ("fit",)),
        at_once("finetune plan --gpu 4090 --drive p5510", "--max-model")],
    "73 drives that are missing, or files": [
        at_once(f"{RUN} --ssd nowhere", "There is no directory nowhere"),
        at_once(f"{RUN} --ssd data/texts.jsonl", "is not a directory")],
    "75 drives verified: as written, with a flipped byte, without a run": [
        does(f"{RUN} --steps 2"),
        does("finetune verify out", "all as written"),
        Step("python -c 'from pathlib import Path; p = max(Path(\"out/store\").glob(\"*\"), key=lambda p: p.stat()"
             ".st_size); d = bytearray(p.read_bytes()); d[len(d) // 4] ^= 1; d[len(d) * 3 // 4] ^= 1; p.write_bytes(d)"
             "' && finetune verify out", 1, ("out/store",)),
        at_once("finetune verify nowhere", "no file or directory 'nowhere'")],
    "76 two jobs in one directory, 77 names that need quotes, 78 long names": [
        Step(f"{LONG} & sleep 0.1; until grep -q 'step 2/' step-0.log; do sleep 0.2; done; "
             f"{LONG} --overwrite; status=$?; kill -INT $!; wait; exit $status", 2, ("in use by another run",)),
        does(f"finetune {TEXTS} --steps 2 --output 'a b/日本 é' && finetune verify 'a b/日本 é'", "all as written"),
        at_once(f"finetune {TEXTS} --output {'x' * 300}", "File name too long"),
        at_once(f"finetune {TEXTS} --output data/texts.jsonl/out", "texts.jsonl is not a directory")],
    "79 pipes, dumb terminals, other encodings": [
        does(f"{RUN} --steps 2 | head -3 && echo ended ${{PIPESTATUS[0]}}", "ended"),
        does(f"TERM=dumb finetune {TEXTS} --steps 2 --output dumb", "step 2/2", never=["\x1b["]),
        does(f"PYTHONIOENCODING=ascii finetune {CHATS} --show-data 1", "Paris."),
        does(f"ulimit -n 40; {RUN} --overwrite --steps 2", "step 2/2")],
    "87 completion, 88 help in a narrow terminal": [
        does("_FINETUNE_COMPLETE=bash_source finetune", "complete"),
        does("COLUMNS=50 finetune train --help", "--lora-rank"),
        does("python -c 'import fuyou; help(fuyou.Engine)'", "lr: Learning rate", "Norm")],
    "90 two ranks in memory": [
        does(f"{RUN} --steps 2 --nodes 1 --gpus-per-node 2", "loading PyTorch", "2 ranks on the CPU", "step 2/2")],
    "89 wrong files of options": [
        at_once("finetune --config nowhere.toml", "No such file"),
        at_once("echo 'lora-rnk = 4' >a.toml; finetune --config a.toml", "lora-rank")],
}  # fmt: skip
