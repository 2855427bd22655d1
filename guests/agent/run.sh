#!/bin/bash
# Runs the guest with QEMU's guest agent, or prints the QEMU command line that does.
#
#   run.sh [OPTION...] [-- QEMU ARGUMENT...]
#     --agent SOCKET             where QEMU listens for the agent's client; default agent.sock
#     --machine pc|q35|microvm   default pc
#     --mem SIZE                 default 256M
#     --smp N                    default 1
#     --accel NAME               default tcg
#     --append "..."             kernel parameters after the defaults
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

agent=agent.sock
own_option() {
    case $1 in
        --agent) agent=$2; took=2 ;;
    esac
}
run_options "$@"
dir=$("$here/../build" agent)
machine_parameters "$dir"
parameters=$parameters${append:+ $append}
base_command "$dir"
command+=(-device "virtio-serial-$suffix" -chardev "socket,id=agent,path=$agent,server=on,wait=off"
    -device virtserialport,chardev=agent,name=org.qemu.guest_agent.0)
run_command
