"""What a command says that is refused."""


def check(outcome: tuple[int, str, str], status: int, *messages: str) -> None:
    got, _, err = outcome
    assert got == status, err
    assert err.startswith("finetune: error: "), err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    for message in messages:
        assert message in err
