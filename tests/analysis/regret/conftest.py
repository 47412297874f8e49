"""The watched run is computed once: no test changes it."""

import pytest

from tests.support.regret import Watched, watch


@pytest.fixture(scope="session")
def watched() -> Watched:
    return watch()
