# A firmware that needs no guest: 32-bit code at the reset vector that writes a pattern over RAM again and again.
#
#   serial port 0x3f8:  "B" once, then the number of each pass in 8 hexadecimal digits, "X" for ever on a mismatch
#   0x8000              the number of the pass
#   0x100000 + i*4096   at byte 0x40 of page i: pass number xor i, checked against the previous pass before it is written
#
# NPAGES: pages of the pattern.
    .code16
    .globl _start
_start:
base:
start16:
    cli
    lgdtl %cs:(gdtr - base)
    movl %cr0, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmpl $8, $(0xffff0000 + (start32 - base))
    .code32
start32:
    movw $16, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movl $0x7000, %esp
    xorl %eax, %eax
    movl %eax, 0x8000
    movb $'B', %al
    call put
    movb $'\n', %al
    call put
pass:
    movl 0x8000, %ebp
    xorl %ecx, %ecx
    movl $0x100000, %edi
page:
    movl %ebp, %eax
    xorl %ecx, %eax
    testl %ebp, %ebp
    jz write
    cmpl %eax, 0x40(%edi)
    jne bad
write:
    leal 1(%ebp), %eax
    xorl %ecx, %eax
    movl %eax, 0x40(%edi)
    addl $0x1000, %edi
    incl %ecx
    cmpl $NPAGES, %ecx
    jb page
    incl %ebp
    movl %ebp, 0x8000
    movl $8, %ecx
digit:
    roll $4, %ebp
    movl %ebp, %eax
    andb $15, %al
    addb $'0', %al
    cmpb $'9', %al
    jbe decimal
    addb $39, %al
decimal:
    call put
    decl %ecx
    jnz digit
    movb $'\n', %al
    call put
    jmp pass
bad:
    movb $'X', %al
    call put
    jmp bad
put:
    pushl %eax
    movw $0x3fd, %dx
busy:
    inb %dx, %al
    testb $0x20, %al
    jz busy
    popl %eax
    movw $0x3f8, %dx
    outb %al, %dx
    ret
    .align 8
gdt:
    .quad 0, 0x00cf9b000000ffff, 0x00cf93000000ffff
gdtr:
    .word 23
    .long 0xffff0000 + (gdt - base)
    .org 0xfff0
    .code16
    jmp start16
    .org 0x10000
