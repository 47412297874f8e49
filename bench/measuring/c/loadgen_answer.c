/* An answer as it arrives: head, body in any framing, and the stamps of its events. */
#define _GNU_SOURCE
#include "loadgen.h"
#include <stdlib.h>
#include <string.h>

#define STAMP_DIGITS 19

static void note_event(struct conn *c, uint64_t now)
{
    c->events++;
    totals.events++;
    totals.stamp_sum += c->stamp;
    if (!is_measuring) return;
    window.events++;
    histogram_add(&window.lag, now > c->stamp ? now - c->stamp : 0);
    if (c->events == 1) histogram_add(&window.ttft, now - c->started_ns);
}

static void find_stamps(struct conn *c, const char *p, const char *end, uint64_t now)
{
    while (p < end) {
        if (c->stamp_digits < 0) {
            p = memchr(p, '@', (size_t)(end - p));
            if (!p++) return;
            c->stamp_digits = 0;
            c->stamp = 0;
        } else if (*p >= '0' && *p <= '9') {
            c->stamp = c->stamp * 10 + (uint64_t)(*p++ - '0');
            c->stamp_digits++;
        } else {
            if (*p == '@' && c->stamp_digits == STAMP_DIGITS) note_event(c, now), p++;
            else if (*p != '@') p++;
            c->stamp_digits = -1;
        }
    }
}

static void payload(struct conn *c, const char *p, size_t n, uint64_t now)
{
    if (!c->is_stream && !c->body_size && n && is_measuring) histogram_add(&window.ttft, now - c->started_ns);
    c->body_size += n;
    if (is_measuring) window.bytes += n;
    if (c->is_stream) find_stamps(c, p, p + n, now);
}

/* The head is complete: how the body will be framed. */
static void begin_body(struct conn *c, uint64_t now)
{
    const char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->status = atoi(c->head + strlen("HTTP/1.1 "));
    c->head_size = 0;
    if (c->status == 100) return;
    if (c->status != 200) note_error("%.60s", c->head);
    c->keeps_alive = !strcasestr(c->head, "\r\nconnection: close");
    c->is_stream = opt.expected_events >= 0;
    if (strcasestr(c->head, "\r\ntransfer-encoding: chunked")) {
        c->state = BODY_CHUNKED;
        chunked_begin(&c->chunked);
    } else if (length) {
        c->state = BODY_LENGTH;
        c->body_left = strtoull(length + strlen("\r\ncontent-length:"), NULL, 10);
        if (!c->body_left) complete(c, now);
    } else {
        c->state = BODY_TO_EOF;
        c->keeps_alive = 0;
    }
}

static void read_head(struct conn *c, const char **p, size_t *n, uint64_t now)
{
    size_t old = c->head_size, room = HEAD_MAX - 1 - old, k = *n < room ? *n : room;
    if (!room) {
        fail(c, "head too long");
        return;
    }
    memcpy(c->head + old, *p, k);
    c->head_size += k;
    c->head[c->head_size] = 0;
    char *end = strstr(c->head, "\r\n\r\n");
    size_t used = end ? (size_t)(end + 4 - c->head) - old : k;
    *p += used;
    *n -= used;
    if (!end) return;
    end[4] = 0;
    begin_body(c, now);
}

static void read_chunked(struct conn *c, const char **p, size_t *n, uint64_t now)
{
    const char *piece;
    size_t size;
    enum chunked_got got = chunked_next(&c->chunked, p, n, &piece, &size);
    if (got == CHUNKED_PIECE) payload(c, piece, size, now);
    if (got == CHUNKED_END) complete(c, now);
}

static void read_by_length(struct conn *c, const char **p, size_t *n, uint64_t now)
{
    size_t k = *n < c->body_left ? *n : (size_t)c->body_left;
    payload(c, *p, k, now);
    *p += k;
    *n -= k;
    c->body_left -= k;
    if (!c->body_left) complete(c, now);
}

/* Nothing is pipelined, so bytes behind an answer's end are an error. */
void read_answer(struct conn *c, const char *p, size_t n, uint64_t now)
{
    while (n) {
        switch (c->state) {
        case HEAD: read_head(c, &p, &n, now); break;
        case BODY_CHUNKED: read_chunked(c, &p, &n, now); break;
        case BODY_LENGTH: read_by_length(c, &p, &n, now); break;
        case BODY_TO_EOF: payload(c, p, n, now); return;
        default: fail(c, "bytes that belong to no answer"); return;
        }
        if (c->fd < 0) return;
    }
}
