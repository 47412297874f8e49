/* The one clock of the bench: both ends stamp and read CLOCK_MONOTONIC on the same machine. */
#pragma once
#include <stdint.h>
#include <time.h>

#define NS_PER_S 1000000000ull
#define NS_PER_US 1000ull

static inline uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * NS_PER_S + (uint64_t)t.tv_nsec;
}
