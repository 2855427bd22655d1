/* `compute`: arithmetic in registers, one worker a vCPU. A unit is 100000 steps of a linear congruential generator, so units per second
 * compare the guest's speed with and without something else going on.
 *
 * With kf.compute.mib=MIB each worker has a working set besides, and with each unit writes kf.compute.words words (2) of kf.compute.pages
 * pages of it (16): others each time, until all were written. What it writes goes with its work, as a solver's does, and not with time.
 */
#include "kfguest.h"

#define UNIT_STEPS 100000

static void run(struct slot *slot)
{
    uint64_t mib = param_number("compute", "mib", 0, 0, 1 << 20);
    uint64_t written = mib ? param_number("compute", "pages", 16, 0, 1 << 20) : 0;
    uint64_t words = param_number("compute", "words", 2, 1, PAGE_WORDS);
    uint64_t pages = (mib << 20) / PAGE_BYTES, stride = stride_over(pages), page = 0;
    uint64_t *memory = mib ? map_mib("compute", mib, false) : NULL;
    for (uint64_t i = 0; i < pages; i++)
        memory[i * PAGE_WORDS] = i;
    uint64_t sum = slot->worker;
    wait_for_go(slot);
    for (;;) {
        for (int i = 0; i < UNIT_STEPS; i++) {
            sum = sum * 6364136223846793005ull + 1442695040888963407ull;
            __asm__ volatile("" : "+r"(sum)); /* the steps are the point: keep each */
        }
        for (uint64_t i = 0; i < written; i++) {
            page = (page + stride) % pages;
            for (uint64_t word = 0; word < words; word++)
                memory[page * PAGE_WORDS + word * (PAGE_WORDS / words)] += sum * (word + 1);
        }
        count(slot, 0, 1);
    }
}

const struct workload work_compute = {
    .name = "compute", .counter = {"work"}, .every_second = true, .with_time = true, .per_cpu = true, .run = run,
};
