// A driver of virtio-net that checks what the card does to the guest's RAM.
//
// All BUFFERS buffers are with the card, or have just come back from it. Each one is filled with a
// pattern before the card gets it. So the driver sees if the card
//
//   - gives back more buffers than it has, a buffer twice, or goes back with the index of the ring
//   - has written to a buffer that it does not give back in its turn
//   - gives back a frame that is not as it was sent, or one that is older than the last one
//
// A checkpoint whose RAM is newer or older than the state of its devices shows as one of these after
// a restore.
//
// The frames are UDP to PORT: a number that rises with each frame, and WORDS_SENT words that depend
// on it. Other frames are only counted as returned buffers. After a line with new frames it prints
//
//   kf net NUMBER COUNT   the number of the last frame, and how many have come, as hexadecimal digits
//
// and sends one frame of its own.
#include "virtio.h"

#define BUFFERS 64
#define BUFFER_BYTES 2048
#define BUFFER_WORDS (BUFFER_BYTES / 8)
// The words of a buffer that are filled and checked: each 16th.
#define BUFFER_STRIDE 16
#define PORT 0x4b46
#define WORDS_SENT 32
// The header of virtio-net, then those of Ethernet, IP and UDP.
#define ETHERNET 12
#define IP (ETHERNET + 14)
#define UDP (IP + 20)
#define SENT (UDP + 8)

struct ring {
    struct virtio_descriptor descriptors[BUFFERS];
    struct { uint16_t flags, index, ring[BUFFERS]; } available;
    _Alignas(4) struct { uint16_t flags, index; struct { uint32_t id, length; } ring[BUFFERS]; } used;
};

static _Alignas(16) volatile struct ring receiving, sending;
static _Alignas(64) uint64_t buffers[BUFFERS][BUFFER_WORDS];
static _Alignas(64) uint8_t frame_sent[64];
static volatile uint32_t *card;

// For each buffer the number of its last handover, and how many buffers had come back when it was
// first seen written to.
static uint64_t handed_over[BUFFERS], written_since[BUFFERS];
static uint64_t handovers, returned, frames, last_frame, frames_told;
static uint16_t used_seen;
static unsigned looked_at;

static uint64_t pattern(unsigned buffer, unsigned at) { return mix(handed_over[buffer] * BUFFER_WORDS + at + 1); }

static void hand_over(unsigned buffer) {
    handed_over[buffer] = ++handovers;
    written_since[buffer] = 0;
    for (unsigned at = 0; at < BUFFER_WORDS; at += BUFFER_STRIDE) buffers[buffer][at] = pattern(buffer, at);
    receiving.available.ring[receiving.available.index % BUFFERS] = (uint16_t)buffer;
    virtio_barrier();
    receiving.available.index++;
}

// Whether the buffer is as it was handed over, from byte `from` on.
static int is_untouched(unsigned buffer, unsigned from) {
    const volatile uint64_t *words = buffers[buffer];
    for (unsigned at = 0; at < BUFFER_WORDS; at += BUFFER_STRIDE)
        if (at * 8 >= from && words[at] != pattern(buffer, at)) return 0;
    return 1;
}

static void set_queue(uint32_t number, volatile struct ring *ring) {
    virtio_queue(card, number, BUFFERS, ring->descriptors, &ring->available, &ring->used);
}

// Finds the first network card and starts it.
static void net_begin(void) {
    card = virtio_find(VIRTIO_NETWORK_CARD);
    if (!card) return;
    virtio_begin(card);
    for (unsigned buffer = 0; buffer < BUFFERS; buffer++) {
        volatile struct virtio_descriptor *descriptor = &receiving.descriptors[buffer];
        descriptor->address = (uint64_t)buffers[buffer];
        descriptor->length = BUFFER_BYTES;
        descriptor->flags = VIRTIO_DEVICE_WRITES;
    }
    set_queue(0, &receiving);
    set_queue(1, &sending);
    virtio_end(card);
    for (unsigned buffer = 0; buffer < BUFFERS; buffer++) hand_over(buffer);
    virtio_notify(card, 0);
}

static uint64_t word_at(const uint8_t *bytes) {
    uint64_t word;
    __builtin_memcpy(&word, bytes, 8);
    return word;
}

// What is wrong with the frame in `bytes`; null if nothing is.
static const char *check_frame(const uint8_t *bytes, uint32_t length) {
    int is_ours = length >= SENT + 8 * (1 + WORDS_SENT) && bytes[ETHERNET + 12] == 8 && bytes[ETHERNET + 13] == 0 &&
                  bytes[IP] == 0x45 && bytes[IP + 9] == 17 && bytes[UDP + 2] == PORT >> 8 && bytes[UDP + 3] == (PORT & 255);
    if (!is_ours) return 0;
    uint64_t number = word_at(bytes + SENT);
    if (number <= last_frame) return "an old frame";
    for (uint64_t at = 0; at < WORDS_SENT; at++)
        if (word_at(bytes + SENT + 8 + 8 * at) != mix(number * WORDS_SENT + at)) return "a damaged frame";
    last_frame = number;
    frames++;
    return 0;
}

// Takes what the card has received. Returns what is wrong with it; null if nothing is.
static const char *net_poll(void) {
    if (!card) return 0;
    uint16_t pending = (uint16_t)(receiving.used.index - used_seen);
    if (pending > BUFFERS) return "the index of used buffers";
    virtio_barrier();
    for (uint16_t taken = 0; taken < pending; taken++) {
        uint32_t buffer = receiving.used.ring[used_seen % BUFFERS].id, length = receiving.used.ring[used_seen % BUFFERS].length;
        used_seen++;
        returned++;
        if (buffer >= BUFFERS || length > BUFFER_BYTES) return "a used buffer";
        if (handed_over[buffer] != returned) return "a used buffer out of its turn";
        const char *damage = check_frame((const uint8_t *)buffers[buffer], length);
        if (damage) return damage;
        if (!is_untouched(buffer, (length + 7) & ~7u)) return "a buffer after its frame";
        hand_over(buffer);
    }
    if (pending) {
        virtio_barrier();
        virtio_notify(card, 0);
    }
    // The card may be about to give it back. It gives buffers back in the order in which it got them.
    looked_at = (looked_at + 1) % BUFFERS;
    if (!is_untouched(looked_at, 0)) {
        if (!written_since[looked_at]) written_since[looked_at] = returned + 1;
        if (returned + 1 - written_since[looked_at] > BUFFERS) return "a buffer that is not in use";
    }
    return 0;
}

// Prints a line and sends a frame if frames have come since the last call.
static void net_tell(void) {
    if (frames == frames_told) return;
    frames_told = frames;
    say("kf net ");
    say_hex(last_frame);
    put(' ');
    say_hex(frames);
    put('\n');
    if (sending.used.index != sending.available.index) return;
    for (unsigned at = 0; at < 12; at++) frame_sent[ETHERNET + at] = 0xff;
    // A kind of frame for local experiments.
    frame_sent[ETHERNET + 12] = 0x88;
    frame_sent[ETHERNET + 13] = 0xb5;
    sending.descriptors[0].address = (uint64_t)frame_sent;
    sending.descriptors[0].length = sizeof frame_sent;
    sending.available.ring[sending.available.index % BUFFERS] = 0;
    virtio_barrier();
    sending.available.index++;
    virtio_barrier();
    virtio_notify(card, 1);
}
