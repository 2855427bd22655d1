/* `journal`: writes numbered, checksummed records to a writable disk (journalrecord.h), and keeps in RAM what it wrote, so that
 * a disk which is older or newer than the RAM beside it is noticed.
 *
 *   kf.dev:   | ring of kf.mib MiB: record n in block n % blocks | scratch, 1 MiB, with kf.trim=1 |
 *
 *   a turn:   the blocks to be overwritten are read, and must hold what RAM says ...... a disk newer than RAM
 *             kf.batch records are written, and synced once kf.sync of them are not
 *             one of the last 64 records and any other are read and compared .......... a disk older than RAM
 *
 * Reads are O_DIRECT. After a boot it goes on where the disk is whole.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "journalrecord.h"
#include "kfguest.h"

#define ERRORS_SAID_MAX 10
#define BATCH_MAX 64
#define RECENT 64
#define SCRATCH_BYTES (1u << 20)
#define TRIM_EVERY 8 /* turns */

static struct slot *slot;
static const char *path;
static uint64_t blocks, random_state = 1;
static uint64_t *copy;    /* what each block of the ring holds */
static uint64_t *numbers; /* the record in each; 0: none */
static uint64_t *buffer;  /* BATCH_MAX blocks */
static int reader, writer;

enum { WRITTEN, SYNCED, BAD };

static uint64_t next_random(void)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return random_state >> 33;
}

static int open_disk(int flags)
{
    int fd = -1;
    /* The driver finds the disk a moment after its module was loaded. */
    for (int tries = 0; tries < 200 && (fd = open(path, flags | O_CLOEXEC)) < 0 && (errno == ENOENT || errno == ENXIO); tries++)
        sleep_us(50000);
    if (fd < 0)
        die("journal", "opening %s: %s", path, strerror(errno));
    return fd;
}

static void read_blocks(uint64_t first, uint64_t count)
{
    ssize_t got = pread(reader, buffer, count * RECORD_BYTES, (off_t)(first * RECORD_BYTES));
    if (got != (ssize_t)(count * RECORD_BYTES))
        die("journal", "reading %llu blocks at %llu of %s: %s", (unsigned long long)count, (unsigned long long)first, path,
            got < 0 ? strerror(errno) : "short read");
}

static void check(uint64_t first, uint64_t n, const char *when)
{
    read_blocks(first, n);
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t *is = buffer + i * RECORD_WORDS;
        if (memcmp(is, copy + (first + i) * RECORD_WORDS, RECORD_BYTES) == 0)
            continue;
        if (slot->counter[BAD] < ERRORS_SAID_MAX) {
            uint64_t number = record_number(is);
            error("journal", "block %llu holds record %llu%s, RAM says %llu, %s", (unsigned long long)(first + i),
                  (unsigned long long)number, number ? "" : " (none that is whole)",
                  (unsigned long long)numbers[first + i], when);
        }
        count(slot, BAD, 1);
    }
}

static void set_counter(int which, uint64_t value) { atomic_store_explicit(&slot->counter[which], value, memory_order_relaxed); }

/* Takes over what an earlier boot wrote; gives back the record up to which all of it is there. */
static uint64_t take_over(void)
{
    uint64_t whole = UINT64_MAX, torn = 0;
    for (uint64_t first = 0; first < blocks; first += BATCH_MAX) {
        uint64_t n = blocks - first < BATCH_MAX ? blocks - first : BATCH_MAX;
        read_blocks(first, n);
        memcpy(copy + first * RECORD_WORDS, buffer, n * RECORD_BYTES);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t at = first + i, number = record_number(buffer + i * RECORD_WORDS);
            numbers[at] = number && number % blocks == at ? number : 0;
            torn += !numbers[at] && !record_is_blank(buffer + i * RECORD_WORDS);
            /* The record behind this one in the same block is the first that is not there. */
            uint64_t missing = numbers[at] ? numbers[at] + blocks : at ? at : blocks;
            whole = missing - 1 < whole ? missing - 1 : whole;
        }
    }
    say("journal found whole=%llu torn=%llu", (unsigned long long)whole, (unsigned long long)torn);
    return whole;
}

static void sync_up(uint64_t last)
{
    if (fsync(writer) < 0)
        die("journal", "fsync of %s: %s", path, strerror(errno));
    set_counter(SYNCED, last);
}

