/* The client's options, and the requests it will send, complete with heads. */
#define _GNU_SOURCE
#include "clock.h"
#include "loadgen.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEAD_ROOM 8192

struct options opt = { .connections = 1, .warm_s = .5, .window_s = 3, .drain_s = 15, .expected_events = -1,
                       .path = "/v1/chat/completions", .bearer = "none" };
struct message *messages;
int message_count, slot_is_request;

static void read_message(struct message *m, const char *file)
{
    struct stat info;
    int fd = open(file, O_RDONLY), k;
    if (fd < 0 || fstat(fd, &info)) {
        perror(file);
        exit(2);
    }
    m->bytes = malloc((size_t)info.st_size + HEAD_ROOM);
    k = sprintf(m->bytes, "POST %s HTTP/1.1\r\nhost: 127.0.0.1:%d\r\naccept: */*\r\ncontent-type: application/json\r\n"
                          "user-agent: loadgen/1\r\nauthorization: Bearer %s\r\ncontent-length: %ld\r\n",
                opt.path, opt.port, opt.bearer, (long)info.st_size);
    for (int i = 0; i < opt.header_count; i++) {
        const char *h = opt.headers[i], *percent = strpbrk(h, "%");
        int is_slot = percent && (percent[1] == 'C' || percent[1] == 'N');
        if (is_slot) slot_is_request = percent[1] == 'N';
        k += is_slot ? sprintf(m->bytes + k, "%.*s" SLOT "%s\r\n", (int)(percent - h), h, percent + 2)
                     : sprintf(m->bytes + k, "%s\r\n", h);
    }
    k += sprintf(m->bytes + k, "\r\n");
    m->slot = memmem(m->bytes, (size_t)k, SLOT, SLOT_DIGITS);
    m->size = (size_t)k + (size_t)info.st_size;
    if (read(fd, m->bytes + k, (size_t)info.st_size) != info.st_size) {
        fprintf(stderr, "%s: cannot be read\n", file);
        exit(2);
    }
    close(fd);
}

void read_messages(char **files)
{
    messages = calloc((size_t)message_count, sizeof *messages);
    for (int i = 0; i < message_count; i++) read_message(&messages[i], files[i]);
}

void parse_options(int argc, char **argv)
{
    int o;
    while ((o = getopt(argc, argv, "P:p:q:u:c:w:d:n:i:g:D:e:a:H:")) != -1)
        switch (o) {
        case 'P': opt.port = atoi(optarg); break;
        case 'p': pids_parse(&opt.measured, optarg); break;
        case 'q': pids_parse(&opt.others, optarg); break;
        case 'u': opt.path = optarg; break;
        case 'c': opt.connections = atoi(optarg); break;
        case 'w': opt.warm_s = atof(optarg); break;
        case 'd': opt.window_s = atof(optarg); break;
        case 'n': opt.requests = strtoull(optarg, NULL, 10); break;
        case 'i': opt.interval_ns = strtoull(optarg, NULL, 10) * NS_PER_US; break;
        case 'g': opt.stagger_ns = (uint64_t)(atof(optarg) * 1e6); break;
        case 'D': opt.drain_s = atof(optarg); break;
        case 'e': opt.expected_events = atol(optarg); break;
        case 'a': opt.bearer = optarg; break;
        case 'H':
            if (opt.header_count < HEADERS_MAX) opt.headers[opt.header_count++] = optarg;
            break;
        default: exit(2);
        }
    message_count = argc - optind;
    if (opt.port && message_count > 0) return;
    fprintf(stderr, "see the head of loadgen.c\n");
    exit(2);
}
