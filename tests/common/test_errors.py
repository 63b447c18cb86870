"""Exit statuses, the hint at a mistyped name, and options by the names that the reader gives them."""

import pytest

from common.errors import FinetuneError, UserError, as_message, did_you_mean, printable


def test_exit_statuses_tell_mistakes_from_failures() -> None:
    assert FinetuneError("the drive is gone").exit_status == 1
    assert UserError("no such model").exit_status == 2
    assert issubclass(UserError, FinetuneError), "one except clause at the top catches both"


def test_suggests_the_nearest_name_or_nothing() -> None:
    names = ["llama-7b", "llama-13b", "gpt3-175b"]
    assert did_you_mean("gpt-175b", names) == " Did you mean 'gpt3-175b'?"
    assert did_you_mean("lama-7b", iter(names)) == " Did you mean 'llama-7b'?"
    assert did_you_mean("zzz", names) == ""
    assert did_you_mean("llama-7b", []) == ""


@pytest.mark.parametrize(("written", "keywords"), [
    ("Lower --host-memory, or --lora-rank 4.", "Lower host_memory, or rank 4."),
    ("add --resume to continue, or --overwrite", "add resume=True to continue, or overwrite=True"),
    ("--gpu cpu: see finetune --profile (--drop-long)", "device cpu: see finetune --profile (truncate=False)"),
    ("`docker run --memory 4g`, or --io posix", "`docker run --memory 4g`, or io posix"),
    ("three -- four --5 a--b", "three -- four --5 a--b"),
])  # fmt: skip
def test_options_are_named_as_the_reader_types_them(
    written: str, keywords: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = UserError(written)
    assert (str(error), error.as_written) == (keywords, written)
    monkeypatch.setattr(FinetuneError, "names_flags", True)
    assert str(error) == written


def test_control_characters_of_files_do_not_reach_a_terminal() -> None:
    controls = [*map(chr, (*range(32), *range(127, 160))), "\u202e", "\u2066"]
    for control in controls:
        if control not in "\n\t":
            assert printable(f"a{control}b") == f"a{ascii(control)[1:-1]}b"
    text = 'Line 1: "é 漢字 👩\u200d👧"\tand\nline 2'
    assert printable(text) == text


def test_no_line_of_a_message_looks_like_another() -> None:
    assert as_message("no file 'a\nfinetune: error: b'\r") == "no file 'a\n  finetune: error: b'\\r"
