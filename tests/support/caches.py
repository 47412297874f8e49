"""Engine caches by name, for tests of what is kept over all of them."""

from __future__ import annotations

from proxy.core.kvcache.engine_cache import EngineCache


class Caches:
    """A cache for each name that is asked for; a fresh one where the last was lost."""

    def __init__(self) -> None:
        self._by_name: dict[str, EngineCache] = {}

    def __getitem__(self, name: str) -> EngineCache:
        found = self._by_name.get(name)
        if found is None or found.is_lost:
            found = self._by_name[name] = EngineCache(name)
        return found
