/* Chunked transfer coding, read in whatever pieces it arrives; the upstream and the client share it. */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct chunked {
    enum { CHUNK_SIZE, CHUNK_DATA, CHUNK_CRLF, CHUNK_TRAILER } at;
    uint64_t left;
    char line[64];
    size_t length;
};

enum chunked_got { CHUNKED_MORE, CHUNKED_PIECE, CHUNKED_END };

void chunked_begin(struct chunked *c);

/* Takes from [*p, *p + *n) and advances both. PIECE: payload is in *piece and *size, call again;
 * END: the body is over, what is left belongs to the next message; MORE: the input is used up. */
enum chunked_got chunked_next(struct chunked *c, const char **p, size_t *n, const char **piece, size_t *size);
