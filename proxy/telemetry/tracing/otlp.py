"""Otlp: sends spans to a collector by OTLP over HTTP, with the exporter of OpenTelemetry's SDK.

Headers, CA, client certificate, compression and timeout are those of the environment
(`OTEL_EXPORTER_OTLP_...`), as the SDK reads them. Only the tracing thread uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace.export import SpanExportResult
from requests.exceptions import InvalidHeader
from urllib3.exceptions import HTTPError

from proxy import __version__
from proxy.telemetry.log import printable
from proxy.telemetry.record import RequestRecord
from proxy.telemetry.tracing.spans import spans_of

PATH = "/v1/traces"
ANSWER_BYTES = 64 << 10
"""Of a longer answer the rest is not read: its connection is closed."""
FAULT_CHARS = 300
MOST_CAUSES = 8
_SDK = logging.getLogger("opentelemetry")


class _Heard(logging.Handler):
    """Keeps what the SDK said last, in place of its own lines."""

    said = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.said = record.getMessage()


class _Session(requests.Session):
    """The connection to the collector; `fault`: why the last request had no answer, if so."""

    fault = ""

    def __init__(self) -> None:
        super().__init__()
        self.stream = True
        self.hooks["response"] = [_read]

    def request(self, *given: Any, **named: Any) -> requests.Response:
        """Send a request, as the exporter does; its own lines say nothing of the cause."""
        self.fault = ""
        try:
            return super().request(*given, **named)
        except InvalidHeader:  # its text has the value
            self.fault = "OTEL_EXPORTER_OTLP_HEADERS has what no header can have"
            raise
        except (requests.RequestException, HTTPError) as error:
            self.fault = str(_first_cause(error))
            raise


class Otlp:
    """The way to one collector. `name`: this process among those that send to it."""

    def __init__(self, endpoint: str, name: str) -> None:
        about = {
            "service.name": "cache-proxy",
            "service.version": __version__,
            "service.instance.id": name,
        }
        # The environment's names win: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES.
        self._resource = Resource(about).merge(OTELResourceDetector().detect())
        self._heard = _Heard(logging.WARNING)
        _SDK.handlers, _SDK.propagate = [self._heard], False
        logging.getLogger("urllib3").setLevel(logging.WARNING)
        self._session = _Session()
        self._exporter = OTLPSpanExporter(endpoint=_traces_of(endpoint), session=self._session)

    def send(self, records: Sequence[RequestRecord]) -> str | None:
        """Send the spans of some requests; returns why the collector has not taken them."""
        spans = [span for record in records for span in spans_of(record, self._resource)]
        self._session.fault = self._heard.said = ""
        if self._exporter.export(spans) is SpanExportResult.SUCCESS:
            return None
        said = self._session.fault or self._heard.said or "unknown"
        return printable(said[:FAULT_CHARS])


def _traces_of(endpoint: str) -> str:
    """The address for spans: a bare server's has the path that OTLP gives them."""
    is_bare = urlsplit(endpoint).path in ("", "/")
    return endpoint.removesuffix("/") + PATH if is_bare else endpoint


def _first_cause(error: BaseException) -> BaseException:
    """The error that all others were made of; some say which only among their arguments."""
    for _ in range(MOST_CAUSES):
        told = (error.__cause__, getattr(error, "reason", None), *error.args)
        before = next((one for one in told if isinstance(one, BaseException)), None)
        if before is None:
            break
        error = before
    return error


def _read(response: requests.Response, **_: Any) -> None:
    """Read an answer's body so far that its connection can be used again; nobody looks at it."""
    response.raw.read(ANSWER_BYTES, decode_content=False)
    response.close()
