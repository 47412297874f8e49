#include "procfs.h"
#include "clock.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TCP_LISTEN 10

void pids_parse(struct pids *pids, char *comma_separated)
{
    for (char *s = strtok(comma_separated, ","); s && pids->count < PIDS_MAX; s = strtok(NULL, ","))
        pids->pid[pids->count++] = atoi(s);
}

static void add_thread(int pid, const char *thread, uint64_t *run_ns, uint64_t *wait_ns)
{
    char path[400];
    unsigned long run = 0, wait = 0;
    snprintf(path, sizeof path, "/proc/%d/task/%s/schedstat", pid, thread);
    FILE *f = fopen(path, "r");
    if (!f) return;
    if (fscanf(f, "%lu %lu", &run, &wait) == 2) {
        *run_ns += run;
        *wait_ns += wait;
    }
    fclose(f);
}

void cpu_time(const struct pids *pids, uint64_t *run_ns, uint64_t *wait_ns)
{
    *run_ns = *wait_ns = 0;
    for (int i = 0; i < pids->count; i++) {
        char path[64];
        struct dirent *entry;
        snprintf(path, sizeof path, "/proc/%d/task", pids->pid[i]);
        DIR *threads = opendir(path);
        while (threads && (entry = readdir(threads)))
            if (entry->d_name[0] != '.') add_thread(pids->pid[i], entry->d_name, run_ns, wait_ns);
        if (threads) closedir(threads);
    }
}

uint64_t machine_cpu_time(void)
{
    unsigned long user = 0, nice = 0, system = 0, irq = 0, softirq = 0, steal = 0;
    FILE *f = fopen("/proc/stat", "r");
    if (!f) return 0;
    int got = fscanf(f, "cpu %lu %lu %lu %*u %*u %lu %lu %lu", &user, &nice, &system, &irq, &softirq, &steal);
    fclose(f);
    unsigned long ticks = user + nice + system + irq + softirq + steal;
    return got == 6 ? ticks * (NS_PER_S / (uint64_t)sysconf(_SC_CLK_TCK)) : 0;
}

static int has_socket(int pid, unsigned long inode)
{
    char path[400], wanted[64], target[64];
    struct dirent *entry;
    int found = 0;
    snprintf(wanted, sizeof wanted, "socket:[%lu]", inode);
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *fds = opendir(path);
    while (fds && !found && (entry = readdir(fds))) {
        snprintf(path, sizeof path, "/proc/%d/fd/%s", pid, entry->d_name);
        ssize_t n = readlink(path, target, sizeof target - 1);
        if (n > 0) target[n] = 0;
        found = n > 0 && !strcmp(target, wanted);
    }
    if (fds) closedir(fds);
    return found;
}

static int is_theirs(const struct pids *pids, unsigned long inode)
{
    for (int i = 0; i < pids->count; i++)
        if (has_socket(pids->pid[i], inode)) return 1;
    return 0;
}

int owns_listeners(const struct pids *pids, int port)
{
    static const char *tables[] = { "/proc/net/tcp", "/proc/net/tcp6" };
    int theirs = 0, others = 0;
    for (int i = 0; i < 2; i++) {
        char line[512];
        FILE *f = fopen(tables[i], "r");
        while (f && fgets(line, sizeof line, f)) {
            unsigned local_port, state;
            unsigned long inode;
            if (sscanf(line, " %*d: %*[0-9A-Fa-f]:%x %*[0-9A-Fa-f]:%*x %x %*s %*s %*s %*d %*d %lu",
                       &local_port, &state, &inode) != 3) continue;
            if ((int)local_port != port || state != TCP_LISTEN) continue;
            if (is_theirs(pids, inode)) theirs++;
            else others++;
        }
        if (f) fclose(f);
    }
    return theirs && !others;
}
