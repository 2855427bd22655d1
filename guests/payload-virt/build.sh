#!/bin/bash
# Builds the payload of each processor; called by guests/build.
#
#   OUT/payload-aarch64.elf   for -kernel of qemu-system-aarch64 -M virt
#   OUT/payload-riscv64.elf   for -bios of qemu-system-riscv64 -M virt
#   OUT/recipe.txt            what they were made with
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../lib.sh"
out=$1 tmp=$2

: > "$out/recipe.txt"
build() {
    local cpu=$1 gcc=$1-linux-gnu-gcc
    shift
    need "$gcc" "gcc-$cpu-linux-gnu"
    # No floating point but in the assembly, no position independence, nothing from a library.
    local compile=("$gcc" -std=gnu11 -O2 -Wall -Wextra -Werror -ffreestanding -fno-pic -fno-pie -fno-stack-protector
        -fno-asynchronous-unwind-tables -fno-tree-loop-distribute-patterns "$@")
    local part
    for part in payload.c "$cpu.c" "$cpu.S"; do
        "${compile[@]}" -c -o "$tmp/$cpu-$part.o" "$here/$part"
    done
    "$cpu-linux-gnu-ld" -nostdlib -static --no-warn-rwx-segments -T "$here/$cpu.ld" -o "$out/payload-$cpu.elf" \
        "$tmp/$cpu-$cpu.S.o" "$tmp/$cpu-payload.c.o" "$tmp/$cpu-$cpu.c.o"
    { "$gcc" --version; "$cpu-linux-gnu-ld" --version; } | grep -i "$cpu\|binutils" >> "$out/recipe.txt"
}
# With the MMU off, aarch64 takes no unaligned address.
build aarch64 -mgeneral-regs-only -mstrict-align
build riscv64 -march=rv64imafdc_zicsr -mabi=lp64 -mcmodel=medany
