// The driver: virtio 1.2 over MMIO (4.2), one queue, one request at a time. It waits by looking at the
// queue, so it needs no interrupts.
//
//   0xd0000000 + N * 4 KiB   the registers of the Nth device (Firecracker's layout)
//
// The boot's page tables map the first GiB alone. drive_open maps the registers.
#include "drive.h"

#define DEVICES ((volatile uint32_t *)0xd0000000)
#define DEVICES_MAX 16
#define WORDS_PER_DEVICE (4096 / 4)
#define QUEUE 16

// Registers, as numbers of 32-bit words.
enum {
    MAGIC = 0x00 / 4,
    DEVICE_ID = 0x08 / 4,
    DRIVER_FEATURES = 0x20 / 4,
    DRIVER_FEATURES_SELECT = 0x24 / 4,
    QUEUE_SELECT = 0x30 / 4,
    QUEUE_NUM = 0x38 / 4,
    QUEUE_READY = 0x44 / 4,
    QUEUE_NOTIFY = 0x50 / 4,
    STATUS = 0x70 / 4,
    QUEUE_DESCRIPTORS = 0x80 / 4,
    QUEUE_DRIVER = 0x90 / 4,
    QUEUE_DEVICE = 0xa0 / 4,
    CAPACITY = 0x100 / 4,
};
enum { ACKNOWLEDGE = 1, DRIVER = 2, DRIVER_OK = 4, FEATURES_OK = 8 };
enum { BLOCK_DEVICE = 2, NEXT = 1, DEVICE_WRITES = 2, READ = 0, WRITE = 1 };

static struct {
    uint64_t address;
    uint32_t length;
    uint16_t flags, next;
} descriptors[QUEUE] __attribute__((aligned(16)));
static volatile struct { uint16_t flags, index, ring[QUEUE]; } available __attribute__((aligned(2)));
static volatile struct {
    uint16_t flags, index;
    struct { uint32_t id, length; } ring[QUEUE];
} used __attribute__((aligned(4)));
static struct { uint32_t type, reserved; uint64_t sector; } header;
static volatile uint8_t status;
static uint64_t device_pages[512] __attribute__((aligned(4096)));
static volatile uint32_t *drive;

static void map_devices(void) {
    uint64_t root;
    __asm__ volatile("mov %%cr3, %0" : "=r"(root));
    uint64_t *top = (uint64_t *)(root & ~0xfffull);
    uint64_t *gigabytes = (uint64_t *)(top[0] & 0x000ffffffffff000ull);
    uint64_t at = (uint64_t)DEVICES;
    // Present, writable, not cached, a page of 2 MiB.
    device_pages[at >> 21 & 511] = at | 0x93;
    gigabytes[at >> 30] = (uint64_t)device_pages | 3;
    __asm__ volatile("mov %0, %%cr3" : : "r"(root) : "memory");
}

static void set_address(int place, const volatile void *what) {
    drive[place] = (uint32_t)(uint64_t)what;
    drive[place + 1] = (uint32_t)((uint64_t)what >> 32);
}

uint64_t drive_open(void) {
    map_devices();
    for (int i = 0; i < DEVICES_MAX && !drive; i++) {
        volatile uint32_t *device = DEVICES + i * WORDS_PER_DEVICE;
        if (device[MAGIC] == 0x74726976 && device[DEVICE_ID] == BLOCK_DEVICE) drive = device;
    }
    if (!drive) return 0;
    drive[STATUS] = 0;
    // Firecracker takes one step at a time.
    drive[STATUS] = ACKNOWLEDGE;
    drive[STATUS] = ACKNOWLEDGE | DRIVER;
    drive[DRIVER_FEATURES_SELECT] = 0;
    drive[DRIVER_FEATURES] = 0;
    // VIRTIO_F_VERSION_1 alone.
    drive[DRIVER_FEATURES_SELECT] = 1;
    drive[DRIVER_FEATURES] = 1;
    drive[STATUS] = ACKNOWLEDGE | DRIVER | FEATURES_OK;
    drive[QUEUE_SELECT] = 0;
    drive[QUEUE_NUM] = QUEUE;
    set_address(QUEUE_DESCRIPTORS, descriptors);
    set_address(QUEUE_DRIVER, &available);
    set_address(QUEUE_DEVICE, &used);
    drive[QUEUE_READY] = 1;
    drive[STATUS] = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
    uint64_t sectors = drive[CAPACITY] | (uint64_t)drive[CAPACITY + 1] << 32;
    return sectors / (DRIVE_BLOCK_BYTES / 512);
}

static int request(uint32_t type, uint64_t number, uint64_t data) {
    header.type = type;
    header.sector = number * (DRIVE_BLOCK_BYTES / 512);
    status = 0xff;
    descriptors[0].address = (uint64_t)&header;
    descriptors[0].length = sizeof header;
    descriptors[0].flags = NEXT;
    descriptors[0].next = 1;
    descriptors[1].address = data;
    descriptors[1].length = DRIVE_BLOCK_BYTES;
    descriptors[1].flags = NEXT | (type == READ ? DEVICE_WRITES : 0);
    descriptors[1].next = 2;
    descriptors[2].address = (uint64_t)&status;
    descriptors[2].length = 1;
    descriptors[2].flags = DEVICE_WRITES;
    uint16_t before = used.index;
    available.ring[available.index % QUEUE] = 0;
    __asm__ volatile("mfence" : : : "memory");
    available.index++;
    __asm__ volatile("mfence" : : : "memory");
    drive[QUEUE_NOTIFY] = 0;
    while (used.index == before) __asm__ volatile("pause" : : : "memory");
    return status == 0;
}

int drive_read(uint64_t number, void *data) { return request(READ, number, (uint64_t)data); }

int drive_write(uint64_t number, const void *data) { return request(WRITE, number, (uint64_t)data); }
