/* The self-checking sequence of the `hash` workload: one state and one table, wrapping u64 arithmetic throughout.
 *
 *   table, N = mib * 131072 words, page-aligned; word i starts as mix(GOLDEN * (i + 1))
 *   +--page 0----------------+--page 1----------------+-
 *   | head | 511 words       | head | 511 words       |
 *   +------+-----------------+------+-----------------+-
 *
 * One line is 4096 steps. A step reads and updates a word at a place that the state chooses and the head of that
 * word's page, so every visit to a page depends on every earlier visit to it: a page that was lost or brought back
 * stale changes the sequence the next time it is visited. docs/guests.md defines the same for readers of other languages.
 */
#ifndef KF_HASH_H
#define KF_HASH_H

#include <stdint.h>

#define HASH_GOLDEN 0x9E3779B97F4A7C15ull
#define HASH_START 0x4B65796672616D65ull /* "Keyframe" */
#define HASH_STEPS 4096
#define HASH_WORDS_PER_MIB 131072ull
#define HASH_PAGE_WORDS 512ull

/* splitmix64's finaliser. */
static inline uint64_t hash_mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static inline uint64_t hash_initial_word(uint64_t i) { return hash_mix(HASH_GOLDEN * (i + 1)); }

/* Advances `state` by one line. `page_sums`, when given, is kept the wrapping sum of each page's words. */
static inline uint64_t hash_line(uint64_t state, uint64_t *table, uint64_t words, uint64_t *page_sums)
{
    for (int step = 0; step < HASH_STEPS; step++) {
        uint64_t at = ((state >> 32) * words) >> 32; /* words < 2^32 */
        uint64_t head = at & ~(HASH_PAGE_WORDS - 1);
        state = hash_mix(state + table[at] + HASH_GOLDEN);
        table[at] += state;
        if (page_sums)
            page_sums[at / HASH_PAGE_WORDS] += state;
        state = hash_mix(state ^ table[head]);
        table[head] += state;
        if (page_sums)
            page_sums[at / HASH_PAGE_WORDS] += state;
    }
    return state;
}

#endif
