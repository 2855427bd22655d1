/* What payload.c needs of a board: QEMU's `virt` of one processor. aarch64.c and riscv64.c implement it. */
#ifndef BOARD_H
#define BOARD_H

#include <stdint.h>

#define TICKS_HZ 20

/* The first byte of the working set. The page before it has the parameters. */
extern const uint64_t board_working_set;

/* The console. `board_get` returns -1 if no character has come. */
void board_put(char c);
int board_get(void);

/* Interrupts: both sources of interrupts begin, and the next of each is waited for. */
void board_start_interrupts(void);
void board_wait_for_interrupts(void);

/* Registers that no compiled code uses, made of `value`. `board_check_registers` reports those that differ. */
void board_set_registers(uint64_t value);
void board_check_registers(uint64_t value);

/* Resets the machine. */
void board_reset(void);

/* Of payload.c: ends the guest, with a message. */
__attribute__((noreturn)) void wrong_register(const char *name, uint64_t number, uint64_t found, uint64_t expected);
__attribute__((noreturn)) void fail(const char *problem);

#endif
