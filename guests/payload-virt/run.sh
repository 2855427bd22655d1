#!/bin/bash
# Runs the payload for another processor than x86, or prints the QEMU command line that does.
#
#   run.sh [OPTION...] [-- QEMU ARGUMENT...]
#     --cpu aarch64|riscv64   default aarch64
#     --mem SIZE              default 64M
#     --pages N               pages of the pattern, 4096 at most; default 1024
#     --dirty N               pages checked and written in a pass; default all
#     --serial SPEC           where the console goes; default stdio
#     --qemu PATH             default qemu-system-CPU
#     --print                 print one line to be used without quotes:  keyframe run -- $(run.sh --print ...)
#     --show                  print the same quoted, to be read and pasted
#
# Without --print and --show it becomes QEMU. The guest is built when it is not built yet.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../run-lib.sh"

mem=64M cpu=aarch64 qemu='' pages=0 dirty=0
own_option() {
    case $1 in
        --cpu) cpu=$2; took=2 ;;
        --pages) pages=$2; took=2 ;;
        --dirty) dirty=$2; took=2 ;;
    esac
}
run_options "$@"
case $cpu in
    aarch64) load=(-cpu cortex-a57 -kernel) parameters_at=0x401ff000 ;;
    riscv64) load=(-bios) parameters_at=0x801ff000 ;;
    *) usage ;;
esac
dir=$("$here/../build" payload-virt)
parameters=''
command=("${qemu:-qemu-system-$cpu}" -nodefaults -no-user-config -display none -machine virt -m "$mem"
    "${load[@]}" "$dir/payload-$cpu.elf" -serial "$serial")
if [ "$pages$dirty" != 00 ]; then
    command+=(-device "loader,addr=$parameters_at,data=$((dirty << 32 | pages)),data-len=8")
fi
run_command
