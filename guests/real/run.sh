#!/bin/bash
# Runs the real guest, or prints the QEMU command line that does.
#
#   run.sh [OPTION...] [-- QEMU ARGUMENT...]
#     --machine pc|q35|microvm   default pc
#     --mem SIZE                 default 1G; what the guest writes stays in it
#     --smp N                    default 2
#     --accel NAME               default tcg
#     --job FILE                 the script to run (/dev/vdb); without it a shell on the console
#     --data FILE                another read-only disk (/dev/vdc), for example a tar of sources; needs --job
#     --net                      add a network
#     --append "..."             kernel parameters after the defaults; kf.poweroff=1 ends QEMU after the job
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

mem=1G smp=2 job='' data='' net=no
own_option() {
    case $1 in
        --job) job=$2; took=2 ;;
        --data) data=$2; took=2 ;;
        --net) net=yes; took=1 ;;
    esac
}
run_options "$@"
for file in "$job" "$data"; do
    [ -z "$file" ] || [ -f "$file" ] || { echo "run.sh: no such file: $file" >&2; exit 2; }
done
[ -z "$data" ] || [ -n "$job" ] || { echo "run.sh: --data needs --job, or it would be taken for the job" >&2; exit 2; }
# Told by its first two bytes in the guest.
[ -z "$job" ] || [ "$(head -c 2 -- "$job" | tr -d '\0')" = '#!' ] || { echo "run.sh: $job: a job begins with #!" >&2; exit 2; }

dir=$("$here/../build" real)
machine_parameters "$dir"
parameters="$parameters kf.ro=1${append:+ $append}"
base_command "$dir"
add_disk kfroot "$dir/root.raw"
[ -z "$job" ] || add_disk kfjob "$job"
[ -z "$data" ] || add_disk kfdata "$data"
[ "$net" = no ] || add_net
run_command
