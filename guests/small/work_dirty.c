/* `dirty`: writes kf.rate pages a second, spread over kf.mib MiB, and computes in the time that is left.
 *
 *   |-- slot, 10 ms ----------------------|-- slot --
 *   | rate/100 pages | work units . . . . | ...
 *
 * The page number walks by a stride without common divisor with the number of pages, so pages repeat only after all were
 * written. Work units lost between two runs tell how much the guest was slowed down. A guest held up for more than a
 * few slots goes on at its rate from there: no burst.
 */
#include "kfguest.h"

#define SLOTS_PER_S 100
#define SLOTS_BEHIND_MAX 5
#define UNIT_STEPS 2000

static void run(struct slot *slot)
{
    uint64_t mib = param_number("dirty", "mib", 64, 1, 1 << 20);
    uint64_t pages = (mib << 20) / PAGE_BYTES;
    uint64_t *memory = map_mib("dirty", mib, false);
    atomic_store(&shared->dirty_rate, param_number("dirty", "rate", 1000, 0, 100000000));
    for (uint64_t page = 0; page < pages; page++)
        memory[page * PAGE_WORDS] = page;
    uint64_t stride = stride_over(pages);

    uint64_t page = 0, sum = 0, owed = 0;
    wait_for_go(slot);
    double start = now();
    for (uint64_t done = 1;; done++) {
        owed += atomic_load_explicit(&shared->dirty_rate, memory_order_relaxed);
        uint64_t due = owed / SLOTS_PER_S;
        owed %= SLOTS_PER_S;
        for (uint64_t i = 0; i < due; i++) {
            page = (page + stride) % pages;
            volatile uint64_t *words = memory + page * PAGE_WORDS;
            uint64_t at = page * 8 % (PAGE_WORDS - 8);
            words[at] += page;
            words[at + 3] = sum;
            words[PAGE_WORDS - 1] += 1;
        }
        count(slot, 0, due);
        double end = start + (double)done / SLOTS_PER_S;
        if (now() > end + (double)SLOTS_BEHIND_MAX / SLOTS_PER_S) {
            start = end = now();
            done = 0;
        }
        do {
            for (int i = 0; i < UNIT_STEPS; i++) {
                sum = sum * 6364136223846793005ull + 1442695040888963407ull;
                sum ^= sum >> 17;
            }
            count(slot, 1, 1);
        } while (now() < end);
    }
}

const struct workload work_dirty = {
    .name = "dirty", .counter = {"written", "work"}, .every_second = true, .with_time = true, .run = run,
};
