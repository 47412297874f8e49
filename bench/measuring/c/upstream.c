/* A fake OpenAI server to stand behind proxies: one epoll thread, several ports, one engine each.
 *
 *   upstream PORTS          listens on that many ports of 127.0.0.1, chosen by the kernel,
 *                           and prints them on one line
 *
 * POST *                  "stream": true in the body -> SSE, "max_tokens" events and [DONE];
 *                         otherwise one JSON completion of as many words
 *                         (/render and /tokenize: token ids, counted apart)
 * GET /_ctl/pace_us/N     from now on one event per N microseconds and stream; 0: back to back
 * GET /_ctl/counts        what was sent so far, to be compared with what the client received
 * GET *                   what health checks and model discovery of the peers want to hear
 *
 * An event is one HTTP chunk and one write(2) on a TCP_NODELAY socket. Its text is
 * "@<19 digits of CLOCK_MONOTONIC, ns>@": from it the client knows how long it was on its way.
 */
#define _GNU_SOURCE
#include "upstream.h"
#include "clock.h"
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define EVENTS_MAX 512

struct counts counts;
uint64_t pace_ns;
int port_count;

static int epoll_fd;
static int listeners[PORTS_MAX];
static struct conn *queue_first, *queue_last, *dead;
static char read_buffer[262144];

void queue_stream(struct conn *c)
{
    c->is_queued = 1;
    c->after = NULL;
    c->before = queue_last;
    if (queue_last) queue_last->after = c;
    else queue_first = c;
    queue_last = c;
}

static void unqueue(struct conn *c)
{
    if (!c->is_queued) return;
    if (c->before) c->before->after = c->after;
    else queue_first = c->after;
    if (c->after) c->after->before = c->before;
    else queue_last = c->before;
    c->is_queued = 0;
}

void close_conn(struct conn *c)
{
    if (c->fd < 0) return;
    if (c->is_streaming || c->out_size) counts.aborted_streams++;
    unqueue(c);
    close(c->fd);
    c->fd = -1;
    counts.open--;
    c->next_dead = dead; /* freed after this round: other events of it may be waiting */
    dead = c;
}

static void want_out(struct conn *c, int wants)
{
    if (c->wants_out == wants) return;
    c->wants_out = wants;
    struct epoll_event e = { .events = EPOLLIN | (wants ? EPOLLOUT : 0), .data.ptr = c };
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e);
}

int put(struct conn *c, const char *bytes, size_t n)
{
    ssize_t sent = c->out_size ? 0 : send(c->fd, bytes, n, MSG_NOSIGNAL);
    if (sent < 0) {
        if (errno != EAGAIN) {
            close_conn(c);
            return 0;
        }
        sent = 0;
    }
    size_t rest = n - (size_t)sent;
    if (!rest) return 1;
    if (c->out_size + rest > c->out_room) {
        c->out_room = 2 * (c->out_size + rest);
        c->out = realloc(c->out, c->out_room);
    }
    memcpy(c->out + c->out_size, bytes + sent, rest);
    c->out_size += rest;
    counts.stalled_writes++;
    want_out(c, 1);
    return 1;
}

static int flush(struct conn *c)
{
    while (c->out_size) {
        ssize_t sent = send(c->fd, c->out, c->out_size, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) return 1;
        if (sent < 0) {
            close_conn(c);
            return 0;
        }
        memmove(c->out, c->out + sent, c->out_size - (size_t)sent);
        c->out_size -= (size_t)sent;
    }
    want_out(c, 0);
    return c->is_streaming && !c->is_queued ? send_back_to_back(c) : 1;
}

static void on_event(struct conn *c, uint32_t events)
{
    if ((events & EPOLLOUT) && !flush(c)) return;
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) return;
    ssize_t n;
    do {
        n = recv(c->fd, read_buffer, sizeof read_buffer, 0);
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) {
            close_conn(c);
            return;
        }
    } while (feed(c, read_buffer, (size_t)n) && (size_t)n == sizeof read_buffer);
}

static void accept_all(int port_index)
{
    int fd, on = 1;
    while ((fd = accept4(listeners[port_index], NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        struct conn *c = calloc(1, sizeof *c);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        c->fd = fd;
        c->port_index = port_index;
        c->head = malloc(HEAD_MAX);
        counts.open++;
        struct epoll_event e = { .events = EPOLLIN, .data.ptr = c };
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
    }
}

static void send_due(void)
{
    uint64_t now = now_ns();
    while (queue_first && queue_first->due_ns <= now) {
        struct conn *c = queue_first;
        unqueue(c);
        if (!send_event(c)) continue;
        if (!c->events_left) {
            finish_stream(c);
        } else if (pace_ns) {
            c->due_ns += pace_ns;
            queue_stream(c);
        } else {
            send_back_to_back(c);
        }
    }
}

static int wait_for_events(struct epoll_event *events)
{
    struct timespec wait, *limit = NULL;
    if (queue_first) {
        uint64_t now = now_ns(), due = queue_first->due_ns, ns = due > now ? due - now : 0;
        wait = (struct timespec){ .tv_sec = (time_t)(ns / NS_PER_S), .tv_nsec = (long)(ns % NS_PER_S) };
        limit = &wait;
    }
    return epoll_pwait2(epoll_fd, events, EVENTS_MAX, limit, NULL);
}

static void bury(void)
{
    while (dead) {
        struct conn *c = dead;
        dead = c->next_dead;
        free(c->head);
        free(c->out);
        free(c);
    }
}

static int listen_on_any_port(int index)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t size = sizeof address;
    int fd = listeners[index] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(fd, (void *)&address, size) || listen(fd, 4096)) {
        perror("upstream: listen");
        exit(1);
    }
    struct epoll_event e = { .events = EPOLLIN, .data.ptr = &listeners[index] };
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
    getsockname(fd, (void *)&address, &size);
    return ntohs(address.sin_port);
}

int main(int argc, char **argv)
{
    port_count = argc > 1 ? atoi(argv[1]) : 0;
    if (port_count < 1 || port_count > PORTS_MAX) {
        fprintf(stderr, "usage: upstream PORTS (1 to %d)\n", PORTS_MAX);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* goes with the bench, however that ends */
    epoll_fd = epoll_create1(0);
    for (int i = 0; i < port_count; i++) printf("%d%c", listen_on_any_port(i), i + 1 < port_count ? ' ' : '\n');
    fflush(stdout);
    struct epoll_event events[EVENTS_MAX];
    for (;;) {
        int n = wait_for_events(events);
        for (int i = 0; i < n; i++) {
            int *listener = events[i].data.ptr;
            struct conn *c = events[i].data.ptr;
            if (listener >= listeners && listener < listeners + PORTS_MAX) accept_all((int)(listener - listeners));
            else if (c->fd >= 0) on_event(c, events[i].events);
        }
        send_due();
        bury();
    }
}
