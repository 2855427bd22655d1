// The driver: one queue, one request at a time.
#include "drive.h"
#include "virtio.h"

#define QUEUE 16
#define SECTOR_BYTES 512
// The register with the number of sectors, as a number of 32-bit words.
#define CAPACITY (0x100 / 4)
enum { READ = 0, WRITE = 1 };

static struct virtio_descriptor descriptors[QUEUE] __attribute__((aligned(16)));
static volatile struct { uint16_t flags, index, ring[QUEUE]; } available __attribute__((aligned(2)));
static volatile struct {
    uint16_t flags, index;
    struct { uint32_t id, length; } ring[QUEUE];
} used __attribute__((aligned(4)));
static struct { uint32_t type, reserved; uint64_t sector; } header;
static volatile uint8_t status;
static volatile uint32_t *drive;

uint64_t drive_open(void) {
    drive = virtio_find(VIRTIO_BLOCK_DEVICE);
    if (!drive) return 0;
    virtio_begin(drive);
    virtio_queue(drive, 0, QUEUE, descriptors, &available, &used);
    virtio_end(drive);
    uint64_t sectors = drive[CAPACITY] | (uint64_t)drive[CAPACITY + 1] << 32;
    return sectors / (DRIVE_BLOCK_BYTES / SECTOR_BYTES);
}

static int request(uint32_t type, uint64_t number, uint64_t data) {
    header.type = type;
    header.sector = number * (DRIVE_BLOCK_BYTES / SECTOR_BYTES);
    status = 0xff;
    uint16_t data_flags = type == READ ? VIRTIO_NEXT | VIRTIO_DEVICE_WRITES : VIRTIO_NEXT;
    descriptors[0] = (struct virtio_descriptor){(uint64_t)&header, sizeof header, VIRTIO_NEXT, 1};
    descriptors[1] = (struct virtio_descriptor){data, DRIVE_BLOCK_BYTES, data_flags, 2};
    descriptors[2] = (struct virtio_descriptor){(uint64_t)&status, 1, VIRTIO_DEVICE_WRITES, 0};
    uint16_t before = used.index;
    available.ring[available.index % QUEUE] = 0;
    virtio_barrier();
    available.index++;
    virtio_barrier();
    virtio_notify(drive, 0);
    while (used.index == before) __asm__ volatile("pause" : : : "memory");
    return status == 0;
}

int drive_read(uint64_t number, void *data) { return request(READ, number, (uint64_t)data); }

int drive_write(uint64_t number, const void *data) { return request(WRITE, number, (uint64_t)data); }
