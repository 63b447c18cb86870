"""A broken package is named by its own error, however many packages have wrapped that."""

import importlib
from pathlib import Path

import pytest

import cli.main


def broken(name: str, folder: Path) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(
        'raise RuntimeError("operator torchvision::nms does not exist")'
    )
    try:
        importlib.import_module(name)
    except RuntimeError as error:
        raise ModuleNotFoundError("Could not import module 'PreTrainedModel'.") from error


@pytest.mark.parametrize(("name", "message"), [
    ("torchvision", "torchvision is installed and does not work (RuntimeError: operator torchvision::nms does not exi"),
    ("needed_by_all", "finetune: error: RuntimeError: operator torchvision::nms does not exist."),
])  # fmt: skip
def test_the_deepest_cause(
    name: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(cli.main.sys.modules, name, raising=False)
    monkeypatch.setattr(cli.main, "_train", lambda *_: broken(name, tmp_path))
    assert cli.main.main(["--model", "llama-10m", "--data", "random"]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert ("pip uninstall torchvision" in err) == (name == "torchvision")
