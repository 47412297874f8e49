"""RequestFacts of a parsed body: session, prompt blocks, token estimate.

The prompt is the bytes of the texts that the engine renders (`rendering`), in its order. Blocks of
`BLOCK_BYTES` are hashed in a chain, so one hash stands for the whole prefix up to its block. There
is not a tokenizer: bytes per token, and tokens per image, are learned from the engines' own
`usage.prompt_tokens` (`core/fleet/bytes_per_token.py`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from multidict import istr
from xxhash import xxh3_64_intdigest

from proxy.core.types import BYTES_PER_TOKEN_PRIOR, MEDIA_PRIOR, UNIT_TOKENS, RequestFacts
from proxy.protocol.endpoints import Salting, endpoint_of
from proxy.protocol.names.session_names import (
    NO_NAMES,
    InBody,
    SessionNames,
    is_text,
    of_tenant,
    plain_name,
)
from proxy.protocol.offloadable import COMPLETIONS, is_offloadable, whole_number
from proxy.protocol.prompt.rendered import FIRST_ENDS, LAST_ENDS, Rendered, Texts

BLOCK_BYTES: Final = 1024
PART_RATIO: Final = 0.4
"""Expected extra hit after the last whole block, as a share of a block. Prompts part at a random
byte (0.5); engines round down to their own block of 8 to 32 tokens (-0.1)."""
MOST_ANSWER_CHARS: Final = 16_384
"""The text of a longer answer in a conversation is not kept."""
_SEPARATOR: Final = b"\x1f"
TAILS: Final = 4
TAIL_MESSAGES: Final = 2
"""Ends of messages that identify a conversation whatever it begins with: an answer and some tool
results follow the end of the last turn. So many messages stand for it."""
_SAID_BYTES: Final = 256
_LEAST_SAID: Final = 192
"""Bytes hashed at the end of each message and at the start of the first one, and their least sum:
fewer are common to many."""
_USER_AGENT: Final = istr("User-Agent")
_PROGRAM_CHARS: Final = 64
MODEL_CHARS: Final = 256
MOST_VALUES: Final = 1 << 18
MOST_VALUES_SMALL: Final = 1 << 12
"""Most values of a prompt; a list of token ids is one value. Each takes about 1 us to look at, so
few of them can be looked at on the event loop."""
_PROMPTS_MAX: Final = 1024
"""Most prompts of one request that vLLM takes (VLLM_MAX_COMPLETION_PROMPTS)."""
_KEPT_MAX: Final = 1 << 40
ID_BYTES: Final = 4
"""Bytes of a token id, like a token of text by the prior."""
_UNIT_BYTES: Final = UNIT_TOKENS * ID_BYTES
_WITH_IDS = {COMPLETIONS: "prompt", "/v1/embeddings": "input"}
"""The members that may have token ids in place of a text."""


Media = tuple[str, int, int]
"""A kind, where in the prompt's bytes the first one's digest begins, and how many of it its block
has."""
SEED_BYTES: Final = 8
_seed = 0


def encodable(text: str) -> str:
    """A text with halves of surrogate pairs written out: logs and other processes get UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def prompt_bytes(
    endpoint: str, body: Mapping[str, Any], most_values: int = MOST_VALUES
) -> bytes | None:
    """The prompt's texts as UTF-8, in their order; token ids as 4 bytes each.

    None: it has more than `most_values` values.
    """
    found = Rendered(endpoint_of(endpoint).dialect, body, most_values)
    return _SEPARATOR.join(found.texts) if found.is_whole else None


def _media(found: Rendered) -> list[Media]:
    """The media by block of the prompt and kind: small ones may be more than its blocks."""
    media: dict[tuple[int, str], Media] = {}
    size, done = 0, 0
    for kind, at in found.media:
        size += sum(map(len, found.texts[done:at])) + at - done
        done = at
        place = size // BLOCK_BYTES, kind
        _, first, number = media.get(place, (kind, size, 0))
        media[place] = kind, first, number + 1
    return list(media.values())


