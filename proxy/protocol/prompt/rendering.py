"""The rendered members of a request: one table, a row per dialect and member.

The key of a prompt (`facts`) has to change where the engine's own prompt changes, and nowhere else.
A member without a row is not a part of the prompt, as engines ignore it. Read from vLLM 0.32
(`renderers/chat_utils.py`, `entrypoints/anthropic/serving.py`,
`entrypoints/openai/responses/utils.py`); `tests/real_vllm/test_rendering.py` holds the rows against
a real engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

from proxy.protocol.endpoints import Dialect

BILLING: Final = "x-anthropic-billing-header"
"""vLLM drops a system text's first line that begins so: it has a hash per request."""


class Where(Enum):
    """Place of a member in the rendered prompt."""

    FRONT = "front"
    """Before all turns: a change leaves nothing of the cache usable."""
    IN_PLACE = "in place"
    """Where it stands among the turns: what comes before it stays usable."""
    NOT = "not rendered"


class How(StrEnum):
    """Rendering of a member's value."""

    TEXT = "text"
    JSON = "JSON"
    OFF = "whether thinking is disabled"
    TOOLS = "name, description and schema of each tool"
    CONTENT = "a text, or parts by their types"
    CALLS = "name and arguments of each call"
    ARGUMENTS = "JSON, whatever its white space"
    TURNS = "turns"
    ANY = "every text in it"
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    FILE = "file"


MEDIA: Final = tuple(how.value for how in (How.IMAGE, How.AUDIO, How.VIDEO, How.FILE))
"""The kinds of what becomes no text: the key has its digest, its size is learned by kind."""


@dataclass(frozen=True, slots=True)
class Row:
    """One member of a dialect's body.

    `member`: its path from the body; `[]` stands for each item of an array, `[type]` for those of
    this type. Rows of one object stand in the order in which templates render its members.
    """

    dialect: Dialect
    member: str
    where: Where
    how: How = How.TEXT


def _rows(dialect: Dialect, where: Where, *members: str | tuple[str, How]) -> list[Row]:
    given = [(one, How.TEXT) if isinstance(one, str) else one for one in members]
    return [Row(dialect, member, where, how) for member, how in given]


