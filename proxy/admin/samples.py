"""GET /samples: the last ended requests in plain numbers, for what plans the fleet."""

from __future__ import annotations

from aiohttp import web

from proxy.net.server.responses import error_response, json_response
from proxy.telemetry.samples import FIELDS, Samples

MOST_SEQUENCE = 10**12
"""No process ends so many requests."""


class SamplesPath:
    """/samples, for planners; `samples`: those that are kept with `--samples`."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    async def samples(self, request: web.Request) -> web.Response:
        """The oldest samples after ?after=SEQUENCE, and which sequences there are."""
        samples, text = self._samples, request.query.get("after", "0")
        if not samples.is_on:
            return error_response(404, "samples: none are kept; --samples N keeps the last N")
        has_digits = text.isdecimal() and len(text) <= len(str(MOST_SEQUENCE))
        if not has_digits or int(text) > MOST_SEQUENCE:
            return error_response(400, f"after: a whole number, 0 to {MOST_SEQUENCE}")
        return json_response(
            {
                "started_at": samples.started_at,
                "first": samples.first,
                "last": samples.last,
                "fields": FIELDS,
                "samples": samples.after(int(text)),
            }
        )
