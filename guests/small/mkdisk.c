/* Writes the read-only test disk (diskblock.h) to standard output. Runs on the host, while the guest is built. */
#include <stdio.h>

#include "diskblock.h"

int main(void)
{
    static uint64_t words[DISK_BLOCK_WORDS];
    for (uint64_t block = 0; block < DISK_BLOCKS; block++) {
        disk_fill(words, block);
        if (fwrite(words, DISK_BLOCK_BYTES, 1, stdout) != 1) {
            perror("mkdisk: writing standard output");
            return 1;
        }
    }
    if (fclose(stdout) != 0) {
        perror("mkdisk: closing standard output");
        return 1;
    }
    return 0;
}
