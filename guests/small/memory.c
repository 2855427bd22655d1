/* Clock and memory for the workloads. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "kfguest.h"

double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec * 1e-9;
}

void sleep_us(uint64_t us)
{
    struct timespec left = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        continue;
}

static uint64_t available_mib(void)
{
    char line[128];
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/meminfo", "r");
    if (!file)
        return UINT64_MAX;
    while (fgets(line, sizeof line, file) && sscanf(line, "MemAvailable: %llu", &kib) != 1)
        continue;
    fclose(file);
    return kib / 1024;
}

void *map_mib(const char *work, uint64_t mib, bool shared)
{
    /* Asking first names the mistake; the out-of-memory killer would not. */
    uint64_t free_mib = available_mib();
    if (mib + 8 > free_mib)
        die(work, "kf.mib=%llu does not fit: %llu MiB available", (unsigned long long)mib, (unsigned long long)free_mib);
    void *at = mmap(NULL, mib << 20, PROT_READ | PROT_WRITE, (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        die(work, "mapping %llu MiB: %s", (unsigned long long)mib, strerror(errno));
    return at;
}

static uint64_t common_divisor(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

uint64_t stride_over(uint64_t pages)
{
    uint64_t stride = 40503;
    while (pages > 1 && common_divisor(stride, pages) != 1)
        stride += 2;
    return stride;
}
