"""Prompts share text exactly where their block ids are shared."""

from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.replay.prompts import (
    HEAD_WORDS,
    BlockText,
    BodyForm,
    PromptWriter,
    message_cuts,
    word_vocabulary,
)
from replayer.trace.loaders import TraceRequest, shared_blocks

BLOCK = 16
WORDS = word_vocabulary()
TEXT = BlockText(WORDS, seed=0, block_tokens=BLOCK)


def request(ids, *, tail=0, session="s", turn=0, output=8, **fields):
    length = len(ids) * BLOCK - (BLOCK - tail if tail else 0)
    return TraceRequest(
        request_id=f"{session}:{turn}",
        session_id=session,
        turn=turn,
        arrival_s=0.0,
        input_tokens=length,
        output_tokens=output,
        runs=tuple((block, 1) for block in ids),
        block_tokens=BLOCK,
        line=1,
        **fields,
    )


def words_of(ids):
    return TEXT.span(ids, BLOCK, 0, len(ids) * BLOCK).split(b" ")


def common(one, other):
    same = [a == b for a, b in zip(one, other, strict=False)]
    return [*same, False].index(False)


block_lists = st.lists(st.integers(0, 2**65), min_size=1, max_size=6)


@given(block_lists, block_lists)
def test_two_prompts_share_words_as_far_as_they_share_ids(one, other):
    shared = common(one, other)
    words = common(words_of(one), words_of(other))
    if shared == min(len(one), len(other)):
        assert words == shared * BLOCK
    else:
        # Heads spell different ids, so they differ before the first 16-token engine block ends.
        assert shared * BLOCK <= words < shared * BLOCK + HEAD_WORDS


@given(block_lists, st.data())
def test_any_span_is_a_cut_of_the_whole_text(ids, data):
    total = len(ids) * BLOCK
    start = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(start + 1, total))
    span = TEXT.span(ids, BLOCK, start, end).split(b" ")
    assert span == words_of(ids)[start:end]


def test_texts_depend_on_the_seed_and_on_nothing_else():
    again, other = (BlockText(WORDS, seed=seed, block_tokens=BLOCK) for seed in (0, 1))
    assert again.block(5, BLOCK) == TEXT.block(5, BLOCK) != other.block(5, BLOCK)


def test_words_are_single_lower_case_ascii_words():
    assert len(set(WORDS.words)) == 1024
    assert all(word.isalpha() and word.isascii() for word in WORDS.words)


sessions = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(0, BLOCK - 1), st.integers(1, 90)),
    min_size=1,
    max_size=8,
)


def grown(steps):
    """Make a session whose prompts keep some blocks of the last one and grow by some."""
    requests: list[TraceRequest] = []
    fresh, ids = 100, [1, 2, 3]
    for turn, (dropped, added, tail, output) in enumerate(steps):
        ids = ids[: max(1, len(ids) - dropped)] + list(range(fresh, fresh + added))
        fresh += added + 1
        requests.append(request(ids, tail=tail, turn=turn, output=output))
        ids = ids[:-1] if tail else ids  # a partial block's id is never seen again
    return requests


@given(sessions)
def test_turns_alternate_end_with_the_user_and_hold_the_whole_prompt(steps):
    requests = grown(steps)
    writer = PromptWriter(BodyForm("m"), requests)
    for one in requests:
        messages = orjson.loads(writer.body(one))["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2) + [
            "user"
        ]
        assert all(m["content"] for m in messages)
        joined = " ".join(m["content"] for m in messages).split()
        assert len(joined) == one.input_tokens
        assert joined == orjson.loads(flat_body(requests, one))["messages"][0]["content"].split()


def flat_body(requests, one):
    return PromptWriter(BodyForm("m", chat="flat"), requests).body(one)


def rendered(body):
    """Lay out messages as a chat template does: a marker word, the words, an end marker."""
    words: list[str] = []
    for message in orjson.loads(body)["messages"]:
        words += [f"<{message['role']}>", *message["content"].split(), "<end>"]
    return words


@given(sessions)
def test_a_rendered_chat_shares_at_least_what_the_ids_of_the_turn_before_share(steps):
    requests = grown(steps)
    writer = PromptWriter(BodyForm("m"), requests)
    for before, after in pairwise(requests):
        words = common(rendered(writer.body(before)), rendered(writer.body(after)))
        # One marker precedes the text; a message that ends is a marker more, never a word less.
        assert words > shared_blocks(before.runs, after.runs) * BLOCK


def test_messages_of_a_growing_session_stay_equal():
    requests = [request([1, 2, 3, *range(10, 10 + 4 * n)], turn=n) for n in range(4)]
    writer = PromptWriter(BodyForm("m"), requests)
    bodies = [orjson.loads(writer.body(one))["messages"] for one in requests]
    for before, after in pairwise(bodies):
        assert after[: len(before)] == before
        assert len(after) == len(before) + 2


def test_cuts_need_a_session():
    lone = [request([1, 2], session=None, turn=turn) for turn in range(2)]
    assert set(message_cuts(lone).values()) == {()}


def test_a_body_asks_for_a_stream_with_usage_and_an_exact_length():
    one = request([1, 2], output=33)
    body = orjson.loads(PromptWriter(BodyForm('a "name"'), [one]).body(one))
    assert body["model"] == 'a "name"'
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"]) == (33, True)


def test_completions_send_the_text_or_as_many_token_ids():
    one = request([1, 2], tail=3)
    text = orjson.loads(PromptWriter(BodyForm("m", endpoint="completions"), [one]).body(one))
    form = BodyForm("m", endpoint="completions", prompt="ids")
    ids = orjson.loads(PromptWriter(form, [one]).body(one))
    assert len(text["prompt"].split()) == len(ids["prompt"]) == one.input_tokens
    assert all(1024 <= token < 2048 for token in ids["prompt"])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_literal_content_is_sent_as_it_stands(endpoint):
    messages = ({"role": "user", "content": 'say "ü"'},)
    said = request([1], messages=messages)
    prompted = request([1], turn=1, prompt='say "ü"')
    writer = PromptWriter(BodyForm("m", endpoint=endpoint), [said, prompted])
    bodies = [orjson.loads(writer.body(one)) for one in (said, prompted)]
    if endpoint == "chat":
        assert [body["messages"] for body in bodies] == [list(messages)] * 2
    else:
        assert [body["prompt"] for body in bodies] == ['say "ü"'] * 2
