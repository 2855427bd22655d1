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
#
# The words of the kernel command line hold spaces, which an unquoted $(...) would split. --print puts form feeds in
# their place: white space to the kernel and to the guest, but not to a shell.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")

machine=pc mem=256M smp=1 accel=tcg append='' disk=no net=no serial=stdio kernel=vmlinux mode=run
qemu=${KEYFRAME_QEMU:-qemu-system-x86_64}
usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
        --print) mode=print; shift; continue ;;
        --show) mode=show; shift; continue ;;
        --disk) disk=yes; shift; continue ;;
        --net) net=yes; shift; continue ;;
        --) shift; break ;;
    esac
    [ $# -ge 2 ] || usage
    case $1 in
        --machine) machine=$2 ;;
        --mem) mem=$2 ;;
        --smp) smp=$2 ;;
        --accel) accel=$2 ;;
        --append) append=$2 ;;
        --serial) serial=$2 ;;
        --kernel) kernel=$2 ;;
        --qemu) qemu=$2 ;;
        *) usage ;;
    esac
    shift 2
done

dir=$("$here/../build" small)

# Defaults, each for a reason:
#   console, quiet    the serial console belongs to the workload
#   panic=-1          a guest that panics reboots, so that with -no-reboot QEMU ends
#   tsc=unstable      under TCG the counter is the host's; the machine's own timers are part of a checkpoint
#   reboot=t          (microvm) the kernel's own choice does not reset this machine, a triple fault does
#   pci=off           (microvm) there is none; saves an error line at boot
parameters="console=ttyS0 quiet panic=-1"
case $machine in
    pc* | q35*) parameters="$parameters tsc=unstable"; suffix=pci ;;
    microvm*) parameters="$parameters reboot=t"; suffix=device
        case $machine in *pcie=on*) ;; *) parameters="$parameters pci=off" ;; esac ;;
    *) echo "run.sh: --machine $machine: pc, q35 or microvm, with options if need be" >&2; exit 2 ;;
esac
parameters=$parameters${append:+ $append}

case "$append " in *kf.work=disk[+\ ]* | *kf.work=*+disk[+\ ]*) disk=yes ;; esac
case "$append " in *kf.work=net[+\ ]* | *kf.work=*+net[+\ ]*) net=yes ;; esac

command=("$qemu" -nodefaults -no-user-config -display none -machine "$machine" -accel "$accel" -m "$mem" -smp "$smp"
    -kernel "$dir/$kernel" -initrd "$dir/initramfs.cpio.gz" -append "$parameters" -serial "$serial")
if [ "$disk" = yes ]; then
    command+=(-drive "file=$dir/disk.raw,if=none,id=kfdisk,format=raw,readonly=on" -device "virtio-blk-$suffix,drive=kfdisk")
fi
if [ "$net" = yes ]; then
    command+=(-netdev user,id=kfnet -device "virtio-net-$suffix,netdev=kfnet")
fi
command+=("$@")

case $mode in
    run) exec "${command[@]}" ;;
    show) printf '%q ' "${command[@]}"; echo ;;
    print)
        for i in "${!command[@]}"; do
            [ "${command[i]}" != "$parameters" ] || command[i]=${parameters// /$'\f'}
            case ${command[i]} in
                '' | *[[:blank:]$'\n']* | *[*?[]*)
                    echo "run.sh: --print cannot carry this word through an unquoted \$(...): '${command[i]}'; use --show" >&2
                    exit 1 ;;
            esac
        done
        printf '%s ' "${command[@]}"; echo ;;
esac
