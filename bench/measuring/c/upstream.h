/* The fake engine's parts: upstream.c (sockets, pacing), upstream_request.c, upstream_answer.c. */
#pragma once
#include "chunked.h"
#include <stddef.h>
#include <stdint.h>

#define KEPT 4096 /* bytes looked at, of either end of a request body */
#define HEAD_MAX 65536
#define PORTS_MAX 64

enum phase { READ_HEAD, READ_BODY, READ_CHUNKED };

struct conn {
    int fd, port_index, wants_out;
    enum phase phase;
    char *head;
    size_t head_size;
    uint64_t body_left;
    struct chunked chunked;
    uint64_t body_size;
    char first[KEPT + 1], last[2 * KEPT + 1];
    size_t first_size, last_size;
    int is_get;
    char path[256];
    /* the answer */
    int is_streaming, is_queued;
    uint64_t events_left, events_total, due_ns;
    char *out; /* what the socket did not take yet */
    size_t out_size, out_room;
    struct conn *before, *after; /* the queue of paced streams, ordered by due_ns */
    struct conn *next_dead;
};

struct counts {
    uint64_t requests, side_requests, events, stamp_sum, aborted_streams, stalled_writes, bytes_in, open;
    uint64_t by_port[PORTS_MAX];
};

extern struct counts counts;
extern uint64_t pace_ns;
extern int port_count;

/* All of these return 0 when the connection is gone. */
int feed(struct conn *c, const char *p, size_t n);
int answer(struct conn *c);
int send_event(struct conn *c);
int finish_stream(struct conn *c);
int send_back_to_back(struct conn *c);
int put(struct conn *c, const char *bytes, size_t n);

void queue_stream(struct conn *c);
void close_conn(struct conn *c);
