/* The board `virt` of qemu-system-riscv64, whose firmware (-bios) the payload is.
 *
 *   0x00100000 test device   0x02000000 CLINT   0x0c000000 PLIC   0x10000000 16550   0x80000000 RAM
 *
 * The interrupts are those of the timer and, through the PLIC, of the console's empty transmitter.
 */
#include "board.h"

const uint64_t board_working_set = 0x80200000;

#define TEST_DEVICE 0x00100000ull
#define TIME_COMPARE 0x02004000ull
#define TIME 0x0200bff8ull
#define PLIC 0x0c000000ull
#define UART 0x10000000ull
#define UART_INTERRUPT 10
#define TIMER_HZ 10000000

static volatile uint32_t timer_ticks, uart_ticks;

static inline void write8(uint64_t at, uint8_t value) { *(volatile uint8_t *)at = value; }
static inline uint8_t read8(uint64_t at) { return *(volatile uint8_t *)at; }
static inline void write32(uint64_t at, uint32_t value) { *(volatile uint32_t *)at = value; }
static inline uint32_t read32(uint64_t at) { return *(volatile uint32_t *)at; }
static inline void write64(uint64_t at, uint64_t value) { *(volatile uint64_t *)at = value; }
static inline uint64_t read64(uint64_t at) { return *(volatile uint64_t *)at; }

#define READ(name) ({ uint64_t v_; __asm__ volatile("csrr %0, " #name : "=r"(v_)); v_; })
#define WRITE(name, value) ({ uint64_t v_ = (value); __asm__ volatile("csrw " #name ", %0" : : "r"(v_)); })

void board_put(char c)
{
    while (!(read8(UART + 5) & 0x20))
        ;
    write8(UART, (uint8_t)c);
}

int board_get(void) { return read8(UART + 5) & 1 ? read8(UART) : -1; }

void on_trap(uint64_t cause)
{
    if (cause == (1ull << 63 | 7)) {
        write64(TIME_COMPARE, read64(TIME) + TIMER_HZ / TICKS_HZ);
        timer_ticks++;
        /* The transmitter is empty, so it interrupts at once. */
        write8(UART + 1, 2);
    } else if (cause == (1ull << 63 | 11)) {
        uint32_t number = read32(PLIC + 0x200004);
        write8(UART + 1, 0);
        if (number == UART_INTERRUPT)
            uart_ticks++;
        if (number)
            write32(PLIC + 0x200004, number);
    } else {
        fail("an exception of the processor");
    }
}

void board_start_interrupts(void)
{
    write32(PLIC + 4 * UART_INTERRUPT, 1);
    write32(PLIC + 0x2000, 1u << UART_INTERRUPT);
    write32(PLIC + 0x200000, 0);
    write64(TIME_COMPARE, read64(TIME) + TIMER_HZ / TICKS_HZ);
    WRITE(mie, 1 << 7 | 1 << 11);
}

void board_wait_for_interrupts(void)
{
    uint32_t timer = timer_ticks, uart = uart_ticks;
    /* The processor wakes for a pending interrupt that is masked, so none is slept through. */
    while (timer_ticks == timer || uart_ticks == uart)
        __asm__ volatile("wfi; csrsi mstatus, 8; nop; csrci mstatus, 8" : : : "memory");
}

/* Registers that hold what is written, and that nothing uses in machine mode. */
#define FOR_EACH_REGISTER(use)                                                                                             \
    use(0, mscratch) use(1, sscratch) use(2, stvec) use(3, sepc) use(4, stval) use(5, scause)

/* Bits that all of these registers keep. */
#define KEPT 0x00007ffffffffff0ull
/* Rounding towards zero. */
#define ROUNDING (1ull << 5)
#define ROUNDING_MASK 0xe0ull

static uint64_t floating[32];
static uint64_t last_counter;

#define EACH_OF_8(op, a, b, c, d, e, f, g, h)                                                                              \
    op " f" #a ", 8*" #a "(%0); " op " f" #b ", 8*" #b "(%0); " op " f" #c ", 8*" #c "(%0); " op " f" #d ", 8*" #d "(%0); " \
    op " f" #e ", 8*" #e "(%0); " op " f" #f ", 8*" #f "(%0); " op " f" #g ", 8*" #g "(%0); " op " f" #h ", 8*" #h "(%0); "
#define FLOATING(op)                                                                                                       \
    EACH_OF_8(op, 0, 1, 2, 3, 4, 5, 6, 7)                                                                                  \
    EACH_OF_8(op, 8, 9, 10, 11, 12, 13, 14, 15)                                                                            \
    EACH_OF_8(op, 16, 17, 18, 19, 20, 21, 22, 23)                                                                          \
    EACH_OF_8(op, 24, 25, 26, 27, 28, 29, 30, 31)

void board_set_registers(uint64_t value)
{
#define SET(n, name) WRITE(name, (value + (n << 4)) & KEPT);
    FOR_EACH_REGISTER(SET)
    /* An instruction raises "invalid", which is no harm. */
    WRITE(fcsr, ROUNDING);
    __asm__ volatile("fmv.d.x f0, zero; fdiv.d f0, f0, f0");
    for (unsigned i = 0; i < 32; i++)
        floating[i] = value + i;
    __asm__ volatile(FLOATING("fld") : : "r"(floating), "m"(floating));
}

void board_check_registers(uint64_t value)
{
#define CHECK(n, name)                                                                                                     \
    if (READ(name) != ((value + (n << 4)) & KEPT))                                                                         \
        wrong_register(#name, n, READ(name), (value + (n << 4)) & KEPT);
    FOR_EACH_REGISTER(CHECK)
    /* QEMU does not save the flags that instructions have raised. */
    if ((READ(fcsr) & ROUNDING_MASK) != ROUNDING)
        wrong_register("fcsr", 0, READ(fcsr), ROUNDING);
    __asm__ volatile(FLOATING("fsd") : : "r"(floating) : "memory");
    for (unsigned i = 0; i < 32; i++)
        if (floating[i] != value + i)
            wrong_register("f", i, floating[i], value + i);
    uint64_t counter = read64(TIME);
    if (counter < last_counter)
        wrong_register("time", 0, counter, last_counter);
    last_counter = counter;
}

void board_reset(void) { write32(TEST_DEVICE, 0x7777); }
