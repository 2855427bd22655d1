# From the reset vector to 64-bit code in RAM.
#
#   file, 64 KiB            at reset                 runs at
#   0x0000 payload (C)      0xffff0000  --copied-->  0x10000
#   ....   entry32          0xffffxxxx               there
#   0xfff0 reset vector     0xfffffff0
#
#   RAM   0x1000  page tables: 4 GiB, one to one, in pages of 2 MiB     0x9000  top of the stack
#
# The symbols are those of the copy in RAM; ROM is that many bytes further up.
    .set ROM, 0xffff0000 - 0x10000
    .set TABLES, 0x1000
    .set STACK, 0x9000
    .set EFER, 0xc0000080

    .section .entry, "ax"
    .code16
entry16:
    cli
    lgdtl %cs:(gdtr - 0x10000)
    movl %cr0, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmpl $8, $(entry32 + ROM)

    .code32
entry32:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movl $STACK, %esp
    cld
    movl $(payload_start + ROM), %esi
    movl $payload_start, %edi
    movl $payload_words, %ecx
    rep movsl
    movl $payload_bss, %edi
    movl $payload_bss_words, %ecx
    xorl %eax, %eax
    rep stosl
    # Page tables: one PML4, one PDPT, four page directories.
    movl $TABLES, %edi
    movl $(2 * 1024), %ecx
    rep stosl
    movl $(TABLES + 0x1003), TABLES
    movl $(TABLES + 0x2003), %eax
    movl $(TABLES + 0x1000), %edi
1:  movl %eax, (%edi)
    addl $0x1000, %eax
    addl $8, %edi
    cmpl $(TABLES + 0x6003), %eax
    jne 1b
    # Writable, large; the last 2 MiB of each GiB are made in the same loop.
    movl $0x83, %eax
    movl $(TABLES + 0x2000), %edi
    movl $2048, %ecx
2:  movl %eax, (%edi)
    movl $0, 4(%edi)
    addl $0x200000, %eax
    addl $8, %edi
    decl %ecx
    jnz 2b
    # Physical address extension; vector registers.
    movl $0x620, %eax
    movl %eax, %cr4
    movl $TABLES, %eax
    movl %eax, %cr3
    movl $EFER, %ecx
    rdmsr
    orl $0x100, %eax
    wrmsr
    movl %cr0, %eax
    andl $~4, %eax
    orl $0x80000022, %eax
    movl %eax, %cr0
    fninit
    ljmpl $24, $entry64

    .code64
entry64:
    movl $STACK, %esp
    call payload
3:  hlt
    jmp 3b

    .balign 8
gdt:
    .quad 0, 0x00cf9b000000ffff, 0x00cf93000000ffff, 0x00af9b000000ffff
gdtr:
    .word 31
    .long gdt + ROM

    .section .reset, "ax"
    .code16
    jmp entry16

    .section .note.GNU-stack, "", @progbits
