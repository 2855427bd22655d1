// A guest that checks its RAM: it writes pages of a table in a pseudo-random order, and looks before
// each write whether the page holds exactly what was written there last.
//
//   0x1000000  the table: kf.pages pages. A page that was written in step S of the sequence holds
//              S, and then words that depend on S, on the page and on their position
//
// With a drive it also writes blocks of that, one before each line, and looks before each write
// whether the block holds exactly what was written there last. RAM knows when that was. So a guest
// whose drive is older or newer than its RAM finds it.
//
// It prints a line for each 64 steps:
//
//   kf LINE CHAIN      both as 16 hexadecimal digits. CHAIN depends on all steps before
//   kf ERROR page P    the page P does not hold what it should; nothing follows
//   kf ERROR block B   the same of a block of the drive, or the drive has failed
//
// With a network card it also receives frames, and checks what the card has written: see net.h.
//
// The sequence depends on nothing outside: line N is the same in each VM with the same kf.pages and
// kf.blocks. So a VM that is restored exactly prints the lines that the first VM printed.
//
// Options on the kernel's command line: kf.pages=N (default 2048), kf.pause=N (empty turns of a loop
// after each line, default 0), kf.fill=N (pages after the table that are written once, before the
// first line, so that RAM is in use; default 0), kf.idle=1 (the guest halts after the first line),
// kf.blocks=N (blocks of the drive that are used, at most 4096; default 0: the drive is left alone).
#include "drive.h"
#include <stdint.h>

#define TABLE ((uint64_t *)0x1000000)
#define WORDS 512
// The words of a page that are written and checked: each 32nd. A slow processor has to do.
#define STRIDE 32
#define LAST (WORDS - STRIDE)
#define STEPS 64
// Of the boot parameters of Linux: the address of the command line.
#define COMMAND_LINE 0x228

static void put(char c) { __asm__ volatile("outb %0, %1" : : "a"(c), "Nd"((uint16_t)0x3f8)); }

static void say(const char *text) {
    while (*text) put(*text++);
}

static void say_hex(uint64_t number) {
    for (int shift = 60; shift >= 0; shift -= 4) put("0123456789abcdef"[number >> shift & 15]);
}

static uint64_t mix(uint64_t x) {
    x ^= x >> 31;
    x *= 0x7fb5d329728ea185;
    x ^= x >> 27;
    x *= 0x81dadef4bc2dd44d;
    return x ^ x >> 33;
}

#include "net.h"

static uint64_t option(const char *line, const char *name, uint64_t otherwise) {
    for (; *line; line++) {
        const char *at = line, *of = name;
        while (*of && *at == *of) at++, of++;
        if (*of || *at != '=') continue;
        uint64_t number = 0;
        for (at++; *at >= '0' && *at <= '9'; at++) number = number * 10 + (uint64_t)(*at - '0');
        return number;
    }
    return otherwise;
}

static uint64_t word(uint64_t step, uint64_t page, uint64_t at) {
    return step == 0 ? 0 : at == 0 ? step : mix(step * 0x9e3779b97f4a7c15 + page * WORDS + at);
}

static int is_as_written(const volatile uint64_t *words, uint64_t page) {
    for (uint64_t at = STRIDE; at < WORDS; at += STRIDE)
        if (words[at] != word(words[0], page, at)) return 0;
    return 1;
}

#define BLOCKS_MAX 4096
// For each block, the step in which it was written.
static uint64_t written[BLOCKS_MAX];
static uint64_t block[WORDS] __attribute__((aligned(4096)));

// Checks the block NUMBER and writes it anew. Returns 1 if it was as it should be.
static int visit_block(uint64_t number, uint64_t step) {
    if (!drive_read(number, block)) return 0;
    if (written[number])
        for (uint64_t at = 0; at < WORDS; at++)
            if (block[at] != word(written[number], number, at)) return 0;
    for (uint64_t at = 0; at < WORDS; at++) block[at] = word(step, number, at);
    written[number] = step;
    return drive_write(number, block);
}

void run(const uint8_t *boot) {
    const char *line = (const char *)(uint64_t) * (const uint32_t *)(boot + COMMAND_LINE);
    uint64_t pages = option(line, "kf.pages", 2048), pause = option(line, "kf.pause", 0);
    uint64_t blocks = option(line, "kf.blocks", 0), there = blocks ? drive_open() : 0;
    if (blocks > there || blocks > BLOCKS_MAX) {
        say("kf ERROR the drive is smaller than kf.blocks, or there is none\n");
        return;
    }
    uint64_t fill = option(line, "kf.fill", 0), idle = option(line, "kf.idle", 0);
    uint64_t step = 0, chain = 0x4b65796672616d65;
    for (uint64_t page = pages; page < pages + fill; page++) ((volatile uint64_t *)TABLE)[page * WORDS] = mix(page);
    net_begin();
    for (uint64_t number = 1;; number++) {
        for (int i = 0; i < STEPS; i++) {
            step++;
            uint64_t page = mix(chain + step) % pages;
            volatile uint64_t *words = TABLE + page * WORDS;
            if (words[0] >= step || !is_as_written(words, page)) {
                say("kf ERROR page ");
                say_hex(page);
                put('\n');
                return;
            }
            chain = mix(chain ^ words[LAST] ^ step);
            for (uint64_t at = 0; at < WORDS; at += STRIDE) words[at] = word(step, page, at);
            const char *damage = net_poll();
            if (damage) {
                say("kf ERROR net ");
                say(damage);
                put('\n');
                return;
            }
        }
        if (blocks && !visit_block(chain % blocks, step)) {
            say("kf ERROR block ");
            say_hex(chain % blocks);
            put('\n');
            return;
        }
        say("kf ");
        say_hex(number);
        put(' ');
        say_hex(chain);
        put('\n');
        if (idle) return;
        net_tell();
        for (volatile uint64_t turn = 0; turn < pause; turn++) {}
    }
}
