"""Faults of one simulated engine, switched on and off while it runs.

`SimEngine.faults` holds the switches. `POST /sim/faults` sets them and answers with the new state:
`{"pull": "hang"}` changes one, `{}` none. They are kept over a restart.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any

CHOICES = {
    "query": ("ok", "hang", "error", "garbage", "empty"),
    "pull": ("ok", "hang", "refuse"),
    "prefill": ("ok", "hang", "error", "garbage", "huge"),
    "sensor": ("ok", "frozen", "dropout", "gone", "hang"),
    "stream": ("ok", "close", "reset", "stall", "no_done"),
}


@dataclass(slots=True)
class Faults:
    """The switches of one engine.

    `query`: answers of the bootstrap server. `pull`: KV sent to other engines. `prefill`: the
    answer of a prefill leg (its KV is pinned anyway). `stream`: a stream after `stream_tokens`
    tokens. `sensor` applies to /dcgm/metrics (--thermal): the last answer again, an answer without
    GPUs, a 503, none; `heat_celsius` is added to the air. The next `cuts` answers are cut after
    `cut_bytes` on the wire, head included, wherever that is.
    """

    query: str = "ok"
    pull: str = "ok"
    prefill: str = "ok"
    stream: str = "ok"
    stream_tokens: int = 1
    sensor: str = "ok"
    heat_celsius: int = 0
    cut_bytes: int = 0
    cuts: int = 0

    def change(self, **values: Any) -> None:
        """Set all given switches, or none: ValueError for an unknown one or a wrong value."""
        names = {field.name for field in fields(self)}
        for name, value in values.items():
            if name not in names:
                raise ValueError(f"{name}: no such switch; there are {', '.join(sorted(names))}")
            allowed = CHOICES.get(name)
            if allowed is not None and value not in allowed:
                raise ValueError(f"{name} {value!r}: must be one of {', '.join(allowed)}")
            if allowed is None and (not isinstance(value, int) or value < 0):
                raise ValueError(f"{name} {value!r}: must be a whole number from 0 on")
        for name, value in values.items():
            setattr(self, name, value)

    def state(self) -> dict[str, Any]:
        """Return every switch by name."""
        return asdict(self)
