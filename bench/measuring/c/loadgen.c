/* A closed-loop HTTP/1.1 client for chat-completion proxies: one epoll thread.
 *
 *   loadgen -P port -p pid,.. [-q pid,..] [-u path] [-c connections] [-w warm_s] [-d window_s]
 *           [-n requests] [-i interval_us] [-g stagger_ms] [-D drain_s] [-e events] [-a bearer]
 *           [-H 'Name: value'].. body.json..
 *
 * Each connection repeats: send one of the bodies (connection i begins with body i, then i + 1, ..),
 * read the whole answer. %C in a header's value is the connection's number, %N the request's.
 * -n ends the run after so many requests; -i is the least time between two of one connection.
 * -e says how many stamped events (see upstream.c) an answer must have.
 *
 * CPU time of the pids of -p is read at both ends of the window. -q are the bench's other processes:
 * what the rest of the machine used beside these is foreign_s. After the window nothing new begins,
 * and what runs is read to its end: the totals can be compared with what the upstream sent.
 *
 * Nothing is sent unless every listener of the port belongs to the pids of -p (exit 3); this is
 * looked at once more at the end. One JSON object on stdout.
 */
#define _GNU_SOURCE
#include "loadgen.h"
#include "clock.h"
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define EVENTS_MAX 1024
#define EXIT_WRONG_PROCESS 3
#define RETRY_NS (5 * 1000 * NS_PER_US)
#define SCAN_NS (500 * NS_PER_US)

int is_measuring;
struct window window;
struct totals totals;

static int epoll_fd, is_stopping;
static uint64_t active;
static char read_buffer[1 << 18];

void note_error(const char *format, ...)
{
    va_list arguments;
    if (totals.first_error[0]) return;
    va_start(arguments, format);
    vsnprintf(totals.first_error, sizeof totals.first_error, format, arguments);
    va_end(arguments);
}

static void watch(struct conn *c, uint32_t events, int operation)
{
    struct epoll_event e = { .events = events, .data.ptr = c };
    epoll_ctl(epoll_fd, operation, c->fd, &e);
}

static void drop(struct conn *c)
{
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

void fail(struct conn *c, const char *why)
{
    totals.errors++;
    note_error("%s: errno %d, state %d, %lu events", why, errno, c->state, c->events);
    active--;
    drop(c);
    c->state = is_stopping ? CLOSED : WAITING;
    c->start_at_ns = now_ns() + RETRY_NS;
}

static void send_request(struct conn *c)
{
    const struct message *m = &messages[((uint64_t)c->id + c->turn) % (uint64_t)message_count];
    if (!c->sent && m->slot) {
        char digits[24]; /* messages are shared: the first send takes the whole head along */
        snprintf(digits, sizeof digits, "%012lu", slot_is_request ? c->request : (uint64_t)c->id);
        memcpy(m->slot, digits, SLOT_DIGITS);
    }
    while (c->sent < m->size) {
        ssize_t n = send(c->fd, m->bytes + c->sent, m->size - c->sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) {
            watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
            return;
        }
        if (n < 0) {
            fail(c, "send");
            return;
        }
        c->sent += (size_t)n;
    }
    c->state = HEAD;
    watch(c, EPOLLIN, EPOLL_CTL_MOD);
}

static void open_conn(struct conn *c)
{
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons((uint16_t)opt.port),
                                   .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int on = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    c->state = CONNECTING;
    if (connect(c->fd, (void *)&address, sizeof address) < 0 && errno != EINPROGRESS) fail(c, "connect");
    else watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_ADD);
}

static void start(struct conn *c, uint64_t now)
{
    if (opt.requests && totals.started >= opt.requests) {
        c->state = IDLE;
        return;
    }
    c->sent = c->head_size = 0;
    c->events = c->body_size = 0;
    c->stamp_digits = -1;
    c->started_ns = now;
    c->request = totals.started++;
    active++;
    if (c->fd < 0) {
        open_conn(c);
        return;
    }
    c->state = SENDING;
    send_request(c);
}

void complete(struct conn *c, uint64_t now)
{
    active--;
    totals.answered++;
    if (c->status != 200) {
        totals.bad_status++;
    } else if (opt.expected_events >= 0 && (long)c->events != opt.expected_events) {
        totals.miscounted++;
        note_error("an answer with %lu events instead of %ld", c->events, opt.expected_events);
    }
    if (is_measuring) {
        window.requests++;
        histogram_add(&window.e2e, now - c->started_ns);
    }
    c->turn++;
    c->state = IDLE;
    if (!c->keeps_alive) {
        drop(c);
        totals.reconnects++;
    }
    if (is_stopping) return;
    c->start_at_ns = c->started_ns + opt.interval_ns;
    if (c->start_at_ns > now) c->state = WAITING;
    else start(c, now);
}

static void on_connected(struct conn *c)
{
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) {
        errno = error;
        fail(c, "connect");
        return;
    }
    c->started_ns = now_ns(); /* an accept queue is not what a first token waits for */
    c->state = SENDING;
    send_request(c);
}

static void on_readable(struct conn *c)
{
    ssize_t n = recv(c->fd, read_buffer, sizeof read_buffer, 0);
    if (n > 0) {
        if (c->state == SENDING) c->state = HEAD; /* an answer before the whole body was sent */
        read_answer(c, read_buffer, (size_t)n, now_ns());
    } else if (n == 0 || errno != EAGAIN) {
        if (c->state == BODY_TO_EOF && n == 0) complete(c, now_ns());
        else if (c->state == IDLE || c->state == WAITING) drop(c);
        else fail(c, "closed");
    }
}

