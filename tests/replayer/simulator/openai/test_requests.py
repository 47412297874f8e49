"""What of a request's body the simulator understands, as vLLM does."""

from replayer.simulator.host import SimFleet
from tests.support.sim_http import CHAT, MESSAGES, TEXT, events_of, post


async def test_completions_default_to_sixteen_tokens_and_take_ids(http, engine):
    _status, by_text = await post(http, engine, TEXT, prompt="a b c", return_token_ids=True)
    (choice,) = by_text["choices"]
    assert len(choice["token_ids"]) == 16
    _status, by_ids = await post(http, engine, TEXT, prompt=choice["prompt_token_ids"])
    assert by_ids["choices"][0]["text"] == choice["text"]
    head = choice["prompt_token_ids"] + choice["token_ids"][:6]
    _status, rest = await post(http, engine, TEXT, prompt=head, max_tokens=10)
    assert choice["text"].endswith(rest["choices"][0]["text"])


async def test_several_prompts_and_several_choices(http, engine):
    _status, body = await post(http, engine, TEXT, prompt=["a b", "c d e"], n=2, max_tokens=4)
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (5, 16)
    events = await events_of(http, engine, TEXT, prompt=["a b", "c d e"], max_tokens=4)
    streamed = ["", ""]
    for event in events:
        streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert streamed == [texts[0], texts[2]]


async def test_outputs_without_a_limit_end_by_themselves(http, engine):
    _status, body = await post(http, engine, CHAT, messages=MESSAGES)
    assert body["choices"][0]["finish_reason"] == "stop"
    _status, again = await post(http, engine, CHAT, messages=MESSAGES, min_tokens=2_000)
    assert again["usage"]["completion_tokens"] > 2_000


async def test_prompt_and_limit_beyond_the_context_are_clamped(http):
    async with SimFleet(1, speed=50.0, max_model_len=64) as fleet:
        body = {"prompt": "w " * 60, "max_tokens": 64}
        status, answer = await post(http, fleet.engines[0], TEXT, **body)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
