/* `scribble`: one worker a vCPU, each writing its own pages all over kf.mib MiB of shared memory and checking, before each
 * write, that the page still is what it wrote in its last pass.
 *
 *   page p belongs to worker p % workers:
 *   | owner | page | pass | sum of the body | body: 508 words, mix(pass, page, i) for 64 of them each pass |
 *
 * What the page should hold is known from the pass, which the worker keeps in a register, and from the page's number.
 */
#include "hash.h"
#include "kfguest.h"

#define HEAD_WORDS 4
#define BODY_WORDS (PAGE_WORDS - HEAD_WORDS)
#define BODY_STRIDE 8 /* every 8th word changes in a pass, another eighth in the next */

static uint64_t *memory;
static uint64_t pages;

static void prepare(void)
{
    uint64_t mib = param_number("scribble", "mib", 64, 1, 1 << 20);
    memory = map_mib("scribble", mib, true);
    pages = (mib << 20) / PAGE_BYTES;
}

static void write_page(uint64_t *words, uint64_t owner, uint64_t page, uint64_t pass)
{
    uint64_t seed = hash_mix(pass * HASH_GOLDEN + page), sum = words[3];
    for (uint64_t i = pass % BODY_STRIDE; i < BODY_WORDS; i += BODY_STRIDE) {
        uint64_t *word = &words[HEAD_WORDS + i];
        sum -= *word;
        *word = seed + i * HASH_GOLDEN;
        sum += *word;
    }
    words[0] = owner;
    words[1] = page;
    words[2] = pass;
    words[3] = sum;
}

static bool page_right(const uint64_t *words, uint64_t owner, uint64_t page, uint64_t pass)
{
    if (words[0] != owner || words[1] != page || words[2] != pass)
        return false;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < BODY_WORDS; i++)
        sum += words[HEAD_WORDS + i];
    if (sum != words[3])
        return false;
    uint64_t seed = hash_mix(pass * HASH_GOLDEN + page);
    for (uint64_t i = pass % BODY_STRIDE; i < BODY_WORDS; i += BODY_STRIDE)
        if (words[HEAD_WORDS + i] != seed + i * HASH_GOLDEN)
            return false;
    return true;
}

static void run(struct slot *slot)
{
    for (uint64_t page = slot->worker; page < pages; page += slot->workers)
        write_page(memory + page * PAGE_WORDS, slot->worker, page, 0);
    wait_for_go(slot);
    for (uint64_t pass = 1;; pass++) {
        for (uint64_t page = slot->worker; page < pages; page += slot->workers) {
            uint64_t *words = memory + page * PAGE_WORDS;
            if (!page_right(words, slot->worker, page, pass - 1)) {
                if (slot->counter[1] < 10)
                    error("scribble", "worker %u page %llu: owner %llu page %llu pass %llu, expected pass %llu",
                          slot->worker, (unsigned long long)page, (unsigned long long)words[0],
                          (unsigned long long)words[1], (unsigned long long)words[2], (unsigned long long)(pass - 1));
                count(slot, 1, 1);
                /* Repaired, or the same fault would count again in every pass. */
                words[3] = 0;
                for (uint64_t i = 0; i < BODY_WORDS; i++)
                    words[3] += words[HEAD_WORDS + i];
            }
            write_page(words, slot->worker, page, pass);
        }
        count(slot, 0, 1);
    }
}

const struct workload work_scribble = {
    .name = "scribble", .counter = {"passes", "bad"}, .every_second = true, .per_cpu = true, .prepare = prepare, .run = run,
};
