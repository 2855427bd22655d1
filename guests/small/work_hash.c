/* `hash`: prints a sequence that anybody can recompute (hash.h): `hash <n> <16 hex digits>`, n from 1.
 *
 * Beside it the guest keeps the sum of each page's words in an array of its own and checks a 64th of the table after
 * every line, so it notices by itself, within 64 lines, a page of either that is not what it wrote.
 */
#include "hash.h"
#include "kfguest.h"

#define CHECK_LINES 64

static void check_some(uint64_t line, const uint64_t *table, const uint64_t *sums, uint64_t pages)
{
    uint64_t some = (pages + CHECK_LINES - 1) / CHECK_LINES;
    for (uint64_t i = 0; i < some; i++) {
        uint64_t page = (line * some + i) % pages, sum = 0;
        for (uint64_t w = 0; w < HASH_PAGE_WORDS; w++)
            sum += table[page * HASH_PAGE_WORDS + w];
        if (sum != sums[page])
            error("hash", "line %llu: page %llu sums to %016llx, written was %016llx", (unsigned long long)line,
                  (unsigned long long)page, (unsigned long long)sum, (unsigned long long)sums[page]);
    }
}

static void run(struct slot *slot)
{
    uint64_t mib = param_number("hash", "mib", 16, 1, 16384);
    uint64_t pause_us = 1000 * param_number("hash", "pause_ms", 50, 0, 60000);
    uint64_t words = mib * HASH_WORDS_PER_MIB, pages = words / HASH_PAGE_WORDS;
    uint64_t *table = map_mib("hash", mib, false);
    uint64_t *sums = map_mib("hash", (pages * sizeof *sums + (1 << 20) - 1) >> 20, false);
    for (uint64_t i = 0; i < words; i++) {
        table[i] = hash_initial_word(i);
        sums[i / HASH_PAGE_WORDS] += table[i];
    }
    uint64_t state = HASH_START;
    wait_for_go(slot);
    for (uint64_t line = 1;; line++) {
        state = hash_line(state, table, words, sums);
        say("hash %llu %016llx", (unsigned long long)line, (unsigned long long)state);
        count(slot, 0, 1);
        check_some(line, table, sums, pages);
        sleep_us(pause_us);
    }
}

const struct workload work_hash = {.name = "hash", .counter = {"lines"}, .run = run};
