"""Files of other tools that cannot be replayed, recognised to tell the user."""

from collections.abc import Iterable

HEAD_BYTES = 8192
"""Bytes of a file that show its kind."""
EXAMPLE = '{"timestamp":0,"input_length":1000,"output_length":100,"hash_ids":[1,2]}'
SHOWN_FIELDS = 8
SHOWN_CHARS = 40
KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ShareGPT, whose conversations have no lengths in tokens", ("conversations",)),
    ("a result of vllm bench, which has no arrivals", ("tokenizer_id", "num_prompts")),
    ("a result of vllm bench, which has no arrivals", ("request_throughput",)),
    ("a result of vllm bench, which has no arrivals", ("input_lens",)),
    ("Dynamo's agentic trace", ("dynamo.agentic_mooncake",)),
    ("Dynamo's agentic trace", ("play_id", "dependencies")),
    ("kv-cache-tester's, a session in each line", ("hash_id_scope", "requests")),
    ("TraceLab's, which has no block ids", ("input_tokens_total", "newly_append_tokens")),
    ("AIPerf's records of a run (profile_export.jsonl)", ("metadata", "metrics")),
    ("AIPerf's results of a run", ("input_config",)),
    ("AIPerf's turns, which have no lengths in tokens", ("turns",)),
    ("AIPerf's turns, which have no lengths in tokens", ("payloads",)),
    ("a batch of OpenAI's, which has no arrivals", ("custom_id", "body")),
    ("AIPerf's turns, which have no lengths in tokens", ("text",)),
    ("AIPerf's turns, which have no lengths in tokens", ("texts",)),
)
"""Kinds of files, and the names in them; the first kind with all its names present counts."""


def seen_in(head: bytes) -> str:
    """Say what a file is by its beginning; empty for what nobody knows."""
    for kind, names in KINDS:
        if all(f'"{name}"'.encode() in head for name in names):
            return kind
    return "a JSON array, but one object in each line" if head.lstrip()[:1] == b"[" else ""


def refused(kind: str) -> str:
    """Make the end of an error for a file of a kind."""
    return f", not {kind}; a row is like {EXAMPLE}"


def fields_of(names: Iterable[str]) -> str:
    """Say which fields an unknown row has."""
    shown = [name if len(name) <= SHOWN_CHARS else name[:SHOWN_CHARS] + "..." for name in names]
    more = ", ..." if len(shown) > SHOWN_FIELDS else ""
    return f"fields {', '.join(shown[:SHOWN_FIELDS])}{more}"
