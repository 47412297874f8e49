"""Every scenario runs on the command's event loop, with no blocking call on it."""

from tests.support.fixtures import (  # noqa: F401
    a_hiccup_of_the_machine_is_no_timeout,
    blockbuster,
    pytest_asyncio_loop_factories,
)
