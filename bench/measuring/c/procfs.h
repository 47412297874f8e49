/* What the kernel knows of processes: CPU time, and whose a listening port is. */
#pragma once
#include <stdint.h>

#define PIDS_MAX 512

struct pids {
    int count, pid[PIDS_MAX];
};

void pids_parse(struct pids *pids, char *comma_separated);

/* Run time of all their threads, ns, and the time these were runnable but had to wait. */
void cpu_time(const struct pids *pids, uint64_t *run_ns, uint64_t *wait_ns);

/* CPU time of the whole machine, ns; in steps of the kernel's tick. */
uint64_t machine_cpu_time(void);

/* 1 when there is a listener on the port and every one there belongs to these pids. */
int owns_listeners(const struct pids *pids, int port);
