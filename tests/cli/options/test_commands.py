"""Each command has the options that it reads; options of no use with others are rejected by name, never ignored."""

import pytest

from cli.main import main
from cli.options.command import COMMANDS, Finetune, with_command

OPTIONS = {option.name: option for option in Finetune(lambda name, **options: 0).options}
BY_NAME = ("plan", "--model", "llama-7b", "--gpu", "4090", "--drive", "p5510")


@pytest.mark.parametrize(("typed", "meant"), [
    ("--gpu 4090 --ssd a b --model m", "train --gpu 4090 --ssd a b --model m"),
    ("", "train"),
    ("plan --model m", "plan --model m"),
    ("--model m --plan --ssd a", "plan --model m --ssd a"),
    ("--verify a b", "verify a b"),
    ("--check", "check"),
    ("--demo --output d", "demo --output d"),
    ("--profile --nodes 2", "profile --nodes 2"),
    ("--help", "--help"),
    ("--model m --help", "train --model m --help"),
    ("--model m --version", "--version"),
])  # fmt: skip
def test_a_command_line_and_its_command(typed: str, meant: str) -> None:
    assert with_command(typed.split()) == meant.split()


def test_commands_have_their_own_options() -> None:
    def names(command: str) -> set[str]:
        return {option.name or "" for option in Finetune(lambda name: 0).get_command(None, command).options}

    assert set().union(*map(names, COMMANDS)) == OPTIONS.keys()
    assert names("verify") == {"config", "debug"}
    assert names("plan") > names("train")  # a line that trains can be planned
    assert "drive" not in names("train") and "lr" not in names("check")


@pytest.mark.parametrize(("words", "message"), [
    ((*BY_NAME, "--ssd", "."), "--drive and --ssd exclude each other"),
    (("demo", "--overwrite"), "finetune demo has no --overwrite, which is for finetune train"),
    (("--plan", "--model", "llama-7b", "--cluster", "a800-hdr", "--chunk", "1"), "--chunk is for plans out of core"),
    (("--plan", "--model", "llama-7b", "--cluster", "a800-hdr", "--gpu", "4090"), "--gpu is not read in the plan of a"),
    (("--plan", "--model", "llama-7b", "--cluster", "a800-hdr", "--objective", "dpo"), "dpo does not go with --nodes"),
    ((*BY_NAME, "--gpus-per-node", "2"), "--gpus-per-node is for several nodes or ranks: add --nodes N"),
    ((*BY_NAME, "--clip-by", "deferral"), "--clip-by does nothing without --max-grad-norm: add that."),
    ((*BY_NAME, "--schedule", "constant", "--min-lr", "1e-6"), "--min-lr has no effect with --schedule constant"),
    ((*BY_NAME, "--train-vision", "all"), "LlamaForCausalLM has no such part"),
    (("--model", "m", "--nodes", "2", "--cluster", "a800-hdr", "--strategy", "zero3"), "--cluster is for choosing a"),
    (("--plan", "--model", "llama-7b", "--network", "1Gbit/s"), "--network does nothing without --nodes: add that."),
    (("profile", "--show-data", "1"), "finetune profile has no --show-data"),
    (("check", "--lr", "1"), "finetune check has no --lr, which is for finetune train and finetune plan."),
    (("verify", ".", "--lr", "1"), "finetune verify has no --lr"),
    (("--model", "llama-10m", "--drive", "p5510"), "finetune train has no --drive, which is for finetune plan."),
    (("train", "--plan"), "--plan is a command: finetune plan."),
    (("trian", "--model", "m"), "There is no command 'trian'. Did you mean 'train'?"),
    (("merge",), "There is no command 'merge'. Here it is finetune export --model DIR --adapter OUTPUT --output"),
    (("generate",), "There is no command 'generate'. Here it is finetune chat."),
    (("--resume",), "--resume continues the run in --output DIR: name that directory."),
    (("resume",), "There is no command 'resume'. Here it is --resume."),
    (("--model", "llama-10m", "--packing"), "No such option: --packing. Here it is the default."),
    (("--model", "llama-10m", "--deepspeed", "x"), "Here it is --ssd DIR... to offload, or --nodes N to shard."),
    (("--model", "m", "--lora-rank", "4", "--lora-targets", "q_proj,v_proj"), "with spaces: q_proj v_proj"),
    (("--model", "m", "--batch-size", "ten"), "'ten' is not a valid whole number."),
    (("--model", "m", "--data", "random", "--lr", "x"), "'x' is not a valid"),
])  # fmt: skip
def test_what_would_do_nothing_is_rejected(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
