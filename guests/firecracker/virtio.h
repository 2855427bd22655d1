// Devices of virtio 1.2 over MMIO (4.2), as Firecracker has them. Their drivers need no interrupts: they
// look at the queues.
#include <stdint.h>

enum { VIRTIO_NETWORK_CARD = 1, VIRTIO_BLOCK_DEVICE = 2 };
// Flags of a descriptor.
enum { VIRTIO_NEXT = 1, VIRTIO_DEVICE_WRITES = 2 };

struct virtio_descriptor { uint64_t address; uint32_t length; uint16_t flags, next; };

// Returns the registers of the first device of this KIND; null if there is none.
volatile uint32_t *virtio_find(uint32_t kind);

// Begins to make a device ready, with no feature but version 1.
void virtio_begin(volatile uint32_t *device);

// Gives the device the queue NUMBER of SIZE descriptors.
void virtio_queue(volatile uint32_t *device, uint32_t number, uint32_t size, const volatile void *descriptors,
                  const volatile void *available, const volatile void *used);

// Makes the device ready.
void virtio_end(volatile uint32_t *device);

// Tells the device that there is something in queue NUMBER.
void virtio_notify(volatile uint32_t *device, uint32_t number);

// Orders all writes before it before all after it.
void virtio_barrier(void);