static void on_event(struct conn *c, uint32_t events)
{
    if (c->fd < 0) return;
    if (c->state == CONNECTING) {
        if (events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) on_connected(c);
        return;
    }
    if ((events & EPOLLOUT) && c->state == SENDING) send_request(c);
    if (c->fd >= 0 && (events & (EPOLLIN | EPOLLHUP | EPOLLERR))) on_readable(c);
}

struct reading {
    uint64_t at_ns, run_ns, wait_ns, others_ns, machine_ns;
};

static struct reading read_clocks(void)
{
    struct reading r;
    uint64_t unused;
    r.machine_ns = machine_cpu_time();
    cpu_time(&opt.others, &r.others_ns, &unused);
    cpu_time(&opt.measured, &r.run_ns, &r.wait_ns);
    r.at_ns = now_ns();
    return r;
}

static void start_waiting(struct conn *conns, uint64_t now)
{
    static uint64_t next_ns;
    if (now < next_ns || is_stopping) return;
    next_ns = now + SCAN_NS;
    for (int i = 0; i < opt.connections; i++)
        if (conns[i].state == WAITING && conns[i].start_at_ns <= now) start(&conns[i], now);
}

static int has_ended(uint64_t now, uint64_t window_end_ns)
{
    return now >= window_end_ns || (opt.requests && totals.answered + totals.errors >= opt.requests);
}

static void run(struct conn *conns, struct reading *from, struct reading *to)
{
    struct epoll_event events[EVENTS_MAX];
    struct timespec tick = { 0, 1000 * 1000 };
    uint64_t begin = now_ns(), window_ns = (uint64_t)(opt.window_s * 1e9);
    for (;;) {
        uint64_t now = now_ns();
        if (!is_measuring && !is_stopping && now >= begin + (uint64_t)(opt.warm_s * 1e9)) {
            *from = read_clocks();
            is_measuring = 1;
        }
        if (is_measuring && has_ended(now, from->at_ns + window_ns)) {
            is_measuring = 0;
            is_stopping = 1;
            *to = read_clocks();
        }
        if (is_stopping && (!active || now > to->at_ns + (uint64_t)(opt.drain_s * 1e9))) return;
        start_waiting(conns, now);
        int n = epoll_pwait2(epoll_fd, events, EVENTS_MAX, &tick, NULL);
        for (int i = 0; i < n; i++) on_event(events[i].data.ptr, events[i].events);
    }
}

static void print(const struct reading *from, const struct reading *to)
{
    double window_s = (double)(to->at_ns - from->at_ns) / 1e9;
    double cpu_s = (double)(to->run_ns - from->run_ns) / 1e9;
    double foreign_s = (double)(to->machine_ns - from->machine_ns) / 1e9 - cpu_s
                       - (double)(to->others_ns - from->others_ns) / 1e9;
    for (char *s = totals.first_error; *s; s++)
        if (*s == '"' || *s == '\\' || (unsigned char)*s < 32) *s = ' ';
    printf("{\"window_s\":%.4f,\"requests\":%lu,\"events\":%lu,\"bytes\":%lu,\"cpu_s\":%.6f,\"cpu_wait_s\":%.6f,"
           "\"foreign_s\":%.4f,\"unfinished\":%lu", window_s, window.requests, window.events, window.bytes, cpu_s,
           (double)(to->wait_ns - from->wait_ns) / 1e9, foreign_s > 0 ? foreign_s : 0, active);
    histogram_print("ttft", &window.ttft);
    histogram_print("e2e", &window.e2e);
    histogram_print("lag", &window.lag);
    printf(",\"totals\":{\"started\":%lu,\"answered\":%lu,\"events\":%lu,\"stamp_sum\":%lu,\"bad_status\":%lu,"
           "\"errors\":%lu,\"miscounted\":%lu,\"reconnects\":%lu,\"first_error\":\"%s\"}}\n", totals.started,
           totals.answered, totals.events, totals.stamp_sum, totals.bad_status, totals.errors, totals.miscounted,
           totals.reconnects, totals.first_error);
}

static void check_listener(void)
{
    if (owns_listeners(&opt.measured, opt.port)) return;
    fprintf(stderr, "port %d has no listener, or one that is not of the processes to be measured\n", opt.port);
    exit(EXIT_WRONG_PROCESS);
}

int main(int argc, char **argv)
{
    struct reading from, to;
    parse_options(argc, argv);
    check_listener();
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* goes with the bench, however that ends */
    read_messages(argv + optind);
    epoll_fd = epoll_create1(0);
    struct conn *conns = calloc((size_t)opt.connections, sizeof *conns);
    uint64_t now = now_ns();
    for (int i = 0; i < opt.connections; i++)
        conns[i] = (struct conn){ .fd = -1, .id = i, .head = malloc(HEAD_MAX), .state = WAITING,
                                  .start_at_ns = now + opt.stagger_ns * (uint64_t)i / (uint64_t)opt.connections };
    opt.others.pid[opt.others.count++] = getpid();
    run(conns, &from, &to);
    check_listener();
    print(&from, &to);
    return 0;
}
