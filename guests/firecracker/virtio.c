//   0xd0000000 + N * 4 KiB   the registers of the Nth device (Firecracker's layout)
//
// The boot's page tables map the first GiB alone. virtio_find maps the registers.
#include "virtio.h"

#define DEVICES ((volatile uint32_t *)0xd0000000)
#define DEVICES_MAX 16
#define WORDS_PER_DEVICE (4096 / 4)
#define MAGIC_VALUE 0x74726976

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
};
enum { ACKNOWLEDGE = 1, DRIVER = 2, DRIVER_OK = 4, FEATURES_OK = 8 };

static uint64_t device_pages[512] __attribute__((aligned(4096)));

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

volatile uint32_t *virtio_find(uint32_t kind) {
    map_devices();
    for (int i = 0; i < DEVICES_MAX; i++) {
        volatile uint32_t *device = DEVICES + i * WORDS_PER_DEVICE;
        if (device[MAGIC] == MAGIC_VALUE && device[DEVICE_ID] == kind) return device;
    }
    return 0;
}

void virtio_begin(volatile uint32_t *device) {
    device[STATUS] = 0;
    // Firecracker takes one step at a time.
    device[STATUS] = ACKNOWLEDGE;
    device[STATUS] = ACKNOWLEDGE | DRIVER;
    device[DRIVER_FEATURES_SELECT] = 0;
    device[DRIVER_FEATURES] = 0;
    // VIRTIO_F_VERSION_1.
    device[DRIVER_FEATURES_SELECT] = 1;
    device[DRIVER_FEATURES] = 1;
    device[STATUS] = ACKNOWLEDGE | DRIVER | FEATURES_OK;
}

static void set_address(volatile uint32_t *device, int place, const volatile void *what) {
    device[place] = (uint32_t)(uint64_t)what;
    device[place + 1] = (uint32_t)((uint64_t)what >> 32);
}

void virtio_queue(volatile uint32_t *device, uint32_t number, uint32_t size, const volatile void *descriptors,
                  const volatile void *available, const volatile void *used) {
    device[QUEUE_SELECT] = number;
    device[QUEUE_NUM] = size;
    set_address(device, QUEUE_DESCRIPTORS, descriptors);
    set_address(device, QUEUE_DRIVER, available);
    set_address(device, QUEUE_DEVICE, used);
    device[QUEUE_READY] = 1;
}

void virtio_end(volatile uint32_t *device) { device[STATUS] = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK; }

void virtio_notify(volatile uint32_t *device, uint32_t number) { device[QUEUE_NOTIFY] = number; }

void virtio_barrier(void) { __asm__ volatile("mfence" : : : "memory"); }
