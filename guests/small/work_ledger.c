/* `ledger`: a server that counts, on port 4712 over TCP. Each entry is in memory, and with kf.dev=/dev/vdX on that disk too before it
 * is answered. A client that was answered knows what no failure may take back; one that reads the whole learns whether RAM and disk
 * are of one instant.
 *
 *   request, 16 bytes    | LEDGER_MAGIC | value |        0: no entry, only the answer
 *   answer, 32 bytes     | LEDGER_MAGIC | entries | chain over all values | errors |
 *
 *   chain(0) = 0     chain(n) = mix(chain(n - 1) ^ value(n))
 *   disk, block n % BLOCKS:  | LEDGER_MAGIC | n | chain(n) | ...        read back and checked with each entry
 *
 *   kf.ledger.dirty=PAGES  written with each entry (16)
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hash.h"
#include "kfguest.h"

#define LEDGER_MAGIC 0x72656764656c666Bull
#define LEDGER_PORT 4712
#define BLOCKS 1024u
#define ERRORS_SAID_MAX 10

struct ledger {
    uint64_t entries, chain, errors;
    int disk;
    uint64_t *block;
    uint8_t *pages;
    uint64_t dirty;
};

static void wrong(struct ledger *ledger, const char *what)
{
    if (ledger->errors++ < ERRORS_SAID_MAX)
        error("ledger", "%s at entry %llu", what, (unsigned long long)ledger->entries);
}

/* The newest block says what memory says, or this is another instant's disk. */
static void check_disk(struct ledger *ledger)
{
    if (ledger->disk < 0 || ledger->entries == 0)
        return;
    off_t at = (off_t)(ledger->entries % BLOCKS) * PAGE_BYTES;
    if (pread(ledger->disk, ledger->block, PAGE_BYTES, at) != PAGE_BYTES)
        return wrong(ledger, "the disk cannot be read");
    if (ledger->block[0] != LEDGER_MAGIC || ledger->block[1] != ledger->entries || ledger->block[2] != ledger->chain)
        wrong(ledger, "the disk differs from memory");
}

static void enter(struct ledger *ledger, uint64_t value)
{
    check_disk(ledger);
    ledger->entries++;
    ledger->chain = hash_mix(ledger->chain ^ value);
    for (uint64_t i = 0; i < ledger->dirty; i++)
        memcpy(ledger->pages + i * PAGE_BYTES + (ledger->entries % 500) * 8, &ledger->chain, 8);
    if (ledger->disk < 0)
        return;
    memset(ledger->block, 0, PAGE_BYTES);
    ledger->block[0] = LEDGER_MAGIC;
    ledger->block[1] = ledger->entries;
    ledger->block[2] = ledger->chain;
    off_t at = (off_t)(ledger->entries % BLOCKS) * PAGE_BYTES;
    if (pwrite(ledger->disk, ledger->block, PAGE_BYTES, at) != PAGE_BYTES || fdatasync(ledger->disk) < 0)
        wrong(ledger, "the disk cannot be written");
}

static size_t answer(void *self, uint64_t value, uint8_t *out)
{
    struct ledger *ledger = self;
    if (value != 0)
        enter(ledger, value);
    else
        check_disk(ledger);
    uint64_t words[4] = {LEDGER_MAGIC, ledger->entries, ledger->chain, ledger->errors};
    memcpy(out, words, sizeof words);
    return sizeof words;
}

static void count_entries(const void *self, struct slot *slot)
{
    const struct ledger *ledger = self;
    atomic_store_explicit(&slot->counter[0], ledger->entries, memory_order_relaxed);
    atomic_store_explicit(&slot->counter[1], ledger->errors, memory_order_relaxed);
}

static void run(struct slot *slot)
{
    const char *path = param("ledger", "dev", NULL);
    struct ledger ledger = {.disk = -1, .dirty = param_number("ledger", "dirty", 16, 0, 1 << 16)};
    if (path) {
        for (int tries = 0; tries < 100 && (ledger.disk = open(path, O_RDWR | O_DIRECT | O_CLOEXEC)) < 0; tries++)
            sleep_us(50000);
        if (ledger.disk < 0)
            die("ledger", "opening %s: %s", path, strerror(errno));
    }
    ledger.pages = map_mib("ledger", 1 + ledger.dirty * PAGE_BYTES / (1 << 20), false);
    if (posix_memalign((void **)&ledger.block, PAGE_BYTES, PAGE_BYTES) != 0)
        die("ledger", "no memory for a block");
    struct service service = {
        .work = "ledger",
        .port = LEDGER_PORT,
        .magic = LEDGER_MAGIC,
        .answer_max = sizeof(uint64_t[4]),
        .answer = answer,
        .count = count_entries,
    };
    answer_clients(&service, &ledger, slot);
}

const struct workload work_ledger = {.name = "ledger", .counter = {"entries", "errors"}, .every_second = true, .run = run};
