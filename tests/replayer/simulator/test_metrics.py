"""The simulator's /metrics."""

from tests.support.sim_http import CHAT, MESSAGES, decode_leg, post, prefill_leg


async def test_metrics_have_vllms_names_and_add_up(http, fleet):
    p, d = fleet.engines
    await post(http, p, CHAT, **prefill_leg())
    await post(http, d, CHAT, **decode_leg(p))
    async with http.get(d.url + "/metrics") as before:
        assert "time_to_first_token_seconds_count" in await before.text()
    await post(http, d, CHAT, messages=MESSAGES, max_tokens=5)
    async with http.get(d.url + "/metrics") as answer:
        text = await answer.text()
    labels = 'engine="0",model_name="sim-8b"'
    for line in (
        f"vllm:num_requests_running{{{labels}}} 0.0",
        f"vllm:num_requests_waiting{{{labels}}} 0.0",
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.0",
        f"vllm:prompt_tokens_total{{{labels}}} 190.0",
        f"vllm:generation_tokens_total{{{labels}}} 10.0",
        f"vllm:prefix_cache_queries_total{{{labels}}} 190.0",
        f"vllm:prefix_cache_hits_total{{{labels}}} 80.0",
        f"vllm:external_prefix_cache_hits_total{{{labels}}} 95.0",
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} 15.0',
        f'vllm:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}} 80.0',
        f'vllm:prompt_tokens_by_source_total{{{labels},source="external_kv_transfer"}} 95.0',
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 2.0",
        f"vllm:iteration_tokens_total_count{{{labels}}} 10.0",
        f"vllm:iteration_tokens_total_sum{{{labels}}} 25.0",
        'vllm:iteration_tokens_total_bucket{engine="0",le="16.0",model_name="sim-8b"} 10.0',
        f"vllm:inter_token_latency_seconds_count{{{labels}}} 8.0",
        f"vllm:num_preemptions_total{{{labels}}} 0.0",
    ):
        assert line in text
    assert 'finished_reason="length"' in text
    assert 'kv_cache_size_tokens="393232"' in text
    async with http.get(p.url + "/metrics") as answer:
        found = [
            line for line in (await answer.text()).splitlines() if "bytes_transferred_t" in line
        ]
    assert float(found[-1].split()[-1]) == 95 * 131_072
