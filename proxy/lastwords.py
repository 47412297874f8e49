"""The last event of a stream that was cut, in the form that the clients of its path understand."""

from __future__ import annotations

import orjson


def error_event(
    path: str, *, message: str, type_: str, code: str, request_id: str, events: int
) -> bytes:
    """One event; `events`: how many the client got before it.

    Clients of OpenAI's chat raise at `data: {"error": ...}`, Anthropic's at `event: error`; of the
    Responses API this is the event `error`, with the same object beside it.
    """
    error = {"message": message, "type": type_, "param": None, "code": code}
    error["request_id"] = request_id
    if path == "/v1/messages":
        said = {"type": "api_error", "message": message, "code": code}
        body = {"type": "error", "error": said, "request_id": request_id}
        return b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"
    if path == "/v1/responses":
        own = {"type": "error", "code": code, "message": message, "param": None}
        whole = own | {"sequence_number": events, "error": error}
        return b"event: error\ndata: " + orjson.dumps(whole) + b"\n\n"
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"
