"""What is exported comes with a card, and is pushed to a hub, for which a stand-in is here."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from common.hub import NO_DOWNLOAD
from tests.cli.conftest import Finetune
from tests.helpers.command.messages import check

COMMON = ("--batch-size", 2, "--seq-len", 32, "--steps", 2, "--gpu", "cpu", "--lr", "1e-3")


class Hub:
    """Stands in for ``HfApi``: keeps its calls."""

    calls: list[tuple[Any, ...]]
    fails = False

    def whoami(self) -> None:
        self.calls.append(("whoami",))

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append(("create_repo", name, private, exist_ok))

    def upload_folder(self, *, repo_id: str, folder_path: Path, **patterns: Any) -> None:
        if Hub.fails:
            raise ConnectionError("no route to host")
        names = (str(path.relative_to(folder_path)) for path in folder_path.rglob("*") if path.is_file())
        kept = huggingface_hub.utils.filter_repo_objects(
            names, allow_patterns=patterns["allow_patterns"], ignore_patterns=patterns["ignore_patterns"]
        )
        self.calls.append(("upload_folder", repo_id, sorted(kept)))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "a token")
    monkeypatch.setenv(NO_DOWNLOAD, "1")  # which the command sets in this process
    monkeypatch.setattr(Hub, "calls", [], raising=False)
    return Hub


def test_adapters_with_a_card_go_to_a_hub(
    finetune: Finetune, checkpoint: Path, data: Path, tmp_path: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ("--model", checkpoint, "--data", data, "--eval-split", "10%", *COMMON, "--output", out)
    lora = ("--lora-rank", 4, "--merge")
    done = finetune(*command, *lora, "--push-to-hub", "me/tuned", "--save-every", 1)
    assert done.status == 0, done.err
    assert "pushed   me/tuned" in done.out
    assert hub.calls[:2] == [("whoami",), ("create_repo", "me/tuned", True, True)]
    sent = hub.calls[2][2]
    assert {"README.md", "adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= set(sent)
    assert not any("/" in name or "losses" in name for name in sent)

    card = ModelCard.load(out / "README.md")
    assert card.data.library_name == "peft" and card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["fuyou", "sft", "lora"] and card.data.base_model is None
    digest = card.content.split("Digest: `")[1].split("`")[0]
    assert digest in (out / "run" / "run.json").read_text()
    for said in (
        "`texts.jsonl`",
        "LoRA of rank 4, alpha 8",
        "| steps | 2 |",
        "0.001, cosine",
        "held out",
        "last steps",
    ):
        assert said in card.content, said
    assert str(tmp_path) not in card.content  # directories are nobody else's business
    whole = ModelCard.load(out / "merged" / "README.md")
    assert whole.data.library_name == "transformers" and "AutoModelForCausalLM" in whole.content
    assert "| steps | 1 of 2 |" in (out / "checkpoints/step-1/README.md").read_text()

    (out / "README.md").write_text("My own words.")
    hub.fails = True
    again = finetune(*command, *lora, "--resume", "--export", "--push-to-hub", "me/tuned")
    monkeypatch.setattr(hub, "fails", False)
    check(
        again, 1, "was exported to", "and not pushed: ConnectionError: no route to host", f"`hf upload me/tuned {out} ."
    )
    assert (out / "README.md").read_text() == "My own words."


def test_a_checkpoint_in_a_hubs_cache_has_the_hubs_name_in_its_card(
    finetune: Finetune, checkpoint: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--some--llama" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(checkpoint)
    out = tmp_path / "out"
    done = finetune("--model", snapshot, *COMMON, "--lora-rank", 2, "--output", out)
    assert done.status == 0, done.err
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "some/llama" and card.data.base_model_relation == "adapter"
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == "some/llama"
    assert "Random tokens." in card.content and 'from_pretrained("some/llama")' in card.content


def test_what_cannot_be_pushed_is_rejected_first(
    finetune: Finetune, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ("--model", "llama-10m", "--gpu", "cpu")
    unnamed = finetune(*model, "--push-to-hub", "tuned")
    check(unnamed, 2, "--push-to-hub tuned is not the name of a repository: give owner/")
    check(finetune(*model, "--push-to-hub", "me/tuned", "--no-save"), 2, "--no-save exports nothing")

    def refused(self: Hub) -> None:
        raise PermissionError("the token has expired")

    monkeypatch.setattr(hub, "whoami", refused)
    check(
        finetune(*model, "--push-to-hub", "me/tuned"), 2, "does not take the token (PermissionError: the token has ex"
    )
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    check(finetune(*model, "--push-to-hub", "me/tuned"), 2, "needs a token that may write there, and there is none")
