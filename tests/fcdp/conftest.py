"""The ranks that all tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.fcdp.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Started as they are needed, the first time."""
    ranks = Pool()
    yield ranks
    ranks.close()
