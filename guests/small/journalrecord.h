/* A record of the `journal` workload: a 4 KiB block that says which record it is and can be checked alone.
 *
 *   word 0          1        2 .. 510                           511
 *   +--------------+--------+----------------------------------+---------------------------------+
 *   | RECORD_MAGIC | number | mix(GOLDEN * (number * 512 + i)) | mix(sum of the words before it) |   little-endian u64
 *   +--------------+--------+----------------------------------+---------------------------------+
 *
 * Numbers begin with 1; arithmetic wraps.
 */
#ifndef KF_JOURNALRECORD_H
#define KF_JOURNALRECORD_H

#include <stdbool.h>

#include "hash.h"

#define RECORD_BYTES 4096
#define RECORD_WORDS 512
#define RECORD_MAGIC 0x304C4E524A666B21ull /* "!kfJRNL0" in the file */

static inline uint64_t record_word(uint64_t number, uint64_t i)
{
    return i == 0 ? RECORD_MAGIC : i == 1 ? number : hash_mix(HASH_GOLDEN * (number * RECORD_WORDS + i));
}

static inline void record_fill(uint64_t *words, uint64_t number)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < RECORD_WORDS - 1; i++)
        sum += words[i] = record_word(number, i);
    words[RECORD_WORDS - 1] = hash_mix(sum);
}

/* The number of a whole record, else 0. */
static inline uint64_t record_number(const uint64_t *words)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < RECORD_WORDS - 1; i++) {
        if (words[i] != record_word(words[1], i))
            return 0;
        sum += words[i];
    }
    return words[RECORD_WORDS - 1] == hash_mix(sum) ? words[1] : 0;
}

static inline bool record_is_blank(const uint64_t *words)
{
    for (int i = 0; i < RECORD_WORDS; i++)
        if (words[i])
            return false;
    return true;
}

#endif
