"""A class of options made of its annotations."""

import pytest

from proxy.config.load import load
from proxy.config.options import Settings
from tests.support.options import NEEDED


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *[("1048576", 1 << 20), ("1_048_576", 1 << 20), ("64kB", 64_000), ("64k", 64_000)],
        *[("2KiB", 2048), ("1.5 MiB", 3 << 19), ("1GiB", 1 << 30)],
    ],
)
def test_sizes(text, number):
    assert load([*NEEDED, "--max-body-bytes", text], {}).settings.max_body_bytes == number


def test_settings_are_frozen_and_their_defaults_valid():
    settings = Settings(instances="a:1")
    with pytest.raises(AttributeError):
        setattr(settings, "port", 1)  # noqa: B010 - a plain assignment is a type error already
    assert Settings(**vars(settings)) == settings
    assert Settings(**vars(settings) | {"port": 1}) != settings
