"""Prompts made from block ids, so that two prompts share text exactly where they share ids.

The text of a block is a function of its id and the seed alone. Seven head words spell the id in
base 1024 (70 bits, no two ids collide). The rest is a slice of one seeded pool of words. Every word
is one token in the common vocabularies and never merges with its neighbour, so lengths need no
tokenizer and block boundaries are fixed. Seven head words fit inside the first 16-token engine
block: after the first differing id, an engine's chained block hashes share nothing. A partial tail
is the beginning of its own block. No tokenizer, network or clock is used here.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import accumulate, pairwise
from typing import Any

import orjson

from replayer.trace.loaders import TraceRequest, block_ids, shared_blocks

BASE_BITS = 10
HEAD_WORDS = 7
POOL_WORDS = 1 << 16
CACHED_WORDS = 1 << 22  # bound of the block cache: about 24 MB of text
# Token ids that stand for words where ids are sent: above the special and single-byte tokens that
# vocabularies put first, below the size of even a tiny test model's vocabulary (4,096).
FIRST_TOKEN_ID = 1024
Cuts = tuple[int, ...]  # token positions where one message ends and the next begins


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """1,024 words, and the separator between two words."""

    words: tuple[bytes, ...]
    separator: bytes


@lru_cache(maxsize=1)
def word_vocabulary() -> Vocabulary:
    """Load the list of short English words, each one token in the common vocabularies."""
    listed = orjson.loads((files("replayer") / "data" / "words1024.json").read_bytes())
    return Vocabulary(tuple(word.encode() for word in listed), b" ")


@lru_cache(maxsize=1)
def id_vocabulary() -> Vocabulary:
    """Return a vocabulary of token ids in decimal, for prompts sent as ids."""
    ids = range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + (1 << BASE_BITS))
    return Vocabulary(tuple(b"%d" % token for token in ids), b",")


@lru_cache(maxsize=2)
def _pool(vocabulary: Vocabulary, seed: int, size: int) -> tuple[bytes, tuple[int, ...]]:
    """Draw `size` words; returns their text and the offset of each word in it."""
    words = random.Random(seed).choices(vocabulary.words, k=size)
    gap = len(vocabulary.separator)
    return vocabulary.separator.join(words), (0, *accumulate(len(word) + gap for word in words))


class BlockText:
    """Makes the text of any block, whole or in part; the cache of blocks is bounded."""

    def __init__(self, vocabulary: Vocabulary, seed: int, block_tokens: int) -> None:
        """Make the pool of words; `block_tokens` is the size of the largest block."""
        self._words = vocabulary.words
        self._separator = vocabulary.separator
        self._pool, self._starts = _pool(vocabulary, seed, POOL_WORDS + block_tokens)
        self._gap = len(vocabulary.separator)
        self._salt = random.Random(seed).getrandbits(62)
        self.block = lru_cache(maxsize=CACHED_WORDS // block_tokens)(self._block)

    def _block(self, block_id: int, words: int) -> bytes:
        """Make the first `words` words of a block."""
        mask = (1 << BASE_BITS) - 1
        digits = range(0, BASE_BITS * min(words, HEAD_WORDS), BASE_BITS)
        head = self._separator.join([self._words[block_id >> shift & mask] for shift in digits])
        rest = words - HEAD_WORDS
        if rest <= 0:
            return head
        # Multiplying by the golden ratio spreads neighbouring ids over the pool.
        at = ((block_id + self._salt) * 0x9E3779B97F4A7C15 >> 20) % POOL_WORDS
        body = self._pool[self._starts[at] : self._starts[at + rest] - self._gap]
        return head + self._separator + body

    def span(self, ids: Sequence[int], block_tokens: int, start: int, end: int) -> bytes:
        """Make the words at positions start..end of the prompt with these block ids."""
        first, skipped = divmod(start, block_tokens)
        last, tail = divmod(end, block_tokens)
        parts = []
        if skipped:
            parts.append(
                self._inside(ids[first], skipped, min(block_tokens, end - start + skipped))
            )
            first += 1
        parts.extend([self.block(block_id, block_tokens) for block_id in ids[first:last]])
        if tail and last >= first:
            parts.append(self.block(ids[last], tail))
        return self._separator.join(parts)

    def _inside(self, block_id: int, start: int, end: int) -> bytes:
        words = self.block(block_id, end).split(self._separator)
        return self._separator.join(words[start:])


def message_cuts(requests: Sequence[TraceRequest]) -> dict[str, Cuts]:
    """Find where each request's prompt is cut into messages, from the requests of its session.

    A turn cuts where the turn before ended (at its last whole block, the tail being private), and
    again after the answer to it: user, assistant, user, ... Cuts inside the shared prefix are those
    of the turn before, so shared messages are equal. Requests must be in file order.
    """
    cuts: dict[str, Cuts] = {}
    last: dict[str, TraceRequest] = {}
    for request in requests:
        previous = last.get(request.session_id) if request.session_id is not None else None
        inherited = cuts[previous.request_id] if previous is not None else ()
        cuts[request.request_id] = (
            () if previous is None else _next_cuts(previous, inherited, request)
        )
        if request.session_id is not None:
            last[request.session_id] = request
    return cuts


def _next_cuts(previous: TraceRequest, inherited: Cuts, request: TraceRequest) -> Cuts:
    length = request.input_tokens or 0
    block = request.block_tokens
    whole = min(previous.full_blocks, request.full_blocks)
    shared = min(shared_blocks(previous.runs, request.runs), whole) * block
    pairs = list(zip(inherited[::2], inherited[1::2], strict=True))
    ended = previous.full_blocks * block
    if ended > (inherited[-1] if inherited else 0):
        answer = -(-previous.output_tokens // block) * block
        pairs.append((ended, ended + min(answer, max(1, (length - ended) // 2))))
    kept: list[int] = []
    for asked, answered in pairs:
        if asked > shared or asked + 2 > length:
            break
        kept += [asked, min(answered, length - 1)]
        if answered > shared:
            break
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class BodyForm:
    """Form of a request: endpoint chat or completions, chat turns or flat, prompt words or ids.

    `salt`: what stands in front of all literal text, so that no engine knows it from another run.
    """

    model: str
    endpoint: str = "chat"
    chat: str = "turns"
    prompt: str = "words"
    seed: int = 0
    salt: str = ""


class PromptWriter:
    """Makes request bodies by joining bytes, since the words need no JSON escaping."""

    def __init__(self, form: BodyForm, requests: Sequence[TraceRequest]) -> None:
        """Compute the message cuts of all requests, which must be in file order."""
        ids = form.prompt == "ids" and form.endpoint == "completions"
        block_tokens = max((request.block_tokens for request in requests), default=1)
        self._form = form
        self._ids = ids
        self._text = BlockText(
            id_vocabulary() if ids else word_vocabulary(), form.seed, block_tokens
        )
        turns = form.endpoint == "chat" and form.chat == "turns"
        self._cuts = message_cuts(requests) if turns else {}

    def body(self, request: TraceRequest) -> bytes:
        """Make the JSON body of one request."""
        head = b'{"model":' + orjson.dumps(self._form.model)
        options = (
            b',"stream":true,"stream_options":{"include_usage":true},"ignore_eos":true,'
            b'"temperature":0,"max_tokens":%d}' % request.output_tokens
        )
        if self._form.endpoint == "chat":
            return head + b',"messages":' + self._messages(request) + options
        return head + b',"prompt":' + self._prompt(request) + options

    def _prompt(self, request: TraceRequest) -> bytes:
        if request.messages is not None:
            contents = [str(message.get("content") or "") for message in request.messages]
            return orjson.dumps(self._form.salt + "\n".join(contents))
        if request.prompt is not None:
            return orjson.dumps(self._form.salt + request.prompt)
        text = self._segment(request, block_ids(request.runs), 0, request.input_tokens or 0)
        return b"[" + text + b"]" if self._ids else b'"' + text + b'"'

    def _messages(self, request: TraceRequest) -> bytes:
        if request.messages is not None:
            first, *rest = request.messages
            return orjson.dumps([_salted(first, self._form.salt), *rest])
        if request.prompt is not None:
            content = self._form.salt + request.prompt
            return orjson.dumps([{"role": "user", "content": content}])
        ids = block_ids(request.runs)
        length = request.input_tokens or 0
        bounds = (0, *self._cuts.get(request.request_id, ()), length)
        roles = (b'{"role":"user","content":"', b'{"role":"assistant","content":"')
        parts = [
            roles[index & 1] + self._segment(request, ids, start, end) + b'"}'
            for index, (start, end) in enumerate(pairwise(bounds))
        ]
        return b"[" + b",".join(parts) + b"]"

    def _segment(self, request: TraceRequest, ids: list[int], start: int, end: int) -> bytes:
        return self._text.span(ids, request.block_tokens, start, end)


def _salted(message: Mapping[str, Any], salt: str) -> Mapping[str, Any]:
    """Put the salt in front of a message's text, which may be in parts."""
    content = message.get("content")
    if not salt or not isinstance(content, str | list | None):
        return message
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": salt}, *content]}
    return {**message, "content": salt + (content or "")}
