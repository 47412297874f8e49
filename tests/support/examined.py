"""Bodies as the proxy examines them, for tests that begin with a parsed one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from proxy.core.types import RequestFacts
from proxy.protocol.body import Members
from proxy.protocol.names.session_names import session_in
from proxy.protocol.prompt.facts import TokenEstimator, prompt_facts


def facts_of(
    endpoint: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    tenant: str | None = None,
    estimator: TokenEstimator | None = None,
) -> RequestFacts:
    """The facts of a request with this body."""
    prompt = prompt_facts(endpoint, body)
    assert prompt is not None
    return (estimator or TokenEstimator()).facts(prompt, headers or {}, session_in(body), tenant)


def splice(body: bytes, put: Mapping[str, bytes], drop: Collection[str] = ()) -> bytes:
    """A body with a few members set and removed."""
    return Members(body).edited(put, drop).raw
