/* Prints the frequency of this host's time-stamp counter in kHz. Under TCG it is the guest's too, and a guest that has no
 * other clock (microvm) may fail to find it out by itself on a busy host, and then never boots.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <x86intrin.h>

#define WINDOWS 5
#define WINDOW_NS 8000000

static uint64_t now_ns(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC_RAW, &at);
    return (uint64_t)at.tv_sec * 1000000000 + (uint64_t)at.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

int main(void)
{
    uint64_t khz[WINDOWS];
    for (int i = 0; i < WINDOWS; i++) {
        uint64_t start = now_ns(), ticks = __rdtsc(), end;
        struct timespec pause = {0, WINDOW_NS};
        nanosleep(&pause, NULL);
        end = now_ns();
        khz[i] = (uint64_t)((double)(__rdtsc() - ticks) * 1e6 / (double)(end - start));
    }
    qsort(khz, WINDOWS, sizeof *khz, by_value);
    printf("%llu\n", (unsigned long long)khz[WINDOWS / 2]);
    return 0;
}
