/* What the fake engine says: streams of stamped events, JSON completions, what peers' probes ask. */
#define _GNU_SOURCE
#include "clock.h"
#include "upstream.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STAMP_DIGITS 19
#define BYTES_PER_TOKEN 4
#define ID_DIGITS 6
#define FIRST_ID 100000u
#define ID "chatcmpl-6f0a2f1c8d3b4c5e9a7b1d2e3f405162"
#define HEAD_START "HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"

static const char STREAM_HEAD[] = HEAD_START
    "content-type: text/event-stream; charset=utf-8\r\nx-request-id: 0123456789abcdef\r\n"
    "transfer-encoding: chunked\r\n\r\n";
static const char STREAM_END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
static const char EVENT_START[] =
    "data: {\"id\":\"" ID "\",\"object\":\"chat.completion.chunk\",\"created\":1767225600,\"model\":\"bench\","
    "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"@";
static const char EVENT_END[] = "@\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
static const char FIRST_EVENT_END[] =
    "@\",\"role\":\"assistant\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";

/* One event: one chunk, one write, with the time of its sending as its text. */
int send_event(struct conn *c)
{
    const char *end = c->events_left == c->events_total ? FIRST_EVENT_END : EVENT_END;
    uint64_t stamp = now_ns();
    char bytes[1024];
    size_t payload = sizeof EVENT_START - 1 + STAMP_DIGITS + strlen(end);
    int n = sprintf(bytes, "%zx\r\n%s%019lu%s\r\n", payload, EVENT_START, stamp, end);
    counts.events++;
    counts.stamp_sum += stamp;
    c->events_left--;
    return put(c, bytes, (size_t)n);
}

int finish_stream(struct conn *c)
{
    c->is_streaming = 0;
    return put(c, STREAM_END, sizeof STREAM_END - 1);
}

/* Until the socket is full; goes on when it can be written again. */
int send_back_to_back(struct conn *c)
{
    while (c->events_left) {
        if (c->out_size) return 1;
        if (!send_event(c)) return 0;
    }
    return finish_stream(c);
}

static int put_json(struct conn *c, const char *body, size_t n)
{
    char head[256];
    int k = sprintf(head, HEAD_START "content-type: application/json\r\ncontent-length: %zu\r\n\r\n", n);
    char *all = malloc((size_t)k + n);
    memcpy(all, head, (size_t)k);
    memcpy(all + k, body, n);
    int alive = put(c, all, (size_t)k + n);
    free(all);
    return alive;
}

/* The value behind a key at either end of the request body. */
static const char *value_of(const struct conn *c, const char *key)
{
    const char *p = memmem(c->first, c->first_size, key, strlen(key));
    if (!p) p = memmem(c->last, c->last_size, key, strlen(key));
    if (!p) return NULL;
    p += strlen(key);
    return p + strspn(p, " :");
}

static uint64_t wanted_tokens(const struct conn *c)
{
    const char *v = value_of(c, "\"max_tokens\"");
    if (!v) v = value_of(c, "\"max_completion_tokens\""); /* some routers rename it */
    uint64_t n = v ? strtoull(v, NULL, 10) : 1;
    return n ? n : 1;
}

static int answer_stream(struct conn *c)
{
    c->is_streaming = 1;
    c->events_left = c->events_total = wanted_tokens(c);
    if (!put(c, STREAM_HEAD, sizeof STREAM_HEAD - 1)) return 0;
    if (!pace_ns) return send_back_to_back(c);
    if (!send_event(c)) return 0;
    if (!c->events_left) return finish_stream(c);
    c->due_ns = now_ns() + pace_ns;
    queue_stream(c);
    return 1;
}

