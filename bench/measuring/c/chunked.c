#include "chunked.h"
#include <stdlib.h>

void chunked_begin(struct chunked *c)
{
    c->at = CHUNK_SIZE;
    c->left = 0;
    c->length = 0;
}

/* Collects one line; 1 when its end was seen, with the line (without its end) in c->line. */
static int line(struct chunked *c, const char **p, size_t *n)
{
    while (*n) {
        char ch = *(*p)++;
        --*n;
        if (ch == '\n') {
            c->line[c->length] = 0;
            return 1;
        }
        if (ch != '\r' && c->length < sizeof c->line - 1) c->line[c->length++] = ch;
    }
    return 0;
}

static uint64_t take(struct chunked *c, const char **p, size_t *n)
{
    size_t k = *n < c->left ? *n : (size_t)c->left;
    *p += k;
    *n -= k;
    c->left -= k;
    return k;
}

enum chunked_got chunked_next(struct chunked *c, const char **p, size_t *n, const char **piece, size_t *size)
{
    while (*n) {
        switch (c->at) {
        case CHUNK_SIZE:
            if (!line(c, p, n)) break;
            c->left = strtoull(c->line, NULL, 16);
            c->length = 0;
            c->at = c->left ? CHUNK_DATA : CHUNK_TRAILER;
            break;
        case CHUNK_DATA:
            *piece = *p;
            *size = take(c, p, n);
            if (!c->left) { c->at = CHUNK_CRLF; c->left = 2; }
            return CHUNKED_PIECE;
        case CHUNK_CRLF:
            take(c, p, n);
            if (!c->left) c->at = CHUNK_SIZE;
            break;
        case CHUNK_TRAILER:
            if (!line(c, p, n)) break;
            if (!c->length) return CHUNKED_END;
            c->length = 0;
            break;
        }
    }
    return CHUNKED_MORE;
}
