/* `disk`: reads the test disk (diskblock.h) in random order with O_DIRECT, so that the device writes into this process's
 * pages itself, and checks each block twice.
 *
 *   ring of buffers, kf.ring_mib MiB:  | block 7 | block 9120 | ... | next |
 *                                  checked right after the read, and again before its buffer is reused
 *
 * The second check finds pages that the device wrote and nobody saw being written.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "diskblock.h"
#include "kfguest.h"

#define RUN_BLOCKS_MAX 16
#define ERRORS_SAID_MAX 10
#define POISON 0xA5

static void bad(struct slot *slot, uint64_t block, int word, const char *when)
{
    if (slot->counter[1] < ERRORS_SAID_MAX)
        error("disk", "block %llu word %d is wrong %s", (unsigned long long)block, word, when);
    count(slot, 1, 1);
}

static int open_disk(const char *path)
{
    /* The driver finds the disk a moment after its module was loaded. */
    int fd = -1;
    for (int tries = 0; tries < 100 && (fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC)) < 0 && errno == ENOENT; tries++)
        sleep_us(50000);
    if (fd < 0)
        die("disk", "opening %s: %s", path, strerror(errno));
    off_t bytes = lseek(fd, 0, SEEK_END);
    if (bytes < (off_t)DISK_BLOCKS * DISK_BLOCK_BYTES)
        die("disk", "%s has %lld bytes, the test disk %llu", path, (long long)bytes,
            (unsigned long long)DISK_BLOCKS * DISK_BLOCK_BYTES);
    return fd;
}

static void run(struct slot *slot)
{
    const char *path = param("disk", "dev", "/dev/vda");
    uint64_t mib = param_number("disk", "ring_mib", 8, 1, 1024);
    uint64_t buffers = (mib << 20) / DISK_BLOCK_BYTES;
    int fd = open_disk(path);
    uint64_t *ring = map_mib("disk", mib, false);
    uint64_t *holds = map_mib("disk", (buffers * sizeof *holds + (1 << 20) - 1) >> 20, false); /* block + 1; 0: nothing */
    uint64_t random = 1, at = 0;
    wait_for_go(slot);
    for (;;) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        uint64_t first = (random >> 33) % DISK_BLOCKS, blocks = 1 + (random >> 20) % RUN_BLOCKS_MAX;
        if (first + blocks > DISK_BLOCKS)
            blocks = DISK_BLOCKS - first;
        if (at + blocks > buffers)
            at = 0;
        for (uint64_t i = at; i < at + blocks; i++) {
            int word = holds[i] ? disk_first_bad(ring + i * DISK_BLOCK_WORDS, holds[i] - 1) : -1;
            if (word >= 0)
                bad(slot, holds[i] - 1, word, "some time after the read");
        }
        memset(ring + at * DISK_BLOCK_WORDS, POISON, blocks * DISK_BLOCK_BYTES);
        ssize_t got = pread(fd, ring + at * DISK_BLOCK_WORDS, blocks * DISK_BLOCK_BYTES, (off_t)(first * DISK_BLOCK_BYTES));
        if (got != (ssize_t)(blocks * DISK_BLOCK_BYTES))
            die("disk", "reading %llu blocks at %llu of %s: %s", (unsigned long long)blocks, (unsigned long long)first,
                path, got < 0 ? strerror(errno) : "short read");
        for (uint64_t i = 0; i < blocks; i++) {
            int word = disk_first_bad(ring + (at + i) * DISK_BLOCK_WORDS, first + i);
            if (word >= 0)
                bad(slot, first + i, word, "right after the read");
            holds[at + i] = first + i + 1;
        }
        count(slot, 0, blocks);
        at = (at + blocks) % buffers;
    }
}

const struct workload work_disk = {.name = "disk", .counter = {"reads", "bad"}, .every_second = true, .run = run};
