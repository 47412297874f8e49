"""From a body to facts: who asks, which blocks, how many tokens, may it be offloaded."""

from __future__ import annotations

import sys
from array import array
from statistics import fmean
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.types import BYTES_PER_TOKEN_PRIOR, MEDIA_PRIOR, UNIT_TOKENS, RequestFacts
from proxy.protocol.prompt.facts import (
    BLOCK_BYTES,
    TAILS,
    TokenEstimator,
    block_hashes,
    hash_seed,
    mixed,
    most_output_tokens,
    prompt_bytes,
    prompt_facts,
    seed_hashes,
    unit_hashes,
    unit_root,
)
from proxy.protocol.prompt.rendered import IDS, MOST_MEDIA
from tests.support.examined import facts_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def nested(levels: int, *, within: str) -> Any:
    value: Any = "deep"
    for _ in range(levels):
        value = [value] if within == "list" else {"k": value}
    return value


def facts(body: dict[str, Any], endpoint: str | None = None) -> RequestFacts:
    """Facts of a chat where there are messages, else of a completion."""
    return facts_of(endpoint or (CHAT if "messages" in body else COMPLETIONS), body)


def texts(body: dict[str, Any], endpoint: str | None = None) -> bytes:
    found = prompt_bytes(endpoint or (CHAT if "messages" in body else COMPLETIONS), body)
    assert found is not None
    return found


def sizes(endpoint: str, body: dict[str, Any]) -> tuple[int, int]:
    """Estimated tokens, and bytes to learn from."""
    prompt = prompt_facts(endpoint, body)
    assert prompt is not None
    return facts(body, endpoint).prompt_tokens, prompt.learnable_bytes


class TestPrompt:
    def test_tools_come_before_messages_wherever_they_stand(self) -> None:
        tools, messages = [{"name": "f"}], [{"role": "user", "content": "hi"}]
        one = texts({"messages": messages, "tools": tools})
        assert one == texts({"tools": tools, "messages": messages})
        assert one.index(b"name") < one.index(b"user")

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            ({}, b""),
            ({"prompt": None}, b""),
            ({"prompt": ""}, b""),
            ({"prompt": "a\0b"}, b"a\0b"),
            ({"prompt": "\ud800"}, b"\xed\xa0\x80"),
            ({"prompt": ["a", "b"]}, b"a\x1fb"),
            ({"prompt": [1, 2**32 - 1]}, b"\1\0\0\0\xff\xff\xff\xff"),
            ({"prompt": [[1], [2]]}, b"\1\0\0\0\x1f\2\0\0\0"),
            ({"prompt": [-1, 2**32, 10**30]}, b"-1\x1f4294967296\x1f1" + b"0" * 30),
            ({"prompt": [1.0, True]}, b"1.0\x1fTrue"),
            ({"prompt": []}, b""),
            ({"model": "m", "temperature": 1, "user": "u"}, b""),
        ],
        ids=repr,
    )
    def test_what_counts_as_the_prompt_of_a_completion(
        self, body: dict[str, Any], expected: bytes
    ) -> None:
        assert texts(body) == expected

    @pytest.mark.parametrize("within", ["list", "dict"])
    def test_depth_is_no_danger(self, within: str) -> None:
        deep = nested(1000, within=within)
        assert texts({"messages": deep}, CHAT).endswith(b"deep")
        assert facts({"messages": deep, "model": deep, "cache_salt": deep}).model == ""

    @given(
        st.sampled_from([CHAT, COMPLETIONS, "/v1/messages", "/v1/responses", "/v1/embeddings"]),
        st.dictionaries(
            st.sampled_from(["tools", "messages", "prompt", "input", "system", "n"]), json_values
        ),
    )
    def test_any_json_gives_facts(self, path: str, body: dict[str, Any]) -> None:
        found = facts(body, path)
        assert found.prompt_tokens >= 1
        assert len(found.block_hashes) == len(texts(body, path)) // BLOCK_BYTES


def leading(one: list[int], other: list[int]) -> int:
    equal = [a == b for a, b in zip(one, other, strict=False)]
    return equal.index(False) if False in equal else len(equal)


@pytest.mark.parametrize("given", [[7] * 3000, [[7] * 1000, [8] * 2000]], ids=["one", "several"])
def test_token_ids_to_embed_are_counted(given: Any) -> None:
    assert sizes("/v1/embeddings", {"model": "m", "input": given}) == (3000, 0)


