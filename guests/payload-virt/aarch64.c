/* The board `virt` of qemu-system-aarch64, with an interrupt controller of version 2 (gic-version=2, the default).
 *
 *   0x08000000 distributor   0x08010000 processor's interface   0x09000000 PL011   0x40000000 RAM
 *
 * The interrupts are those of the virtual and of the physical timer.
 */
#include "board.h"

const uint64_t board_working_set = 0x40200000;

#define DISTRIBUTOR 0x08000000ull
#define INTERFACE 0x08010000ull
#define UART 0x09000000ull
#define VIRTUAL_TIMER 27
#define PHYSICAL_TIMER 30

static volatile uint32_t virtual_ticks, physical_ticks;

static inline void write32(uint64_t at, uint32_t value) { *(volatile uint32_t *)at = value; }
static inline uint32_t read32(uint64_t at) { return *(volatile uint32_t *)at; }

#define READ(name) ({ uint64_t v_; __asm__ volatile("mrs %0, " #name : "=r"(v_)); v_; })
#define WRITE(name, value) ({ uint64_t v_ = (value); __asm__ volatile("msr " #name ", %0" : : "r"(v_)); })

void board_put(char c)
{
    while (read32(UART + 0x18) & 0x20)
        ;
    write32(UART, (uint8_t)c);
}

int board_get(void) { return read32(UART + 0x18) & 0x10 ? -1 : (int)(read32(UART) & 0xff); }

void on_exception(void) { fail("an exception of the processor"); }

void on_interrupt(void)
{
    uint32_t number = read32(INTERFACE + 0xc);
    uint64_t ticks = READ(cntfrq_el0) / TICKS_HZ;
    if (number == VIRTUAL_TIMER) {
        WRITE(cntv_tval_el0, ticks);
        virtual_ticks++;
    } else if (number == PHYSICAL_TIMER) {
        WRITE(cntp_tval_el0, ticks);
        physical_ticks++;
    }
    if (number < 1020)
        write32(INTERFACE + 0x10, number);
}

void board_start_interrupts(void)
{
    write32(DISTRIBUTOR, 1);
    write32(DISTRIBUTOR + 0x100, 1u << VIRTUAL_TIMER | 1u << PHYSICAL_TIMER);
    write32(INTERFACE + 4, 0xff);
    write32(INTERFACE, 1);
    /* PL011: receiver and transmitter on. */
    write32(UART + 0x30, 0x301);
    WRITE(cntv_tval_el0, READ(cntfrq_el0) / TICKS_HZ);
    WRITE(cntp_tval_el0, READ(cntfrq_el0) / TICKS_HZ);
    WRITE(cntv_ctl_el0, 1);
    WRITE(cntp_ctl_el0, 1);
}

void board_wait_for_interrupts(void)
{
    uint32_t of_virtual = virtual_ticks, of_physical = physical_ticks;
    /* The processor wakes for a pending interrupt that is masked, so none is slept through. */
    while (virtual_ticks == of_virtual || physical_ticks == of_physical)
        __asm__ volatile("wfi; msr daifclr, #2; isb; msr daifset, #2" : : : "memory");
}

/* Registers that hold what is written, and that nothing uses. */
#define FOR_EACH_REGISTER(use)                                                                                             \
    use(0, tpidr_el0) use(1, tpidrro_el0) use(2, tpidr_el1) use(3, sp_el0) use(4, ttbr0_el1) use(5, ttbr1_el1)             \
    use(6, mair_el1) use(7, far_el1) use(8, dbgbvr0_el1) use(9, par_el1)

/* Bits that all of these registers keep. */
#define KEPT 0x00007ffffffffff0ull
#define INVALID 1ull
#define FLUSH_TO_ZERO (1ull << 24)

struct floating {
    uint64_t vector[32][2];
} __attribute__((aligned(16)));

static struct floating floating;
static uint64_t last_counter;

#define VECTORS(op)                                                                                                        \
    op " q0, q1, [%0]; " op " q2, q3, [%0, #32]; " op " q4, q5, [%0, #64]; " op " q6, q7, [%0, #96]; "                     \
    op " q8, q9, [%0, #128]; " op " q10, q11, [%0, #160]; " op " q12, q13, [%0, #192]; " op " q14, q15, [%0, #224]; "      \
    op " q16, q17, [%0, #256]; " op " q18, q19, [%0, #288]; " op " q20, q21, [%0, #320]; " op " q22, q23, [%0, #352]; "    \
    op " q24, q25, [%0, #384]; " op " q26, q27, [%0, #416]; " op " q28, q29, [%0, #448]; " op " q30, q31, [%0, #480]"

void board_set_registers(uint64_t value)
{
#define SET(n, name) WRITE(name, (value + (n << 4)) & KEPT);
    FOR_EACH_REGISTER(SET)
    /* An instruction raises "invalid": QEMU may keep what instructions raise elsewhere than what msr has written. */
    WRITE(fpcr, FLUSH_TO_ZERO);
    WRITE(fpsr, 0);
    __asm__ volatile("fmov d0, xzr; fdiv d0, d0, d0");
    for (unsigned i = 0; i < 32; i++) {
        floating.vector[i][0] = value + i;
        floating.vector[i][1] = value - i;
    }
    __asm__ volatile(VECTORS("ldp") : : "r"(&floating), "m"(floating));
}

void board_check_registers(uint64_t value)
{
#define CHECK(n, name)                                                                                                     \
    if (READ(name) != ((value + (n << 4)) & KEPT))                                                                         \
        wrong_register(#name, n, READ(name), (value + (n << 4)) & KEPT);
    FOR_EACH_REGISTER(CHECK)
    if (READ(fpcr) != FLUSH_TO_ZERO)
        wrong_register("fpcr", 0, READ(fpcr), FLUSH_TO_ZERO);
    if (READ(fpsr) != INVALID)
        wrong_register("fpsr", 0, READ(fpsr), INVALID);
    __asm__ volatile(VECTORS("stp") : : "r"(&floating) : "memory");
    for (unsigned i = 0; i < 32; i++)
        if (floating.vector[i][0] != value + i || floating.vector[i][1] != value - i)
            wrong_register("v", i, floating.vector[i][0], value + i);
    uint64_t counter = READ(cntvct_el0);
    if (counter < last_counter)
        wrong_register("cntvct", 0, counter, last_counter);
    last_counter = counter;
}

void board_reset(void)
{
    /* PSCI's SYSTEM_RESET. */
    register uint64_t function __asm__("x0") = 0x84000009;
    __asm__ volatile("hvc #0" : "+r"(function) : : "memory");
}
