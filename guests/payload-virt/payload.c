/* A guest that needs no kernel, for QEMU's machine `virt` of other processors than x86: checks a pattern in its RAM, writes
 * the next one, prints a line, for ever. Pattern, sums and lines are those of guests/payload (its README.md defines them).
 *
 *   reset -> entry -> payload(): READY -> pass 1 -> wait for both interrupts -> pass 2 -> ...
 *                                          |                        |
 *                                          v a word is wrong        v 'r' came in
 *                                      KF ERROR, halt             reset
 *
 * Left out: more than one processor, and paging.
 */
#include "board.h"

#define GOLDEN 0x9E3779B97F4A7C15ull
#define START 0x4B65796672616D65ull /* "Keyframe" */
#define PAGE_BYTES 4096
#define COLUMNS 16
#define COLUMN_WORDS (PAGE_BYTES / COLUMNS / 8)
#define PAGES_MAX 4096

static uint32_t generations[PAGES_MAX];

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* ---- console ---- */

static void puts(const char *text)
{
    while (*text)
        board_put(*text++);
}

static void put_number(uint64_t value)
{
    char digits[20];
    int n = 0;
    do
        digits[n++] = (char)('0' + value % 10);
    while (value /= 10);
    while (n)
        board_put(digits[--n]);
}

static void put_hex(uint64_t value)
{
    for (int shift = 60; shift >= 0; shift -= 4)
        board_put("0123456789abcdef"[value >> shift & 15]);
}

__attribute__((noreturn)) static void halt(void)
{
    for (;;)
        __asm__ volatile("wfi");
}

void fail(const char *problem)
{
    puts("KF ERROR payload: ");
    puts(problem);
    puts("\n");
    halt();
}

static void put_difference(uint64_t found, uint64_t expected)
{
    puts(": ");
    put_hex(found);
    puts(" instead of ");
    put_hex(expected);
    puts("\n");
}

void wrong_register(const char *name, uint64_t number, uint64_t found, uint64_t expected)
{
    puts("KF ERROR payload: register ");
    puts(name);
    puts(" ");
    put_number(number);
    put_difference(found, expected);
    halt();
}

/* ---- parameters, which `-device loader` writes before the working set: the numbers of pages and of dirty pages ---- */

static uint32_t parameter(uint32_t index, uint32_t otherwise, uint32_t max)
{
    uint32_t value = ((volatile uint32_t *)(board_working_set - PAGE_BYTES))[index];
    return value == 0 ? otherwise : value > max ? max : value;
}

/* ---- the passes ---- */

/* What the first word of page `page` holds from its visit number `generation`; the k-th holds k * GOLDEN more. */
static uint64_t first_word(uint32_t page, uint32_t generation)
{
    return mix(GOLDEN * (page + 1) ^ (uint64_t)generation << 32);
}

static volatile uint64_t *page_words(uint32_t page)
{
    return (volatile uint64_t *)(board_working_set + (uint64_t)page * PAGE_BYTES);
}

__attribute__((noreturn)) static void wrong(uint64_t pass, uint32_t page, int column, uint64_t found, uint64_t expected)
{
    puts("KF ERROR payload: pass ");
    put_number(pass);
    puts(" page ");
    put_number(page);
    puts(" word ");
    put_number((uint64_t)column);
    put_difference(found, expected);
    halt();
}

/* Checks and writes one page; returns the first word that it found. A function of its own, so that a debugger can stop at
 * each of its calls. */
__attribute__((noinline)) static uint64_t visit(uint64_t pass, uint32_t page)
{
    volatile uint64_t *word = page_words(page);
    uint32_t generation = generations[page]++;
    uint64_t expected = first_word(page, generation), next = first_word(page, generation + 1), first = expected;
    for (int column = 0; column < COLUMNS; column++) {
        if (*word != expected)
            wrong(pass, page, column, *word, expected);
        *word = next;
        word += COLUMN_WORDS;
        expected += GOLDEN;
        next += GOLDEN;
    }
    return first;
}

__attribute__((noreturn)) void payload(void)
{
    uint32_t pages = parameter(0, 1024, PAGES_MAX);
    uint32_t dirty = parameter(1, pages, pages);
    uint32_t page = 0;
    uint64_t sum = START;
    board_start_interrupts();
    for (uint32_t i = 0; i < pages; i++)
        for (int column = 0; column < COLUMNS; column++)
            page_words(i)[column * COLUMN_WORDS] = first_word(i, 0) + (uint64_t)column * GOLDEN;
    puts("KF READY payload pages=");
    put_number(pages);
    puts(" dirty=");
    put_number(dirty);
    puts("\n");
    board_set_registers(mix(0));
    for (uint64_t pass = 1;; pass++) {
        board_check_registers(mix(pass - 1));
        board_set_registers(mix(pass));
        for (uint32_t i = 0; i < dirty; i++) {
            sum = mix(sum + visit(pass, page));
            page = page + 1 == pages ? 0 : page + 1;
        }
        puts("pass ");
        put_number(pass);
        puts(" ok sum=");
        put_hex(sum);
        puts("\n");
        if (board_get() == 'r')
            board_reset();
        board_wait_for_interrupts();
    }
}
