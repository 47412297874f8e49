/* A request as it arrives: its head, and of its body both ends, which hold what matters here. */
#define _GNU_SOURCE
#include "upstream.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void keep(struct conn *c, const char *p, size_t n)
{
    counts.bytes_in += n;
    c->body_size += n;
    if (c->first_size < KEPT) {
        size_t k = KEPT - c->first_size < n ? KEPT - c->first_size : n;
        memcpy(c->first + c->first_size, p, k);
        c->first_size += k;
    }
    if (n >= KEPT) {
        memcpy(c->last, p + n - KEPT, KEPT);
        c->last_size = KEPT;
        return;
    }
    if (c->last_size + n > 2 * KEPT) {
        memmove(c->last, c->last + c->last_size - KEPT, KEPT);
        c->last_size = KEPT;
    }
    memcpy(c->last + c->last_size, p, n);
    c->last_size += n;
}

static int complete(struct conn *c)
{
    c->first[c->first_size] = c->last[c->last_size] = 0;
    c->phase = READ_HEAD;
    return answer(c);
}

static int begin_body(struct conn *c)
{
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->is_get = !strncmp(c->head, "GET ", 4);
    c->path[0] = 0;
    sscanf(c->head, "%*s %255s", c->path);
    if (strcasestr(c->head, "\r\nexpect:") && !put(c, "HTTP/1.1 100 Continue\r\n\r\n", 25)) return 0;
    c->head_size = c->first_size = c->last_size = 0;
    c->body_size = 0;
    if (strcasestr(c->head, "\r\ntransfer-encoding:")) {
        c->phase = READ_CHUNKED;
        chunked_begin(&c->chunked);
        return 1;
    }
    c->phase = READ_BODY;
    c->body_left = length ? strtoull(length + strlen("\r\ncontent-length:"), NULL, 10) : 0;
    return c->body_left ? 1 : complete(c);
}

static int feed_head(struct conn *c, const char **p, size_t *n)
{
    size_t old = c->head_size, room = HEAD_MAX - old - 1, k = *n < room ? *n : room;
    size_t from = old > 3 ? old - 3 : 0;
    memcpy(c->head + old, *p, k);
    c->head_size += k;
    char *end = memmem(c->head + from, c->head_size - from, "\r\n\r\n", 4);
    if (!end && k == room) {
        close_conn(c);
        return 0;
    }
    size_t used = end ? (size_t)(end + 4 - c->head) - old : k;
    *p += used;
    *n -= used;
    if (!end) return 1;
    end[4] = 0;
    return begin_body(c);
}

static int feed_chunked(struct conn *c, const char **p, size_t *n)
{
    const char *piece;
    size_t size;
    switch (chunked_next(&c->chunked, p, n, &piece, &size)) {
    case CHUNKED_PIECE: keep(c, piece, size); return 1;
    case CHUNKED_END: return complete(c);
    default: return 1;
    }
}

int feed(struct conn *c, const char *p, size_t n)
{
    while (n) {
        if (c->phase == READ_HEAD) {
            if (!feed_head(c, &p, &n)) return 0;
        } else if (c->phase == READ_CHUNKED) {
            if (!feed_chunked(c, &p, &n)) return 0;
        } else {
            size_t k = n < c->body_left ? n : (size_t)c->body_left;
            keep(c, p, k);
            p += k;
            n -= k;
            c->body_left -= k;
            if (!c->body_left && !complete(c)) return 0;
        }
    }
    return 1;
}
