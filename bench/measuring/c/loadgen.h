/* The client's parts: loadgen.c (sockets, the window), loadgen_setup.c (options, the messages),
 * loadgen_answer.c (what comes back). */
#pragma once
#include "chunked.h"
#include "histogram.h"
#include "procfs.h"
#include <stddef.h>
#include <stdint.h>

#define HEAD_MAX 16384
#define HEADERS_MAX 16
#define SLOT "############" /* where a connection's or request's number goes */
#define SLOT_DIGITS 12

struct options {
    int port, connections, header_count;
    double warm_s, window_s, drain_s;
    uint64_t requests, interval_ns, stagger_ns;
    long expected_events; /* stamps per answer, -1: none are looked for */
    const char *path, *bearer, *headers[HEADERS_MAX];
    struct pids measured, others;
};

/* One request as it is sent; `slot` is NULL where no header has a number in it. */
struct message {
    char *bytes, *slot;
    size_t size;
};

enum state { CLOSED, WAITING, IDLE, CONNECTING, SENDING, HEAD, BODY_LENGTH, BODY_CHUNKED, BODY_TO_EOF };

struct conn {
    int fd, id;
    enum state state;
    uint64_t turn, request, start_at_ns, started_ns, last_event_ns;
    size_t sent;
    char *head;
    size_t head_size;
    int status, keeps_alive, is_stream;
    uint64_t body_left, body_size, events;
    struct chunked chunked;
    int stamp_digits; /* digits of a stamp seen so far, -1 outside of one */
    uint64_t stamp;
};

/* Counted in the window only. */
struct window {
    uint64_t requests, events, bytes;
    struct histogram ttft, e2e, lag;
};

/* Counted from the first request to the last: compared with what the upstream says it sent. */
struct totals {
    uint64_t started, answered, events, stamp_sum, bad_status, errors, miscounted, reconnects;
    char first_error[200];
};

extern int is_measuring;
extern struct options opt;
extern struct message *messages;
extern int message_count, slot_is_request;
extern struct window window;
extern struct totals totals;

void parse_options(int argc, char **argv);
void read_messages(char **files);
void read_answer(struct conn *c, const char *p, size_t n, uint64_t now);
void complete(struct conn *c, uint64_t now);
void fail(struct conn *c, const char *why);
void note_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