/* Writes to the scratch area, and makes it zero or gives it up by turns. */
static void trim(uint64_t turn)
{
    uint64_t at = blocks * RECORD_BYTES, range[2] = {at, SCRATCH_BYTES};
    record_fill(buffer, turn);
    for (uint64_t i = 1; i < BATCH_MAX; i++)
        memcpy(buffer + i * RECORD_WORDS, buffer, RECORD_BYTES);
    for (uint64_t done = 0; done < SCRATCH_BYTES; done += BATCH_MAX * RECORD_BYTES)
        if (pwrite(writer, buffer, BATCH_MAX * RECORD_BYTES, (off_t)(at + done)) != BATCH_MAX * RECORD_BYTES)
            die("journal", "writing to the scratch area of %s: %s", path, strerror(errno));
    sync_up(slot->counter[WRITTEN]);
    bool zero = turn / TRIM_EVERY % 2 == 0;
    if (ioctl(writer, zero ? BLKZEROOUT : BLKDISCARD, range) < 0)
        die("journal", "%s of %s: %s", zero ? "BLKZEROOUT" : "BLKDISCARD", path, strerror(errno));
    uint64_t first = blocks + next_random() % (SCRATCH_BYTES / RECORD_BYTES - 1);
    read_blocks(first, 1);
    bool same = record_number(buffer) == turn;
    if (!record_is_blank(buffer) && (zero || !same)) {
        error("journal", "block %llu is not zero after %s", (unsigned long long)first, zero ? "BLKZEROOUT" : "BLKDISCARD");
        count(slot, BAD, 1);
    }
}

static void open_all(uint64_t bytes)
{
    const char *how = param("journal", "how", "direct");
    int flags = strcmp(how, "direct") == 0  ? O_DIRECT
                : strcmp(how, "fsync") == 0 ? 0
                : strcmp(how, "dsync") == 0 ? O_DIRECT | O_DSYNC
                                            : -1;
    if (flags < 0)
        die("journal", "kf.how=%s is none of direct, fsync, dsync", how);
    path = param("journal", "dev", "/dev/vda");
    reader = open_disk(O_RDONLY | O_DIRECT);
    writer = open_disk(O_RDWR | flags);
    off_t has = lseek(reader, 0, SEEK_END);
    if (has < (off_t)bytes)
        die("journal", "%s has %lld bytes, the journal wants %llu", path, (long long)has, (unsigned long long)bytes);
}

static void run(struct slot *own)
{
    slot = own;
    uint64_t mib = param_number("journal", "mib", 8, 1, 1024);
    uint64_t rate = param_number("journal", "rate", 200, 0, 1000000);
    uint64_t batch = param_number("journal", "batch", 4, 1, BATCH_MAX);
    uint64_t sync_every = param_number("journal", "sync", 16, 1, 1000000);
    bool with_trim = param_number("journal", "trim", 0, 0, 1);
    blocks = (mib << 20) / RECORD_BYTES;
    open_all((mib << 20) + (with_trim ? SCRATCH_BYTES : 0));
    copy = map_mib("journal", mib, false);
    numbers = map_mib("journal", (blocks * sizeof *numbers + (1 << 20) - 1) >> 20, false);
    buffer = map_mib("journal", 1, false);
    uint64_t last = take_over();
    set_counter(WRITTEN, last);
    sync_up(last);
    wait_for_go(slot);
    double due = now();
    for (uint64_t turn = 1;; turn++) {
        uint64_t first = (last + 1) % blocks, n = blocks - first < batch ? blocks - first : batch;
        check(first, n, "before it is overwritten");
        for (uint64_t i = 0; i < n; i++) {
            record_fill(buffer + i * RECORD_WORDS, last + 1 + i);
            numbers[first + i] = last + 1 + i;
        }
        memcpy(copy + first * RECORD_WORDS, buffer, n * RECORD_BYTES);
        if (pwrite(writer, buffer, n * RECORD_BYTES, (off_t)(first * RECORD_BYTES)) != (ssize_t)(n * RECORD_BYTES))
            die("journal", "writing record %llu to %s: %s", (unsigned long long)(last + 1), path, strerror(errno));
        last += n;
        set_counter(WRITTEN, last);
        if (last - slot->counter[SYNCED] >= sync_every)
            sync_up(last);
        check((last - next_random() % (last < RECENT ? last : RECENT)) % blocks, 1, "soon after it was written");
        check(next_random() % blocks, 1, "some time after it was written");
        if (with_trim && turn % TRIM_EVERY == 0)
            trim(turn);
        /* After being held up it goes on at its rate, without a burst. */
        due += rate ? (double)n / (double)rate : 0;
        double left = due - now();
        if (left > 0)
            sleep_us((uint64_t)(left * 1e6));
        else if (left < -0.1)
            due = now();
    }
}

const struct workload work_journal = {
    .name = "journal", .counter = {"written", "synced", "bad"}, .every_second = true, .run = run,
};
