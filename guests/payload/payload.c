/* A guest that needs no kernel: checks a pattern in its RAM, writes the next one, prints a line, for ever.
 *
 *   reset -> entry.S -> payload(): READY -> pass 1 -> wait for both timers -> pass 2 -> ...
 *                                             |                      |
 *                                             v a word is wrong      v 'r' came in
 *                                         KF ERROR, halt           reset
 *
 * It is for accelerators on which Linux would take hours: a pass is some 10^5 instructions. Each pass takes the next `dirty`
 * of `pages` pages round and round, checks in each the 16 words that the last visit wrote, and writes those of this one:
 *
 *   page i of the working set, 256 bytes a column; words of one visit differ, so a page made of two visits is found
 *   | w0 ... | w1 ... | ... | w15 ... |
 *
 * README.md defines words and sums for readers of other languages. Between passes it waits for an interrupt of the
 * PIT and one of the local APIC's timer: a restore that loses either stands still. The registers that no compiled code uses
 * (vector, x87, debug, model-specific) are checked and set in each pass too, and the time-stamp counter must not fall.
 *
 * Left out: more than one processor.
 */
#include <stdint.h>

#define GOLDEN 0x9E3779B97F4A7C15ull
#define START 0x4B65796672616D65ull /* "Keyframe" */
#define WORKING_SET 0x100000ull
#define PAGE_BYTES 4096
#define COLUMNS 16
#define COLUMN_WORDS (PAGE_BYTES / COLUMNS / 8)
#define PAGES_MAX 4096
#define TICKS_HZ 20

#define COM1 0x3f8
#define PIT_HZ 1193182
#define PIT_VECTOR 0x20
#define APIC_VECTOR 0x30
#define SPURIOUS_VECTOR 0xff
#define APIC 0xfee00000ull
/* What the local APIC's timer counts down in a second, in QEMU and in KVM, before it is divided. */
#define APIC_HZ 1000000000u

struct frame;

static volatile uint32_t pit_ticks, apic_ticks;
static uint32_t generations[PAGES_MAX];

static inline void outb(uint16_t port, uint8_t value) { __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port)); }
static inline void outw(uint16_t port, uint16_t value) { __asm__ volatile("outw %0, %1" : : "a"(value), "Nd"(port)); }