static int answer_whole(struct conn *c)
{
    uint64_t tokens = wanted_tokens(c);
    char *body = malloc(1024 + tokens * 6);
    int n = sprintf(body, "{\"id\":\"" ID "\",\"object\":\"chat.completion\",\"created\":1767225600,\"model\":\"bench\","
                          "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"");
    for (uint64_t i = 0; i < tokens; i++) n += sprintf(body + n, "token ");
    n += sprintf(body + n, "\"},\"logprobs\":null,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":512,"
                           "\"total_tokens\":%lu,\"completion_tokens\":%lu}}", 512 + tokens, tokens);
    int alive = put_json(c, body, (size_t)n);
    free(body);
    return alive;
}

/* What /render and /tokenize of vLLM answer: a token id for every four bytes of the body. Equal
 * bodies have equal ids, and bodies that begin differently have different ones. */
static int answer_token_ids(struct conn *c)
{
    uint64_t tokens = c->body_size / BYTES_PER_TOKEN + 1, seed = 0;
    const char *key = strstr(c->path, "/tokenize") ? "tokens" : "token_ids";
    for (size_t i = 0; i < c->first_size; i++) seed = seed * 31 + (unsigned char)c->first[i];
    char *body = malloc(128 + tokens * (ID_DIGITS + 1));
    int n = sprintf(body, "{\"count\":%lu,\"max_model_len\":262144,\"%s\":[", tokens, key);
    for (uint64_t i = 0; i < tokens; i++) {
        uint64_t id = FIRST_ID + (seed + i * 2654435761u) % FIRST_ID;
        for (int digit = ID_DIGITS - 1; digit >= 0; digit--, id /= 10) body[n + digit] = (char)('0' + id % 10);
        body[n + ID_DIGITS] = ',';
        n += ID_DIGITS + 1;
    }
    n += sprintf(body + n - 1, "]}") - 1;
    int alive = put_json(c, body, (size_t)n);
    free(body);
    return alive;
}

static int put_counts(struct conn *c)
{
    char b[2048];
    int n = sprintf(b, "{\"requests\":%lu,\"side_requests\":%lu,\"events\":%lu,\"stamp_sum\":%lu,\"aborted_streams\":%lu,"
                       "\"stalled_writes\":%lu,\"bytes_in\":%lu,\"open\":%lu,\"by_port\":[",
                    counts.requests, counts.side_requests, counts.events, counts.stamp_sum,
                    counts.aborted_streams, counts.stalled_writes, counts.bytes_in, counts.open);
    for (int i = 0; i < port_count; i++) n += sprintf(b + n, "%s%lu", i ? "," : "", counts.by_port[i]);
    n += sprintf(b + n, "]}");
    return put_json(c, b, (size_t)n);
}

static int answer_get(struct conn *c)
{
    const char *b = "{\"status\":\"ok\",\"model_path\":\"bench\",\"tokenizer_path\":\"bench\",\"is_generation\":true,"
                    "\"served_model_name\":\"bench\",\"version\":\"0.0\"}";
    if (!strcmp(c->path, "/_ctl/counts")) return put_counts(c);
    if (!strncmp(c->path, "/_ctl/pace_us/", 14)) {
        pace_ns = strtoull(c->path + 14, NULL, 10) * NS_PER_US;
        b = "{}";
    } else if (strstr(c->path, "/models")) {
        b = "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\",\"created\":1767225600,"
            "\"owned_by\":\"vllm\",\"root\":\"bench\",\"parent\":null,\"max_model_len\":262144}]}";
    } else if (strstr(c->path, "/metrics")) {
        b = "vllm:num_requests_running{model_name=\"bench\"} 0\nvllm:num_requests_waiting{model_name=\"bench\"} 0\n";
    }
    return put_json(c, b, strlen(b));
}

/* Some routers have a prompt tokenised by the engines before they place the request itself. */
static int is_side_request(const char *path)
{
    return strstr(path, "/render") || strstr(path, "/tokenize");
}

int answer(struct conn *c)
{
    if (c->is_get) return answer_get(c);
    if (is_side_request(c->path)) {
        counts.side_requests++;
        return answer_token_ids(c);
    }
    counts.requests++;
    counts.by_port[c->port_index]++;
    const char *stream = value_of(c, "\"stream\"");
    return stream && !strncmp(stream, "true", 4) ? answer_stream(c) : answer_whole(c);
}
