#!/bin/bash
# Runs the payload, or prints the QEMU command line that does.
#
#   run.sh [OPTION...] [-- QEMU ARGUMENT...]
#     --machine pc|q35|microvm   default pc
#     --mem SIZE                 default 64M
#     --accel NAME               default kvm where /dev/kvm can be opened, else tcg
#     --pages N                  pages of the pattern, 4096 at most; default 1024
#     --dirty N                  pages checked and written in a pass; default all
#     --serial SPEC              where ttyS0 goes; default stdio
#     --qemu PATH                default $KEYFRAME_QEMU, else qemu-system-x86_64
#     --print                    print one line to be used without quotes:  keyframe run -- $(run.sh --print ...)
#     --show                     print the same quoted, to be read and pasted
#
# Without --print and --show it becomes QEMU. The guest is built when it is not built yet.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../run-lib.sh"

mem=64M accel=tcg sizes=()
if { : <> /dev/kvm; } 2>/dev/null; then accel=kvm; fi
own_option() {
    case $1 in
        --pages | --dirty) sizes+=(-fw_cfg "name=opt/keyframe/${1#--},string=$2"); took=2 ;;
    esac
}
run_options "$@"
dir=$("$here/../build" payload)
parameters=''
command=("$qemu" -nodefaults -no-user-config -display none -machine "$machine" -accel "$accel" -m "$mem"
    -bios "$dir/payload.bin" "${sizes[@]}" -serial "$serial")
run_command