def _count_ids(prompt: Any) -> int:
    """Number of token ids of a prompt, or of a list of such prompts; 0 if it is neither.

    The engine checks each id, and takes 7.0 and "7" for one, but a list of strings for texts.
    """
    if not isinstance(prompt, list) or not prompt:
        return 0
    if isinstance(prompt[0], int | float):
        return len(prompt)
    first = prompt[:_PROMPTS_MAX]
    if isinstance(prompt[0], str):
        return 0 if all(isinstance(item, str) for item in first) else len(prompt)
    return sum(len(ids) for ids in first if isinstance(ids, list))


def _kept(most: Any) -> int:
    """Tokens that the engine keeps of a prompt by `truncate_prompt_tokens`; -1: it depends."""
    number = whole_number(most)
    return -1 if number is None else max(-1, min(number, _KEPT_MAX))


def seed_hashes(seed: int) -> None:
    """Begin all hashes of prompts with a secret of the process, 64 bits.

    Without it a client could find prompts whose hashes meet in one place of a table, and one look
    would take milliseconds. Equal prompts have equal hashes in all processes with one seed.
    """
    global _seed  # noqa: PLW0603 - of the process, set before its first prompt
    _seed = seed


def hash_seed() -> int:
    """The secret that hashes of prompts begin with."""
    return _seed


def mixed(name: int) -> int:
    """A number of 64 bits that a peer has chosen, as a key of tables; itself without a seed."""
    return name if not _seed else xxh3_64_intdigest(name.to_bytes(SEED_BYTES, "big"), _seed)


def block_hashes(prompt: bytes, root: bytes = b"") -> list[int]:
    """Chained xxh3-64 over whole blocks of the prompt; a partial last block has no hash."""
    return chained(prompt, xxh3_64_intdigest(root, _seed), BLOCK_BYTES)


def message_stops(texts: Texts, ends: list[int]) -> list[int]:
    """Bytes of the prompt up to the ends of its first and last messages, in their order.

    `ends`: texts up to each.
    """
    stops, size, done = [], 0, 0
    for end in ends:
        size += sum(map(len, texts[done:end])) + end - done
        done = end
        # Without the separator that follows: the last message has none.
        stops.append(max(0, size - 1))
    return stops


def message_ends(prompt: bytes, stops: list[int], hashes: list[int], root: bytes) -> list[int]:
    """Hashes of the prompt up to the ends of its messages.

    `hashes`: of the prompt's blocks, which begin with `root`.
    """
    found = []
    for stop in stops:
        blocks = stop // BLOCK_BYTES
        before = hashes[blocks - 1] if blocks else xxh3_64_intdigest(root, _seed)
        found.append(xxh3_64_intdigest(prompt[blocks * BLOCK_BYTES : stop], before))
    return found


def message_tails(prompt: bytes, begin: int, stops: list[int], count: int) -> list[int]:
    """Hashes of the first message and of the last ones up to some ends, each alone.

    By these a conversation is known whose system text is another one in each request. They stand
    for the last of the ends; 0 where too little is said. `begin`: bytes before the first message
    that is not the system's; `count`: of all messages.
    """
    last = len(stops) - 1
    # Of the first message behind a gap nobody knows where it begins.
    least = 0 if count == len(stops) else FIRST_ENDS + TAIL_MESSAGES
    least = max(least, last + 1 - TAILS)
    since = max(0, least + 1 - TAIL_MESSAGES)
    first = next((stop for stop in stops if stop > begin), begin)
    opening = xxh3_64_intdigest(prompt[begin : min(first, begin + _SAID_BYTES)], _seed)
    said, before = [], stops[since - 1] if since else begin
    for stop in stops[since:]:
        said.append(xxh3_64_intdigest(prompt[max(before, stop - _SAID_BYTES) : stop], _seed))
        before = max(before, stop)
    position = count - last
    return [
        hash(
            (opening, position + at, *said[max(0, at + 1 - TAIL_MESSAGES - since) : at + 1 - since])
        )
        if stops[at] - begin >= _LEAST_SAID
        else 0
        for at in range(least, last + 1)
    ]


NO_ANSWER = ("", 0)


