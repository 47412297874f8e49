"""No blocking call on the event loop, in any shell test."""

from collections.abc import Iterator

import pytest
from blockbuster import BlockBuster, blockbuster_ctx


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[BlockBuster]:
    with blockbuster_ctx("proxy") as found:
        for function in found.functions.values():
            # Opening the log and reading the version happen once, before the first request.
            function.can_block_in("proxy/service.py", "start")
        yield found