ROWS: Final = (
    *_rows(
        Dialect.CHAT,
        Where.FRONT,
        "reasoning_effort",
        "chat_template",
        ("chat_template_kwargs", How.JSON),
        ("add_special_tokens", How.JSON),
        ("mm_processor_kwargs", How.JSON),
        ("media_io_kwargs", How.JSON),
        ("tools", How.TOOLS),
        ("documents", How.ANY),
    ),
    *_rows(
        Dialect.CHAT,
        Where.IN_PLACE,
        ("messages", How.TURNS),
        "messages[].role",
        ("messages[].tools", How.TOOLS),
        "messages[].reasoning",
        "messages[].reasoning_content",
        ("messages[].content", How.CONTENT),
        ("messages[].tool_calls", How.CALLS),
        "messages[].content[text].text",
        "messages[].content[input_text].text",
        "messages[].content[output_text].text",
        "messages[].content[refusal].refusal",
        "messages[].content[thinking].thinking",
        "messages[].content[tool_reference].name",
        ("messages[].content[image_url].image_url", How.IMAGE),
        ("messages[].content[input_image].image_url", How.IMAGE),
        ("messages[].content[image_pil].image_pil", How.IMAGE),
        ("messages[].content[image_embeds].image_embeds", How.IMAGE),
        ("messages[].content[input_audio].input_audio", How.AUDIO),
        ("messages[].content[audio_url].audio_url", How.AUDIO),
        ("messages[].content[audio_embeds].audio_embeds", How.AUDIO),
        ("messages[].content[video_url].video_url", How.VIDEO),
        ("messages[].content[video_embeds].video_embeds", How.VIDEO),
        ("messages[].content[file].file", How.FILE),
    ),
    *_rows(
        Dialect.CHAT,
        Where.NOT,
        "messages[].name",
        "messages[].tool_call_id",
        "messages[].tool_calls[].id",
        "messages[].annotations",
        "messages[].cache_control",
        "messages[].content[text].cache_control",
        "tools[].cache_control",
        "messages[].content[image_url].detail",
        "metadata",
        "user",
        "prompt_cache_key",
        "store",
        "temperature",
        "tool_choice",
        "response_format",
    ),
    *_rows(
        Dialect.MESSAGES,
        Where.FRONT,
        "output_config.effort",
        ("thinking.type", How.OFF),
        ("chat_template_kwargs", How.JSON),
        ("tools", How.TOOLS),
        ("system", How.CONTENT),
    ),
    *_rows(
        Dialect.MESSAGES,
        Where.IN_PLACE,
        ("messages", How.TURNS),
        "messages[].role",
        ("messages[].content", How.CONTENT),
        "messages[].content[thinking].thinking",
        "messages[].content[text].text",
        ("messages[].content[image].source", How.IMAGE),
        ("messages[].content[document].source", How.FILE),
        "messages[].content[tool_use].name",
        ("messages[].content[tool_use].input", How.JSON),
        ("messages[].content[tool_result].content", How.CONTENT),
        "messages[].content[tool_reference].tool_name",
    ),
    *_rows(
        Dialect.MESSAGES,
        Where.NOT,
        "system[text].cache_control",
        "messages[].content[text].cache_control",
        "messages[].content[text].citations",
        "messages[].content[thinking].signature",
        "messages[].content[redacted_thinking].data",
        "messages[].content[tool_use].id",
        "messages[].content[tool_use].caller",
        "messages[].content[tool_result].tool_use_id",
        "messages[].content[tool_result].is_error",
        "tools[].cache_control",
        "thinking.budget_tokens",
        "metadata",
        "context_management",
        "max_tokens",
    ),
    *_rows(
        Dialect.RESPONSES,
        Where.FRONT,
        "reasoning.effort",
        ("chat_template_kwargs", How.JSON),
        ("tools", How.TOOLS),
        ("instructions", How.CONTENT),
    ),
    *_rows(
        Dialect.RESPONSES,
        Where.IN_PLACE,
        ("input", How.TURNS),
        "input[].role",
        ("input[].content", How.CONTENT),
        "input[].content[input_text].text",
        "input[].content[output_text].text",
        "input[].content[text].text",
        "input[].content[refusal].refusal",
        "input[].content[reasoning_text].text",
        "input[].content[summary_text].text",
        ("input[].content[input_image].image_url", How.IMAGE),
        ("input[].content[input_audio].input_audio", How.AUDIO),
        ("input[].content[input_file].file_data", How.FILE),
        ("input[reasoning].content", How.CONTENT),
        ("input[reasoning].summary", How.CONTENT),
        "input[function_call].namespace",
        "input[function_call].name",
        ("input[function_call].arguments", How.ARGUMENTS),
        ("input[function_call_output].output", How.CONTENT),
        "input[custom_tool_call].name",
        "input[custom_tool_call].input",
        ("input[custom_tool_call_output].output", How.CONTENT),
    ),
    *_rows(
        Dialect.RESPONSES,
        Where.NOT,
        "input[].id",
        "input[].status",
        "input[].phase",
        "input[].content[output_text].annotations",
        "input[].content[output_text].logprobs",
        "input[].content[input_image].detail",
        "input[reasoning].id",
        "input[reasoning].encrypted_content",
        "input[item_reference].id",
        "input[compaction].encrypted_content",
        "input[function_call].id",
        "input[function_call].call_id",
        "input[function_call_output].call_id",
        "metadata",
        "user",
        "prompt_cache_key",
        "include",
        "store",
        "text",
    ),
    *_rows(Dialect.COMPLETIONS, Where.FRONT, ("prompt", How.ANY)),
    *_rows(Dialect.COMPLETIONS, Where.NOT, "messages", "input", "suffix", "user"),
    *_rows(
        Dialect.OPENAI,
        Where.FRONT,
        *[(name, How.ANY) for name in ("chat_template", "chat_template_kwargs", "instruction")],
        *[(name, How.ANY) for name in ("tools", "system", "instructions", "messages", "prompt")],
        *[(name, How.ANY) for name in ("input", "query", "queries", "text_1", "data_1")],
        *[(name, How.ANY) for name in ("documents", "items", "text_2", "data_2")],
    ),
)
"""The table."""