def last_answer(body: Mapping[str, Any], ends: int) -> tuple[str, int]:
    """The text of the last answer in a chat, and where the message before it ends.

    That is a place among the `ends` of messages; no answer where it has more than a text.
    """
    given = body.get("messages")
    if not isinstance(given, list):
        return NO_ANSWER
    for back in range(2, min(len(given), LAST_ENDS)):
        item = given[-back]
        if isinstance(item, dict) and item.get("role") == "assistant":
            text = item.get("content")
            if not isinstance(text, str) or item.get("tool_calls"):
                return NO_ANSWER
            at = ends - back - 1
            is_kept = len(text) <= MOST_ANSWER_CHARS and at >= 0 and is_text(text)
            return (text, at) if is_kept else NO_ANSWER
    return NO_ANSWER


def unit_hashes(ids: bytes, before: int) -> list[int]:
    """Chained xxh3-64 over whole units of token ids; `before`: that of the unit before, or root."""
    return chained(ids, before, _UNIT_BYTES)


def kept_units(units: Sequence[int]) -> Sequence[int]:
    """Units as they are kept with a request, in 8 bytes each.

    A token id may have two bytes of a body. As objects its share of a unit would have three more,
    for as long as the request is there.
    """
    return array("Q", units)


def unit_root(salt: str) -> int:
    """The start of a prompt's chain of units with this `cache_salt`."""
    return xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass"), _seed)


def chained(data: bytes, chain: int, size: int) -> list[int]:
    """xxh3-64 over whole pieces of `size` bytes, each with the one before it as its seed."""
    starts = range(0, len(data) - size + 1, size)
    return [chain := xxh3_64_intdigest(data[at : at + size], chain) for at in starts]


class PromptFacts:
    """A body's prompt, as far as it does not depend on learned values.

    `model`: the model's name. `bytes`: of the prompt's texts, token ids as 4 each. `ids`: number of
    token ids, 0 for a text. `hashes`: chained hashes of its blocks; none if the engine keeps only a
    part of the prompt, possibly its tail. `kept`: tokens of that part, -1 if that depends on the
    engine. `units`: of its token ids, chained as `unit_hashes` does; empty for a text or several
    prompts. `ends`: of its messages, see `message_ends`. `answer`: the text of the last answer
    among them, and the place in `ends` of the message before it. `tails`: see `message_tails`.
    `dialect`: the form of its body. `media`: images and other things that become no text.
    `offloadable`: see `is_offloadable`.
    """

    __slots__ = (
        "answer",
        "bytes",
        "dialect",
        "ends",
        "hashes",
        "ids",
        "kept",
        "media",
        "model",
        "offloadable",
        "tails",
        "units",
    )

    def __init__(  # noqa: PLR0913 - a value has as many fields as it has
        self,
        model: str,
        bytes: int,  # noqa: A002 - the field's name
        ids: int,
        hashes: list[int],
        kept: int | None = None,
        units: Sequence[int] = (),
        ends: Sequence[int] = (),
        answer: tuple[str, int] = NO_ANSWER,
        dialect: str = "",
        media: Sequence[Media] = (),
        tails: Sequence[int] = (),
        *,
        offloadable: bool,
    ) -> None:
        self.model = model
        self.bytes = bytes
        self.ids = ids
        self.hashes = hashes
        self.kept = kept
        self.units = units
        self.ends = ends
        self.answer = answer
        self.dialect = dialect
        self.media = media
        self.tails = tails
        self.offloadable = offloadable

    @property
    def learnable_bytes(self) -> int:
        """Bytes of the text whose tokens the engine counts; 0 where it counts others."""
        return 0 if self.ids or self.kept is not None else self.bytes


