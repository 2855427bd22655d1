// A virtio block drive of Firecracker.
#include <stdint.h>

#define DRIVE_BLOCK_BYTES 4096

// Finds the first drive and makes it ready. Returns the number of its blocks; 0 if there is none.
uint64_t drive_open(void);

// Reads block NUMBER into DATA, or writes it from DATA. Returns 1 if the drive says that it has done so.
int drive_read(uint64_t number, void *data);
int drive_write(uint64_t number, const void *data);
