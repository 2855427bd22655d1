#!/bin/bash
# Runs the small guest, or prints the QEMU command line that does.
#
#   run.sh [OPTION...] [-- QEMU ARGUMENT...]
#     --machine pc|q35|microvm   default pc
#     --mem SIZE                 default 256M
#     --smp N                    default 1
#     --accel NAME               default tcg
#     --append "kf.work=..."     kernel parameters after the defaults; kf.work=disk adds the test disk, kf.work=net a network
#     --disk, --net              add them all the same
#     --serial SPEC              where ttyS0 goes; default stdio
#     --kernel vmlinux|vmlinuz   default vmlinux
#     --qemu PATH                default $KEYFRAME_QEMU, else qemu-system-x86_64
#     --print                    print one line to be used without quotes:  keyframe run -- $(run.sh --print ...)
#     --show                     print the same quoted, to be read and pasted
#
# Without --print and --show it becomes QEMU. The guest is built when it is not built yet.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../run-lib.sh"

disk=no net=no
own_option() {
    case $1 in
        --disk) disk=yes; took=1 ;;
        --net) net=yes; took=1 ;;
    esac
}
run_options "$@"
dir=$("$here/../build" small)
machine_parameters "$dir"
parameters=$parameters${append:+ $append}
base_command "$dir"
if [ "$disk" = yes ] || has_work disk; then add_disk kfdisk "$dir/disk.raw"; fi
if [ "$net" = yes ] || has_work net; then add_net; fi
run_command
