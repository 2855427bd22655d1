#!/bin/bash
# Builds the payload; called by guests/build.
#
#   OUT/payload.bin   a firmware image of 64 KiB for -bios
#   OUT/recipe.txt    what it was made with
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../lib.sh"
out=$1 tmp=$2

need gcc gcc
need ld binutils
need objcopy binutils

# No vector registers, no red zone (interrupts use the stack), no position independence, nothing from a library.
compile=(gcc -m64 -std=gnu11 -O2 -Wall -Wextra -Werror -ffreestanding -fno-pic -fno-pie -fno-stack-protector
    -fno-asynchronous-unwind-tables -fcf-protection=none -fno-tree-loop-distribute-patterns -mno-red-zone -mgeneral-regs-only)
"${compile[@]}" -c -o "$tmp/payload.o" "$here/payload.c"
"${compile[@]}" -c -o "$tmp/entry.o" "$here/entry.S"
ld -nostdlib -static --no-warn-rwx-segments -T "$here/payload.ld" -o "$tmp/payload.elf" "$tmp/entry.o" "$tmp/payload.o"
objcopy -O binary -j .image "$tmp/payload.elf" "$out/payload.bin"
[ "$(stat -c %s "$out/payload.bin")" = 65536 ] || fail "payload.bin is not 64 KiB"

{
    gcc --version | head -n1
    ld --version | head -n1
} > "$out/recipe.txt"