class TestBlocks:
    @pytest.mark.parametrize(
        ("size", "blocks"),
        [(0, 0), (1, 0), (BLOCK_BYTES - 1, 0), (BLOCK_BYTES, 1), (5 * BLOCK_BYTES + 1, 5)],
    )
    def test_only_whole_blocks_have_a_hash(self, size: int, blocks: int) -> None:
        assert len(block_hashes(b"x" * size)) == blocks

    def test_equal_blocks_at_different_places_differ(self) -> None:
        assert len(set(block_hashes(b"x" * BLOCK_BYTES * 50))) == 50

    @given(st.integers(0, 6 * BLOCK_BYTES), st.integers(1, 6), st.integers(1, 6))
    def test_equal_prefixes_are_equal_hashes_and_nothing_else(
        self, common: int, one: int, other: int
    ) -> None:
        """Two prompts that part at a byte share the blocks before it, and none behind it."""
        head = b"h" * common
        a = block_hashes(head + b"a" * one * BLOCK_BYTES)
        b = block_hashes(head + b"b" * other * BLOCK_BYTES)
        assert leading(a, b) == common // BLOCK_BYTES
        assert not set(a[common // BLOCK_BYTES :]) & set(b)

    @pytest.mark.long
    @given(st.binary(min_size=BLOCK_BYTES, max_size=4 * BLOCK_BYTES), st.data())
    def test_a_changed_byte_changes_its_block_and_all_behind(
        self, prompt: bytes, data: st.DataObject
    ) -> None:
        at = data.draw(st.integers(0, len(prompt) - 1))
        changed = prompt[:at] + bytes([prompt[at] ^ 1]) + prompt[at + 1 :]
        assert leading(block_hashes(prompt), block_hashes(changed)) == min(
            at // BLOCK_BYTES, len(prompt) // BLOCK_BYTES
        )

    def test_a_longer_prompt_continues_a_shorter_ones_chain(self) -> None:
        turn = {"role": "user", "content": "x" * 3000}
        first = facts({"model": "m", "messages": [turn]}).block_hashes
        second = facts({"model": "m", "messages": [turn, turn]}).block_hashes
        assert list(second[: len(first)]) == list(first)
        assert len(second) > len(first)

    @pytest.mark.parametrize(
        ("same", "body"),
        [
            (True, {"model": "m", "temperature": 0.5}),
            (True, {"model": "m", "cache_salt": ""}),
            (False, {"model": "other"}),
            (False, {}),
            (False, {"model": "m", "cache_salt": "tenant"}),
        ],
    )
    def test_models_and_salts_share_no_block(self, same: bool, body: dict[str, Any]) -> None:
        prompt = {"prompt": "x" * 5000}
        base = facts({"model": "m", **prompt}).block_hashes
        assert bool(set(base) & set(facts({**body, **prompt}).block_hashes)) is same


class TestEstimator:
    def test_before_the_first_answer_the_prior_holds(self) -> None:
        prompt = "x" * 40_000
        assert facts({"prompt": prompt}).prompt_tokens == 40_000 / BYTES_PER_TOKEN_PRIOR

    def test_a_learned_ratio_is_used(self) -> None:
        estimator = TokenEstimator({"m": 2.5}.__getitem__)
        body = {"model": "m", "prompt": "x" * 10_000}
        found = facts_of(COMPLETIONS, body, estimator=estimator)
        assert found.prompt_tokens == 4000
        assert found.block_tokens == BLOCK_BYTES / 2.5

    @pytest.mark.parametrize(
        ("most", "body"),
        [
            (None, {}),
            (None, {"max_tokens": None}),
            (None, {"max_tokens": "many"}),
            (8, {"max_tokens": "8"}),
            (8, {"max_tokens": 8}),
            (9, {"max_tokens": 8, "max_completion_tokens": 9}),
            (8, {"max_tokens": 8, "max_completion_tokens": None}),
        ],
    )
    def test_the_most_output_tokens(self, most: int | None, body: dict[str, Any]) -> None:
        assert most_output_tokens(body) == most

    def test_token_ids_are_counted_not_estimated(self) -> None:
        estimator = TokenEstimator({"m": 2.0}.__getitem__)
        body = {"model": "m", "prompt": list(range(1000))}
        found = facts_of("/v1/completions", body, estimator=estimator)
        assert found.prompt_tokens == 1000
        assert found.block_tokens == BLOCK_BYTES / 4

    @pytest.mark.parametrize(
        ("prompt", "tokens"),
        [
            ([[1, 2, 3], [4, 5]], 5),
            ([[]], 1),
            ([[1], "x", None], 1),
            ([1, "2", 3.0], 3),
            (["1", 2], 2),
        ],
    )
    def test_ids_of_all_prompts_are_counted(self, prompt: Any, tokens: int) -> None:
        assert facts({"prompt": prompt}).prompt_tokens == tokens

    def test_what_the_engine_ignores_is_no_prompt(self) -> None:
        """Ids beside the messages of a chat, and messages beside a completion's prompt."""
        long = [{"role": "user", "content": "x" * 40_000}]
        chat = {"messages": long, "prompt": [1, 2, 3], "input": "i" * 9000}
        assert sizes(CHAT, chat) == (10_007, 40_028)
        assert sizes(COMPLETIONS, {"prompt": "p" * 4096, "messages": long}) == (1024, 4096)

    @pytest.mark.parametrize(
        ("most", "tokens"), [(10, 10), ("10", 10), (10**9, 1024), (0, 1), (-1, 1024), ("x", 1024)]
    )
    def test_a_truncated_prompt_is_as_long_as_what_is_kept(self, most: Any, tokens: int) -> None:
        """It teaches nothing, and stands in no index: its tail may be what is kept."""
        body = {"prompt": "p" * 4096, "truncate_prompt_tokens": most}
        assert sizes(COMPLETIONS, body) == (tokens, 0)
        assert facts(body, COMPLETIONS).block_hashes == []

    @pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
    def test_where_no_prompt_is_computed_none_is_kept(self, path: str) -> None:
        """What is only counted must not be taken for cached, nor for work."""
        said = [{"role": "user", "content": "x" * 40_000}]
        found = facts({"messages": said, "truncate_prompt_tokens": 9}, path)
        assert (found.prompt_tokens, found.block_hashes, list(found.ends)) == (1, [], [])

    @given(st.text(max_size=200), st.integers(1, 40))
    def test_hit_tokens_never_cover_the_whole_prompt(self, text: str, times: int) -> None:
        found = facts({"prompt": text * times})
        hits = [found.hit_tokens(n) for n in range(len(found.block_hashes) + 2)]
        assert hits == sorted(hits)
        assert hits[0] == 0
        assert hits[-1] < found.prompt_tokens

    def test_a_hit_is_neither_too_short_nor_too_long_on_average(self) -> None:
        """Two prompts part anywhere in a block; an engine counts in blocks of 16 to 64 tokens."""
        first = facts({"prompt": "a" * 8 * BLOCK_BYTES})
        for engine_tokens in (16, 64):
            missed = []
            for alike in range(3 * BLOCK_BYTES, 4 * BLOCK_BYTES, 16):
                body = {"prompt": "a" * alike + "b" * (8 * BLOCK_BYTES - alike)}
                hashes = facts(body).block_hashes
                both = sum(a == b for a, b in zip(hashes, first.block_hashes, strict=True))
                cached = int(alike / BLOCK_BYTES * first.block_tokens) // engine_tokens
                missed.append(cached * engine_tokens - first.hit_tokens(both))
            assert abs(fmean(missed)) < first.block_tokens / 10

    def test_facts_say_what_was_found(self) -> None:
        body = orjson.loads(b'{"model":"m","session_id":"s","n":2,"prompt":"' + b"x" * 4096 + b'"}')
        found = facts_of("/v1/completions", body)
        assert (found.model, found.session_id, found.offloadable) == ("m", "s", False)
        assert (found.prompt_tokens, len(found.block_hashes)) == (1024, 4)
        assert found.block_tokens == 256.0


class TestUnits:
    """The chain of a prompt's token ids, in which published blocks are found."""

    ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70)

    @given(ids, ids)
    def test_units_stand_for_all_ids_up_to_their_end(
        self, ids: list[int], other: list[int]
    ) -> None:
        pairs = zip(ids, other, strict=False)
        common = next((i for i, (one, two) in enumerate(pairs) if one != two), 1000)
        units, others = self.units(ids), self.units(other)
        assert len(units) == len(ids) // UNIT_TOKENS
        for at, (one, two) in enumerate(zip(units, others, strict=False)):
            assert (one == two) == ((at + 1) * UNIT_TOKENS <= common)

    @given(ids, st.integers(0, 70))
    def test_they_can_be_made_piece_by_piece(self, ids: list[int], cut: int) -> None:
        """As an engine's events have them."""
        cut = cut // UNIT_TOKENS * UNIT_TOKENS
        first, rest = (array(IDS, part).tobytes() for part in (ids[:cut], ids[cut:]))
        made = unit_hashes(first, unit_root(""))
        made += unit_hashes(rest, made[-1] if made else unit_root(""))
        assert made == self.units(ids)

    def test_they_are_kept_in_eight_bytes_each(self) -> None:
        found = prompt_facts("/v1/completions", {"prompt": [1] * 16_000})
        assert found is not None
        assert len(found.units) == 1000
        assert sys.getsizeof(found.units) < 9000

    def test_a_salt_makes_others(self) -> None:
        assert self.units([1] * 16) != self.units([1] * 16, cache_salt="s")

    @pytest.mark.parametrize(
        "body", [{"prompt": "text"}, {"prompt": [[1] * 16, [2] * 16]}, {"prompt": []}]
    )
    def test_texts_and_several_prompts_have_none(self, body: dict[str, Any]) -> None:
        found = prompt_facts("/v1/completions", body)
        assert found is not None
        assert list(found.units) == []

    @staticmethod
    def units(ids: list[int], **more: Any) -> list[int]:
        found = prompt_facts("/v1/completions", {"prompt": ids, **more})
        assert found is not None
        return list(found.units)


class TestEnds:
    """Hashes of a conversation up to the ends of its messages."""

    TALKS = st.lists(
        st.sampled_from(["a", "b", "c" * 700, "d" * 1023, ""]), min_size=1, max_size=24
    )

    @given(TALKS, TALKS)
    def test_equal_ends_are_equal_beginnings(self, one: list[str], other: list[str]) -> None:
        known = {end: one[: at + 1] for end, at in zip(*self.ends(one), strict=True)}
        for end, at in zip(*self.ends(other), strict=True):
            assert (end in known) == (other[: at + 1] in known.values())
            assert known.get(end, other[: at + 1]) == other[: at + 1]

    @pytest.mark.parametrize("size", range(BLOCK_BYTES - 24, BLOCK_BYTES + 1))
    def test_a_message_that_ends_where_a_block_does(self, size: int) -> None:
        (last,), _ = self.ends(["d" * size])
        assert self.ends(["d" * size, "more"])[0][0] == last

    def test_the_first_and_the_last_messages_are_looked_at(self) -> None:
        talk = [str(at) for at in range(40)]
        assert self.ends(talk)[1] == [0, 1, *range(32, 40)]
        assert len(set(self.ends(talk)[0])) == 10

    def test_more_text_behind_a_message_is_another_end(self) -> None:
        (whole,), _ = self.ends(["ab"])
        (longer, _), _ = self.ends(["a", "b"])
        assert whole != longer

    @pytest.mark.parametrize("more", [{"truncate_prompt_tokens": 5}, {"messages": "text"}])
    def test_prompts_whose_messages_say_not_all(self, more: dict[str, Any]) -> None:
        found = prompt_facts(CHAT, {"messages": [{"role": "user", "content": "x"}]} | more)
        assert found is not None
        assert list(found.ends) == []

    @pytest.mark.parametrize("turns", [1, 2, 3, 12])
    def test_the_last_answer_and_the_end_before_it(self, turns: int) -> None:
        messages = [{"role": "system", "content": "s"}]
        for turn in range(turns):
            messages += [{"role": "user", "content": f"q{turn}"}]
            messages += [{"role": "assistant", "content": f"a{turn}"}]
        found = prompt_facts(CHAT, {"messages": [*messages, {"role": "user", "content": "q"}]})
        before = prompt_facts(CHAT, {"messages": messages[:-1]})
        assert found is not None
        assert before is not None
        text, at = found.answer
        assert (text, found.ends[at]) == (f"a{turns - 1}", before.ends[-1])

    @pytest.mark.parametrize(
        "answer",
        [
            {"content": None, "tool_calls": [{}]},
            {"content": "x", "tool_calls": [{}]},
            {"content": [{"type": "text", "text": "x"}]},
            {"content": "x" * 20_000},
            {},
        ],
    )
    def test_answers_that_are_more_than_a_short_text(self, answer: dict[str, Any]) -> None:
        user = {"role": "user", "content": "q"}
        body = {"messages": [user, {"role": "assistant"} | answer, user]}
        found = prompt_facts(CHAT, body)
        assert found is not None
        assert found.answer == ("", 0)

    @staticmethod
    def ends(texts: list[str]) -> tuple[list[int], list[int]]:
        """The ends of these messages, and which messages they are of."""
        messages = [{"role": "user", "content": text} for text in texts]
        found = prompt_facts(CHAT, {"messages": messages})
        assert found is not None
        places = list(range(len(texts)))
        return list(found.ends), places if len(texts) <= 10 else places[:2] + places[-8:]


class TestTails:
    """What a conversation is known by, whatever stands in front of it."""

    SAID = ("question " * 20, "answer " * 20, "and another " * 20, "told " * 20)

    def tails(self, path: str, count: int, front: str, said: tuple[str, ...] = SAID) -> list[int]:
        roles = ("user", "assistant")
        turns = [{"role": roles[n % 2], "content": f"{said[n % 4]}{n}"} for n in range(count)]
        body: dict[str, Any] = {"messages": turns, "input": turns}
        if path == CHAT:
            turns.insert(0, {"role": "system", "content": front})
        else:
            body |= {"system": front, "instructions": front, "reasoning": {"effort": front}}
        return list(facts_of(path, body).tails)

    @pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
    @pytest.mark.parametrize("count", [1, 3, 9, 11, 31])
    def test_the_front_is_no_part_of_them(self, path: str, count: int) -> None:
        before = self.tails(path, count, "one")
        after = self.tails(path, count + 2, "another one")
        assert before[-1] != 0
        assert before[-1] == after[-3]
        assert len(set(after)) == len(after)

    def test_too_little_is_said(self) -> None:
        assert set(self.tails(CHAT, 3, "one" * 100, ("hi",) * 4)) == {0}

    @given(st.lists(st.sampled_from(["system", "user", "tool"]), max_size=40))
    def test_there_are_no_more_than_ends(self, roles: list[str]) -> None:
        turns = [{"role": role, "content": "x" * 200} for role in roles]
        found = facts_of(CHAT, {"messages": turns})
        assert len(found.tails) <= min(TAILS, len(found.ends))


def test_hashes_begin_with_the_processs_secret() -> None:
    """Without it whoever knows the code can choose prompts that meet in one place of a table."""
    told = [{"role": "user", "content": "what is said " * 200}, {"role": "user", "content": "x"}]
    body = {"model": "m", "messages": [*told, {"role": "assistant", "content": "y " * 80}, *told]}
    before, seen = hash_seed(), []
    try:
        for seed in (0, 7, 8, 7):
            seed_hashes(seed)
            facts = prompt_facts(CHAT, body)
            ids = prompt_facts(COMPLETIONS, {"model": "m", "prompt": list(range(64))})
            assert facts is not None
            assert ids is not None
            assert facts.hashes
            assert any(facts.tails)
            assert len(ids.units) > 1
            seen.append([*facts.hashes, *facts.ends, *facts.tails, *ids.units, mixed(5)])
    finally:
        seed_hashes(before)
    none, one, other, again = seen
    assert one == again
    for first, second in ((none, one), (one, other)):
        same = [a for a, b in zip(first, second, strict=True) if a == b and a]
        assert not same
    assert none[-1] == 5, "numbers of peers are as they are without one"


def test_media_of_a_block_are_kept_together() -> None:
    """Of 1,024 tiny ones a running stream kept 215 KiB."""
    parts = [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "audio_url", "audio_url": {"url": "y"}},
    ] * 512
    prompt = prompt_facts(CHAT, {"model": "m", "messages": [{"role": "user", "content": parts}]})
    assert prompt is not None
    assert {kind for kind, *_ in prompt.media} == {"image", "audio"}
    assert sum(number for *_, number in prompt.media) == MOST_MEDIA == len(parts)
    assert len(prompt.media) <= 2 * (prompt.bytes // BLOCK_BYTES + 1) < 100
    facts = TokenEstimator().facts(prompt, {})
    text_tokens = round(prompt.bytes / BYTES_PER_TOKEN_PRIOR)
    each = MEDIA_PRIOR["image"] + MEDIA_PRIOR["audio"]
    assert facts.prompt_tokens == pytest.approx(text_tokens + 512 * each, abs=512)
    cached = facts.hit_tokens(prompt.bytes // BLOCK_BYTES)
    assert cached == pytest.approx(facts.prompt_tokens, rel=0.05)
