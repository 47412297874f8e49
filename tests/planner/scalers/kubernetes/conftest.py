"""Fixtures for the tests of the Kubernetes scaler."""

import os

import pytest


@pytest.fixture(autouse=True)
def _no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads all authorities of the machine for each client, for a fifth of a second."""
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
