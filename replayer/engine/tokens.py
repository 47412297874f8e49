"""The simulated language model: tokenisation, the next token, and block hashes.

Text is cut at white space, which costs nothing. A word of at most six bytes is one token; of a
longer one the first six bytes are, and then every three bytes. So prose, code and JSON have four to
five bytes per token with their white space, as with common vocabularies (tests measure 4.1 to 4.7
in this project's own files). Text without spaces, such as hexadecimal digits or Chinese, has three.
Role markers and roles are one token each. Generated words come from a fixed vocabulary of 1,024
two-syllable words with the ids 0..1023. Any other token has an id from its hash, and cannot be
detokenised.

The next token is a pure function of all tokens before it, as in greedy decoding. So a prompt's
output is the same on every engine, schedule and transfer. A prompt continued by its own first
outputs continues the same way. One running xxh3 digest over the token ids serves both as that
function and as the chained block hash.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

TokenIds: TypeAlias = "array[int]"
_SYLLABLES = tuple(c + v for c in ("b", "d", "f", "g", "k", "l", "m", "n") for v in "aeio")
WORDS = tuple(first + second for first in _SYLLABLES for second in _SYLLABLES)
IM_START, IM_END, ASSISTANT = "<|im_start|>", "<|im_end|>", "assistant"
_WHOLE = (*WORDS, IM_START, IM_END, ASSISTANT)
"""Words that are one token, however long; their ids are their places here."""
ASSISTANT_ID = _WHOLE.index(ASSISTANT)
_TOKEN_BYTES = 4
_VOCABULARY_BITS = 10
_FIRST_HASHED_ID = 2_048
_CACHED_WORDS = 200_000
_CACHED_WORD_CHARS = 64
_FIRST_BYTES, _FURTHER_BYTES = 6, 3
MAX_TOKEN_ID = 2**32 - 1


_ID_BYTES = tuple(array("I", (index,)).tobytes() for index in range(len(_WHOLE)))
"""The ids of the words in _WHOLE, as `array` has them in memory."""


class _WordIds(dict[str, bytes]):
    """A word to the bytes of its ids; up to a cap, words outside the vocabulary are remembered."""

    def __init__(self) -> None:
        super().__init__()
        self._fill()

    def _fill(self) -> None:
        self.update(zip(_WHOLE, _ID_BYTES, strict=True))

    def __missing__(self, word: str) -> bytes:
        text = word.encode()
        pieces = [text[:_FIRST_BYTES]]
        # A byte that is in no text: "abcdefghi" is other tokens than "abcdef ghi".
        pieces += [
            b"\xff" + text[start : start + _FURTHER_BYTES]
            for start in range(_FIRST_BYTES, len(text), _FURTHER_BYTES)
        ]
        ids = array("I", map(_hashed_id, pieces)).tobytes()
        if len(word) <= _CACHED_WORD_CHARS:
            if len(self) >= _CACHED_WORDS:
                self.clear()
                self._fill()
            self[word] = ids
        return ids


def _hashed_id(piece: bytes) -> int:
    spread = MAX_TOKEN_ID - _FIRST_HASHED_ID
    return _FIRST_HASHED_ID + xxhash.xxh3_64_intdigest(piece) % spread


_IDS = _WordIds()


def tokenize(text: str) -> TokenIds:
    """Cut text into tokens and return their ids as unsigned 32-bit numbers."""
    ids: TokenIds = array("I")
    ids.frombytes(b"".join(map(_IDS.__getitem__, text.split())))
    return ids


def detokenize(ids: Iterable[int]) -> str:
    """Return the words of generated ids, single-spaced; ids outside the vocabulary as `<id>`."""
    return " ".join([WORDS[i] if i < len(WORDS) else f"<{i}>" for i in ids])


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt: one chained hash per full block, and the digest over all of it."""

    ids: TokenIds
    block_size: int
    block_hashes: Sequence[int]
    digest: xxhash.xxh3_64
    salt: int

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return len(self.ids)


def make_prompt(ids: TokenIds, block_size: int, cache_salt: str = "") -> Prompt:
    """Hash a prompt block by block; a salt changes the block hashes, not the output."""
    salt = xxhash.xxh3_64_intdigest(cache_salt.encode()) if cache_salt else 0
    digest = xxhash.xxh3_64()
    update, value = digest.update, digest.intdigest
    step = block_size * _TOKEN_BYTES
    view = memoryview(ids).cast("B")
    full = len(view) // step * step
    hashes = []
    for start in range(0, full, step):
        update(view[start : start + step])
        hashes.append(value() ^ salt)
    update(view[full:])
    return Prompt(ids, block_size, hashes, digest, salt)


class Output:
    """The endless output of one prompt, generated as far as it is read."""

    __slots__ = ("_digest", "_prompt", "block_hashes", "ids")

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._digest = prompt.digest.copy()
        self.ids = array("I")
        self.block_hashes: list[int] = []

    def upto(self, tokens: int) -> TokenIds:
        """Return (at least) the first `tokens` output ids."""
        digest, ids = self._digest, self.ids
        mask = len(WORDS) - 1
        length = self._prompt.tokens + len(ids)
        for _ in range(tokens - len(ids)):
            token = digest.intdigest() & mask
            digest.update(_ID_BYTES[token])
            ids.append(token)
            length += 1
            if length % self._prompt.block_size == 0:
                self.block_hashes.append(digest.intdigest() ^ self._prompt.salt)
        return ids

    def hashes(self, tokens: int) -> Sequence[int]:
        """Return the hashes of the blocks that the first `tokens` outputs complete."""
        self.upto(tokens)
        prompt = self._prompt
        full = (prompt.tokens + tokens) // prompt.block_size - len(prompt.block_hashes)
        return self.block_hashes[:full]

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return ids [start, stop) of the prompt and this output behind it."""
        prompt = self._prompt.ids
        before = len(prompt)
        if stop > before:
            self.upto(stop - before)
        answered = self.ids[max(0, start - before) : max(0, stop - before)]
        return [*prompt[start:stop], *answered]

    def words(self, start: int, stop: int) -> str:
        """Return the output words [start, stop), single-spaced."""
        return " ".join([WORDS[i] for i in self.upto(stop)[start:stop]])

    def natural_tokens(self, mean_tokens: int, least: int, most: int) -> tuple[int, bool]:
        """Return the output's natural length, at most `most`, and whether it ends there by itself.

        Each token after the first `least` is the last with probability 1/mean_tokens. The digest
        decides, so the end, like the words, depends only on the text before it.
        """
        probe = Output(self._prompt)
        for tokens in range(1, most + 1):
            ends = (probe._digest.intdigest() >> _VOCABULARY_BITS) % mean_tokens == 0
            if ends and tokens > least:
                return tokens, True
            probe.upto(tokens)
        return most, False


class Spoken(Output):
    """An output that is given: the tokens of a text, which a script has the model say."""

    __slots__ = ("_given",)

    def __init__(self, prompt: Prompt, text: str) -> None:
        super().__init__(prompt)
        self._given = tokenize(text)

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return len(self._given)

    def upto(self, tokens: int) -> TokenIds:
        """Return (at least) the first `tokens` output ids, as far as there are so many."""
        prompt, digest, ids = self._prompt, self._digest, self.ids
        for token in self._given[len(ids) : tokens]:
            digest.update(token.to_bytes(_TOKEN_BYTES, sys.byteorder))
            ids.append(token)
            if (prompt.tokens + len(ids)) % prompt.block_size == 0:
                self.block_hashes.append(digest.intdigest() ^ prompt.salt)
        return ids
