/* Log-linear histogram of nanoseconds, 64 steps per octave: within 1 % of the exact quantile. */
#pragma once
#include <stdint.h>
#include <stdio.h>

#define STEPS 64
#define BUCKETS (STEPS * 64)

struct histogram {
    uint64_t n, sum, max, buckets[BUCKETS];
};

static inline void histogram_add(struct histogram *h, uint64_t v)
{
    int octave = v < 2 * STEPS ? 0 : 57 - __builtin_clzll(v);
    int i = v < 2 * STEPS ? (int)v : octave * STEPS + (int)(v >> octave);
    h->buckets[i < BUCKETS ? i : BUCKETS - 1]++;
    h->n++;
    h->sum += v;
    if (v > h->max) h->max = v;
}

static inline double histogram_quantile(const struct histogram *h, double q)
{
    uint64_t wanted = (uint64_t)(q * (double)h->n), seen = 0;
    if (!h->n) return 0;
    if (wanted >= h->n) wanted = h->n - 1;
    for (int i = 0; i < BUCKETS; i++) {
        seen += h->buckets[i];
        if (seen <= wanted) continue;
        if (i < 2 * STEPS) return i;
        return (STEPS + i % STEPS + 0.5) * (double)(1ull << (i / STEPS - 1));
    }
    return (double)h->max;
}

static inline void histogram_print(const char *name, const struct histogram *h)
{
    printf(",\"%s\":{\"n\":%lu,\"mean_us\":%.1f,\"p50_us\":%.1f,\"p99_us\":%.1f,\"max_us\":%.1f}", name, h->n,
           h->n ? (double)h->sum / 1e3 / (double)h->n : 0, histogram_quantile(h, .5) / 1e3,
           histogram_quantile(h, .99) / 1e3, (double)h->max / 1e3);
}