def prompt_facts(
    endpoint: str, body: Mapping[str, Any], most_values: int = MOST_VALUES
) -> PromptFacts | None:
    """The prompt of a parsed body; None: it has more than `most_values` values.

    On a path where no prompt is computed none of it is kept.
    """
    dialect = endpoint_of(endpoint).dialect
    found = Rendered(dialect, body, most_values)
    if not found.is_whole:
        return None
    texts, ends = found.texts, found.ends
    prompt = _SEPARATOR.join(texts)
    model = encodable(plain_name(body.get("model"))[:MODEL_CHARS])
    is_computed = endpoint_of(endpoint).salting is not Salting.NO_KV
    most = body.get("truncate_prompt_tokens") if is_computed else 0
    salt = plain_name(body.get("cache_salt"))
    root = f"{model}\0{salt}".encode("utf-8", "surrogatepass")
    with_ids = _WITH_IDS.get(endpoint)
    ids = _count_ids(body.get(with_ids)) if with_ids is not None else 0
    has_units = most is None and ids * ID_BYTES == len(prompt)
    hashes = block_hashes(prompt, root) if most is None else []
    begin, *stops = message_stops(texts, [found.before, *ends]) if ends else [0]
    return PromptFacts(
        model,
        len(prompt),
        ids,
        hashes,
        None if most is None else _kept(most),
        kept_units(unit_hashes(prompt, unit_root(salt))) if has_units else (),
        message_ends(prompt, stops, hashes, root) if most is None else (),
        last_answer(body, len(ends)) if most is None and ends else NO_ANSWER,
        dialect,
        _media(found) if found.media else (),
        message_tails(prompt, begin, stops, found.count) if stops and most is None else (),
        offloadable=is_offloadable(endpoint, body),
    )


def _prior(_model: str) -> float:
    return BYTES_PER_TOKEN_PRIOR


def _media_prior(_model: str, kind: str) -> float:
    return MEDIA_PRIOR[kind]


class TokenEstimator:
    """Makes the facts of requests.

    `bytes_per_token` gives the ratio learned for a model, `media_tokens` the tokens of one medium
    of a kind.
    """

    def __init__(
        self,
        bytes_per_token: Callable[[str], float] = _prior,
        media_tokens: Callable[[str, str], float] = _media_prior,
    ) -> None:
        self._bytes_per_token = bytes_per_token
        self._media_tokens = media_tokens
        self.names = SessionNames()

    def facts(
        self,
        prompt: PromptFacts,
        headers: Mapping[str, str],
        in_body: InBody = NO_NAMES,
        tenant: str | None = None,
    ) -> RequestFacts:
        """The facts of a request. `in_body`: its session's name by its body.

        Sessions of two tenants are different ones, even with the same name.
        """
        name, own_id = self.names.of(headers, in_body)
        ids, size = prompt.ids, prompt.bytes
        ratio = self._bytes_per_token(prompt.model)
        tokens = ids or max(1, round(size / ratio))
        media: list[tuple[float, int]] = []
        for kind, at, number in prompt.media:
            their = number * round(self._media_tokens(prompt.model, kind))
            media.append((at / BLOCK_BYTES, their))
            tokens += their
        if prompt.kept is not None and prompt.kept >= 0:
            tokens = max(1, min(tokens, prompt.kept))
        block_tokens = BLOCK_BYTES * (ids / max(1, size) if ids else 1 / ratio)
        return RequestFacts(
            model=prompt.model,
            session_id=of_tenant(name, tenant),
            tenant=tenant or "",
            prompt_tokens=tokens,
            block_hashes=prompt.hashes,
            block_tokens=block_tokens,
            offloadable=prompt.offloadable,
            units=prompt.units,
            ends=prompt.ends,
            part_tokens=PART_RATIO * block_tokens,
            media=media,
            client=client_kind(prompt.dialect, headers),
            own_id=of_tenant(own_id, tenant),
            tails=prompt.tails,
            takes_turn=prompt.kept != 0 and prompt.bytes > 0,
        )


def client_kind(dialect: str, headers: Mapping[str, str]) -> str:
    """The kind of a client, by which predictions for it are judged: its program and its dialect.

    Of `claude-cli/2.1.119 (external, cli)` the program is `claude-cli/2.1.119`.
    """
    program = headers.get(_USER_AGENT, "").partition(" ")[0][:_PROGRAM_CHARS]
    return f"{dialect} {program}"


def most_output_tokens(body: Mapping[str, Any]) -> int | None:
    """The most output tokens that the client allows; None if it gives no limit."""
    names = "max_completion_tokens", "max_tokens", "max_output_tokens"
    most = (whole_number(body.get(name)) for name in names)
    return next((tokens for tokens in most if tokens is not None), None)