static inline uint8_t inb(uint16_t port)
{
    uint8_t value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static inline void apic(uint32_t reg, uint32_t value) { *(volatile uint32_t *)(APIC + reg) = value; }

static uint64_t read_register(uint32_t number)
{
    uint32_t low, high;
    __asm__ volatile("rdmsr" : "=a"(low), "=d"(high) : "c"(number));
    return (uint64_t)high << 32 | low;
}

static void write_register(uint32_t number, uint64_t value)
{
    __asm__ volatile("wrmsr" : : "c"(number), "a"((uint32_t)value), "d"((uint32_t)(value >> 32)));
}

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* ---- console ---- */

static void put(char c)
{
    while (!(inb(COM1 + 5) & 0x20))
        ;
    outb(COM1, (uint8_t)c);
}

static void puts(const char *text)
{
    while (*text)
        put(*text++);
}

static void put_number(uint64_t value)
{
    char digits[20];
    int n = 0;
    do
        digits[n++] = (char)('0' + value % 10);
    while (value /= 10);
    while (n)
        put(digits[--n]);
}

static void put_hex(uint64_t value)
{
    for (int shift = 60; shift >= 0; shift -= 4)
        put("0123456789abcdef"[value >> shift & 15]);
}

__attribute__((noreturn)) static void halt(void)
{
    for (;;)
        __asm__ volatile("cli; hlt");
}

/* ---- parameters: -fw_cfg name=opt/keyframe/NAME,string=VALUE ---- */

#define FW_SELECT 0x510
#define FW_DATA 0x511
#define FW_SIGNATURE 0x00
#define FW_DIRECTORY 0x19

static uint32_t fw_number(int bytes)
{
    uint32_t value = 0;
    while (bytes--)
        value = value << 8 | inb(FW_DATA);
    return value;
}

/* Reads parameter `name` as text into `value`; leaves an empty text where there is none. */
static void parameter(const char *name, char *value, uint32_t size)
{
    uint32_t found = 0, len = 0;
    value[0] = 0;
    outw(FW_SELECT, FW_SIGNATURE);
    if (fw_number(4) != 0x51454d55) /* "QEMU" */
        return;
    outw(FW_SELECT, FW_DIRECTORY);
    for (uint32_t count = fw_number(4); count; count--) {
        uint32_t bytes = fw_number(4), key = fw_number(2);
        const char *wanted = name;
        int same = 1;
        fw_number(2);
        for (int i = 0; i < 56; i++) {
            char c = (char)inb(FW_DATA);
            if (same && c != *wanted)
                same = 0;
            if (same && *wanted)
                wanted++;
        }
        if (same)
            found = key, len = bytes;
    }
    if (!found)
        return;
    outw(FW_SELECT, (uint16_t)found);
    if (len > size - 1)
        len = size - 1;
    for (uint32_t i = 0; i < len; i++)
        value[i] = (char)inb(FW_DATA);
    value[len] = 0;
}

static uint32_t parameter_number(const char *name, uint32_t otherwise, uint32_t max)
{
    char text[16];
    uint32_t value = 0;
    parameter(name, text, sizeof text);
    for (const char *c = text; *c >= '0' && *c <= '9' && value < 1000000; c++)
        value = value * 10 + (uint32_t)(*c - '0');
    return value == 0 ? otherwise : value > max ? max : value;
}

/* `opt/keyframe/msr`, as `4b564d01=8001`: a model-specific register that is set at boot, both in hexadecimal. */
static void set_asked_register(void)
{
    char text[40];
    uint64_t numbers[2] = { 0, 0 };
    int which = 0;
    parameter("opt/keyframe/msr", text, sizeof text);
    if (!text[0])
        return;
    for (const char *c = text; *c; c++) {
        if (*c == '=')
            which = 1;
        else
            numbers[which] = numbers[which] << 4 | (uint64_t)(*c <= '9' ? *c - '0' : (*c | 32) - 'a' + 10);
    }
    write_register((uint32_t)numbers[0], numbers[1]);
}

/* ---- interrupts ---- */

struct gate {
    uint16_t low, selector, flags, middle;
    uint32_t high, zero;
};

static struct gate idt[256];

__attribute__((interrupt)) static void on_pit(struct frame *frame)
{
    (void)frame;
    pit_ticks++;
    outb(0x20, 0x20);
}

__attribute__((interrupt)) static void on_apic(struct frame *frame)
{
    (void)frame;
    apic_ticks++;
    apic(0xb0, 0);
}

__attribute__((interrupt)) static void on_spurious(struct frame *frame) { (void)frame; }

/* Never returns, so it does not matter whether the processor pushed an error code. */
__attribute__((interrupt)) static void on_exception(struct frame *frame)
{
    (void)frame;
    puts("KF ERROR payload: an exception of the processor\n");
    halt();
}

static void gate(int vector, void (*handler)(struct frame *))
{
    uint64_t at = (uint64_t)handler;
    idt[vector] = (struct gate){ (uint16_t)at, 24, 0x8e00, (uint16_t)(at >> 16), (uint32_t)(at >> 32), 0 };
}

static void load_idt(const void *base, uint16_t bytes)
{
    struct {
        uint16_t limit;
        uint64_t base;
    } __attribute__((packed)) table = { (uint16_t)(bytes - 1), (uint64_t)base };
    __asm__ volatile("lidt %0" : : "m"(table));
}

static void start_timers(void)
{
    for (int vector = 0; vector < 32; vector++)
        gate(vector, on_exception);
    gate(PIT_VECTOR, on_pit);
    gate(APIC_VECTOR, on_apic);
    gate(SPURIOUS_VECTOR, on_spurious);
    load_idt(idt, sizeof idt);
    /* Both interrupt controllers: vectors from 0x20 and 0x28, all lines masked but the PIT's. */
    const uint8_t words[][2] = { { 0x20, 0x11 }, { 0xa0, 0x11 }, { 0x21, PIT_VECTOR }, { 0xa1, 0x28 }, { 0x21, 4 },
                                 { 0xa1, 2 },    { 0x21, 1 },    { 0xa1, 1 },          { 0x21, 0xfe }, { 0xa1, 0xff } };
    for (unsigned i = 0; i < sizeof words / sizeof *words; i++)
        outb(words[i][0], words[i][1]);
    outb(0x43, 0x34); /* channel 0, low byte then high byte, mode 2 */
    outb(0x40, (uint8_t)(PIT_HZ / TICKS_HZ));
    outb(0x40, PIT_HZ / TICKS_HZ >> 8);
    apic(0xf0, 0x100 | SPURIOUS_VECTOR); /* on */
    apic(0x350, 0x700);                  /* LINT0: the PIT's interrupt comes through here (ExtINT) */
    apic(0x3e0, 0x3);                    /* divided by 16 */
    apic(0x320, 0x20000 | APIC_VECTOR);  /* periodic */
    apic(0x380, APIC_HZ / 16 / TICKS_HZ);
}

static void wait_for_ticks(void)
{
    uint32_t pit = pit_ticks, local = apic_ticks;
    /* An interrupt between the look and the halt must not be slept through: sti takes effect behind the hlt. */
    while (pit_ticks == pit || apic_ticks == local)
        __asm__ volatile("sti; hlt; cli" : : : "memory");
}

/* ---- registers ---- */

/* Model-specific registers that hold addresses of code and data: any canonical value is legal, none is used. */
static const uint32_t address_registers[] = {
    0xc0000082, /* LSTAR */
    0xc0000083, /* CSTAR */
    0xc0000100, /* FS base */
    0xc0000101, /* GS base */
    0xc0000102, /* kernel GS base */
    0x175,      /* SYSENTER ESP */
    0x176,      /* SYSENTER EIP */
};

static uint64_t last_counter;

__attribute__((noreturn)) static void wrong_register(const char *name, uint32_t number, uint64_t found, uint64_t expected)
{
    puts("KF ERROR payload: register ");
    puts(name);
    puts(" ");
    put_hex(number);
    puts(": ");
    put_hex(found);
    puts(" instead of ");
    put_hex(expected);
    puts("\n");
    halt();
}

/* As fxsave writes it. */
struct floating {
    uint16_t control, status, tags, opcode;
    uint64_t ip, dp;
    uint32_t mxcsr, mxcsr_mask;
    struct {
        uint64_t mantissa, exponent;
    } st[8];
    uint64_t xmm[16][2], rest[12];
} __attribute__((aligned(16)));

static struct floating floating;

/* Exception flags that an instruction has raised: an emulator may keep them elsewhere than those that fxrstor has loaded. A
 * KVM that emulates may not know the instructions, so they are used under TCG only. */
#define SSE_INVALID 0x01
#define SSE_DENORMAL 0x02
#define X87_FLAGS 0x3f
#define X87_INVALID 0x01

/* Whether the last pass has raised them. */
static int raised;

/* A checkpoint may go on under another accelerator, so each pass asks. */
static int is_under_tcg(void)
{
    uint32_t leaf = 0x40000000, name[3];
    __asm__ volatile("cpuid" : "+a"(leaf), "=b"(name[0]), "=c"(name[1]), "=d"(name[2]));
    return name[0] == 0x54474354; /* "TCGT" */
}

/* Raises "invalid" of SSE and of x87, and changes no other register. */
static void raise_flags(void)
{
    static const uint32_t quiet_nan = 0x7fc00000;
    raised = is_under_tcg();
    if (!raised)
        return;
    __asm__ volatile("comiss %0, %%xmm0" : : "m"(quiet_nan) : "cc");
    __asm__ volatile("fcoms %0" : : "m"(quiet_nan));
}

/* Registers as pass `pass` left them. */
static void check_registers(uint64_t pass)
{
    uint64_t value = mix(pass), found;
    uint32_t low, high;
    for (unsigned i = 0; i < sizeof address_registers / sizeof *address_registers; i++) {
        uint64_t is = read_register(address_registers[i]), expected = (value + i) >> 20;
        if (is != expected)
            wrong_register("msr", address_registers[i], is, expected);
    }
    __asm__ volatile("fxsave %0" : "=m"(floating));
    for (unsigned i = 0; i < 16; i++)
        if (floating.xmm[i][0] != value + i || floating.xmm[i][1] != value - i)
            wrong_register("xmm", i, floating.xmm[i][0], value + i);
    for (unsigned i = 0; i < 8; i++)
        if (floating.st[i].mantissa != ((value + i) | 1ull << 63))
            wrong_register("st", i, floating.st[i].mantissa, (value + i) | 1ull << 63);
    low = 0x1fa0 | (raised ? SSE_INVALID : 0);
    if (floating.control != 0x27f || (floating.mxcsr & ~SSE_DENORMAL) != low)
        wrong_register("fcw and mxcsr", 0, (uint64_t)floating.control << 32 | floating.mxcsr, 0x27f00000000 | low);
    low = raised ? X87_INVALID : 0;
    if ((floating.status & X87_FLAGS) != low)
        wrong_register("fsw", 0, floating.status & X87_FLAGS, low);
    __asm__ volatile("mov %%dr2, %0" : "=r"(found));
    if (found != (value >> 20 & ~7ull))
        wrong_register("dr", 2, found, value >> 20 & ~7ull);
    __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
    if (((uint64_t)high << 32 | low) < last_counter)
        wrong_register("tsc", 0, (uint64_t)high << 32 | low, last_counter);
    last_counter = (uint64_t)high << 32 | low;
}

/* Sets them for pass `pass`. */
static void set_registers(uint64_t pass)
{
    uint64_t value = mix(pass);
    for (unsigned i = 0; i < sizeof address_registers / sizeof *address_registers; i++)
        write_register(address_registers[i], (value + i) >> 20);
    /* All eight x87 registers in use (the short form of the tags), each a normal number. */
    floating = (struct floating){ .control = 0x27f, .tags = 0xff, .mxcsr = 0x1fa0 };
    for (unsigned i = 0; i < 16; i++) {
        floating.xmm[i][0] = value + i;
        floating.xmm[i][1] = value - i;
    }
    for (unsigned i = 0; i < 8; i++) {
        floating.st[i].mantissa = (value + i) | 1ull << 63;
        floating.st[i].exponent = 0x3fff;
    }
    __asm__ volatile("fxrstor %0" : : "m"(floating));
    raise_flags();
    __asm__ volatile("mov %0, %%dr2" : : "r"(value >> 20 & ~7ull));
}

/* ---- the passes ---- */

/* What the first word of page `page` holds from its visit number `generation`; the k-th holds k * GOLDEN more. */
static uint64_t first_word(uint32_t page, uint32_t generation)
{
    return mix(GOLDEN * (page + 1) ^ (uint64_t)generation << 32);
}

__attribute__((noreturn)) static void wrong(uint64_t pass, uint32_t page, int column, uint64_t found, uint64_t expected)
{
    puts("KF ERROR payload: pass ");
    put_number(pass);
    puts(" page ");
    put_number(page);
    puts(" word ");
    put_number((uint64_t)column);
    puts(": ");
    put_hex(found);
    puts(" instead of ");
    put_hex(expected);
    puts("\n");
    halt();
}

/* Checks and writes one page; returns the first word that it found. */
static uint64_t visit(uint64_t pass, uint32_t page)
{
    volatile uint64_t *word = (volatile uint64_t *)(WORKING_SET + (uint64_t)page * PAGE_BYTES);
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

/* By the keyboard controller; where there is none (microvm), by a page fault that no handler can take. The fault waits, for
 * a reset that is asked for again while the first one is done comes as a second one. */
static void reset_machine(void)
{
    outb(0x64, 0xfe);
    for (uint32_t i = 0; i < 200000; i++)
        inb(0x64);
    load_idt(idt, 1);
    *(volatile uint64_t *)(1ull << 40) = 0;
}

__attribute__((noreturn)) void payload(void)
{
    uint32_t pages = parameter_number("opt/keyframe/pages", 1024, PAGES_MAX);
    uint32_t dirty = parameter_number("opt/keyframe/dirty", pages, pages);
    uint32_t page = 0;
    uint64_t sum = START;
    set_asked_register();
    start_timers();
    for (uint32_t i = 0; i < pages; i++)
        for (int column = 0; column < COLUMNS; column++)
            ((volatile uint64_t *)(WORKING_SET + (uint64_t)i * PAGE_BYTES))[column * COLUMN_WORDS] =
                first_word(i, 0) + (uint64_t)column * GOLDEN;
    puts("KF READY payload pages=");
    put_number(pages);
    puts(" dirty=");
    put_number(dirty);
    puts("\n");
    set_registers(0);
    for (uint64_t pass = 1;; pass++) {
        check_registers(pass - 1);
        set_registers(pass);
        for (uint32_t i = 0; i < dirty; i++) {
            sum = mix(sum + visit(pass, page));
            page = page + 1 == pages ? 0 : page + 1;
        }
        puts("pass ");
        put_number(pass);
        puts(" ok sum=");
        put_hex(sum);
        puts("\n");
        if (inb(COM1 + 5) & 1 && inb(COM1) == 'r')
            reset_machine();
        wait_for_ticks();
    }
}
