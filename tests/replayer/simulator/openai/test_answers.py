"""Answers in vLLM's form, whole and streamed."""

from tests.support.sim_http import CHAT, MESSAGES, TEXT, events_of, post


async def test_whole_chat(http, engine):
    status, body = await post(http, engine, CHAT, messages=MESSAGES, max_tokens=12)
    assert status == 200
    (choice,) = body["choices"]
    assert len(choice["message"]["content"].split(" ")) == 12
    assert choice["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 95,
        "total_tokens": 107,
        "completion_tokens": 12,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "created_cache_tokens": 80,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }
    assert body["kv_transfer_params"] is None


async def test_streamed_chat_begins_with_the_role_and_ends_with_usage(http, engine):
    _status, whole = await post(http, engine, CHAT, messages=MESSAGES, max_tokens=40)
    role, *content, usage = await events_of(
        http,
        engine,
        CHAT,
        messages=MESSAGES,
        max_completion_tokens=40,
        stream_options={"include_usage": True},
    )
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(event["choices"][0]["delta"]["content"] for event in content)
    assert text == whole["choices"][0]["message"]["content"]
    finishes = [event["choices"][0]["finish_reason"] for event in content]
    assert finishes == [None] * (len(content) - 1) + ["length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 40
    assert usage["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 80,
        "created_cache_tokens": 0,
    }


async def test_no_usage_chunk_unless_asked_for(http, engine):
    events = await events_of(http, engine, TEXT, prompt="a b c", max_tokens=3)
    assert all(event["choices"] and "usage" not in event for event in events)
    assert "".join(event["choices"][0]["text"] for event in events).count(" ") == 3
