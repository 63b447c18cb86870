"""Exit statuses, and the hint at a mistyped name."""

from common.errors import FinetuneError, UserError, did_you_mean


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
