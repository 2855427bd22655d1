#!/bin/bash
# Runs the small guest for ARM with 64 bits, or prints the QEMU command line that does.
#
#   run.sh [OPTION...] [-- QEMU ARGUMENT...]
#     --mem SIZE                 default 256M
#     --smp N                    default 1
#     --append "kf.work=..."     kernel parameters after the defaults; kf.work=disk adds the test disk, kf.work=net a network
#     --disk, --net              add them all the same
#     --serial SPEC              where the console goes; default stdio
#     --qemu PATH                default qemu-system-aarch64
#     --print                    print one line to be used without quotes:  keyframe run -- $(run.sh --print ...)
#     --show                     print the same quoted, to be read and pasted
#
# Without --print and --show it becomes QEMU. The guest is built when it is not built yet.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../run-lib.sh"

disk=no net=no qemu=qemu-system-aarch64 suffix=pci
own_option() {
    case $1 in
        --disk) disk=yes; took=1 ;;
        --net) net=yes; took=1 ;;
    esac
}
run_options "$@"
dir=$("$here/../build" small-arm64)
parameters="console=ttyAMA0 quiet panic=-1${append:+ $append}"
command=("$qemu" -nodefaults -no-user-config -display none -machine virt -cpu cortex-a57 -m "$mem" -smp "$smp"
    -kernel "$dir/vmlinuz" -initrd "$dir/initramfs.cpio.gz" -append "$parameters" -serial "$serial")
if [ "$disk" = yes ] || has_work disk; then add_disk kfdisk "$dir/disk.raw"; fi
if [ "$net" = yes ] || has_work net; then add_net; fi
run_command
