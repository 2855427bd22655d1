# The entry in 64-bit mode, as Firecracker starts a kernel: RSI points to the boot parameters, and
# the first GiB is mapped one to one.
.code64
.section .text.entry, "ax"
.globl _start
_start:
    cli
    lea stack_top(%rip), %rsp
    mov %rsi, %rdi
    call run
1:  hlt
    jmp 1b

.section .bss
.balign 16
    .skip 16384
stack_top:
