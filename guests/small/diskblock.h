/* The read-only test disk: every 4 KiB block says which block it is and can be checked alone.
 *
 *   word 0        1              2 .. 511
 *   +------------+--------------+----------------------------------+
 *   | DISK_MAGIC | block number | mix(GOLDEN * (number * 512 + i)) |   little-endian u64
 *   +------------+--------------+----------------------------------+
 */
#ifndef KF_DISKBLOCK_H
#define KF_DISKBLOCK_H

#include "hash.h"

#define DISK_BLOCK_BYTES 4096
#define DISK_BLOCK_WORDS 512
#define DISK_BLOCKS 16384 /* 64 MiB */
#define DISK_MAGIC 0x306B736964666B21ull /* "!kfdisk0" in the file */

static inline uint64_t disk_word(uint64_t block, uint64_t i)
{
    return i == 0 ? DISK_MAGIC : i == 1 ? block : hash_mix(HASH_GOLDEN * (block * DISK_BLOCK_WORDS + i));
}

static inline void disk_fill(uint64_t *words, uint64_t block)
{
    for (uint64_t i = 0; i < DISK_BLOCK_WORDS; i++)
        words[i] = disk_word(block, i);
}

/* The first word that is not what block `block` holds there, or -1 when all are right. */
static inline int disk_first_bad(const uint64_t *words, uint64_t block)
{
    for (int i = 0; i < DISK_BLOCK_WORDS; i++)
        if (words[i] != disk_word(block, (uint64_t)i))
            return i;
    return -1;
}

#endif
