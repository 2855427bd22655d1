/* `compute`: nothing but arithmetic in registers, one worker a vCPU. A unit is 100000 steps of a linear congruential
 * generator, so units per second compare the guest's speed with and without something else going on.
 */
#include "kfguest.h"

#define UNIT_STEPS 100000

static void run(struct slot *slot)
{
    uint64_t sum = slot->worker;
    wait_for_go(slot);
    for (;;) {
        for (int i = 0; i < UNIT_STEPS; i++) {
            sum = sum * 6364136223846793005ull + 1442695040888963407ull;
            __asm__ volatile("" : "+r"(sum)); /* the steps are the point: keep each */
        }
        count(slot, 0, 1);
    }
}

const struct workload work_compute = {
    .name = "compute", .counter = {"work"}, .every_second = true, .with_time = true, .per_cpu = true, .run = run,
};
