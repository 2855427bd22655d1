# From the entry point, at EL1 with the MMU off, to C. The other processors of the machine are off.
    .section .entry, "ax"
    .globl entry
entry:
    ldr x0, =stack_top
    mov sp, x0
    # RAM behind the file is zeros at power on, not after a reset.
    ldr x0, =bss_start
    ldr x1, =bss_end
1:  cmp x0, x1
    b.hs 2f
    str xzr, [x0], #8
    b 1b
2:  ldr x0, =vectors
    msr vbar_el1, x0
    # Floating point at EL1.
    mov x0, #(3 << 20)
    msr cpacr_el1, x0
    isb
    bl payload
3:  wfi
    b 3b

    .text
    .balign 2048
vectors:
    .rept 5
    b exception
    .balign 128
    .endr
    b interrupt
    .balign 128
    .rept 10
    b exception
    .balign 128
    .endr

exception:
    bl on_exception
interrupt:
    sub sp, sp, #176
    stp x0, x1, [sp]
    stp x2, x3, [sp, #16]
    stp x4, x5, [sp, #32]
    stp x6, x7, [sp, #48]
    stp x8, x9, [sp, #64]
    stp x10, x11, [sp, #80]
    stp x12, x13, [sp, #96]
    stp x14, x15, [sp, #112]
    stp x16, x17, [sp, #128]
    stp x18, x30, [sp, #144]
    bl on_interrupt
    ldp x0, x1, [sp]
    ldp x2, x3, [sp, #16]
    ldp x4, x5, [sp, #32]
    ldp x6, x7, [sp, #48]
    ldp x8, x9, [sp, #64]
    ldp x10, x11, [sp, #80]
    ldp x12, x13, [sp, #96]
    ldp x14, x15, [sp, #112]
    ldp x16, x17, [sp, #128]
    ldp x18, x30, [sp, #144]
    add sp, sp, #176
    eret

    .section .note.GNU-stack, "", @progbits
