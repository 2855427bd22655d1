# What the run.sh of every guest shares: options, kernel parameters of each machine, printing. Sourced.
#
#   a run.sh sets mem, smp, ... and defines own_option, then:
#   run_options "$@"  ->  machine_parameters DIR  ->  command=(...)  ->  run_command

machine=pc mem=256M smp=1 accel=tcg append='' serial=stdio kernel=vmlinux mode=run
qemu=${KEYFRAME_QEMU:-qemu-system-x86_64}
extra=()

# The comment at the head of the run.sh is its help.
help() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; }
usage() { help >&2; exit 2; }

# own_option OPTION VALUE, defined by a run.sh with options of its own, sets took to the words it used, 0 when none.
own_option() { took=0; }

run_options() {
    while [ $# -gt 0 ]; do
        took=0
        own_option "$1" "${2-}"
        if [ "$took" -gt 0 ]; then
            [ "$took" -le $# ] || usage
            shift "$took"
            continue
        fi
        case $1 in
            --print) mode=print; shift; continue ;;
            --show) mode=show; shift; continue ;;
            -h | --help) help; exit 0 ;;
            --) shift; extra=("$@"); return ;;
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
}

# Sets parameters, the kernel's defaults for this machine, and suffix, that of its virtio devices. Each for a reason:
#   console, quiet    the serial console belongs to the workload
#   panic=-1          a guest that panics reboots at once, so that with -no-reboot QEMU ends
#   tsc=unstable      (pc, q35) under TCG the counter is the host's; the machine's own timer (HPET) is in a checkpoint
#   reboot=t          (microvm) the kernel's own choice does not reset this machine, a triple fault does
#   tsc_early_khz, lpj (microvm under TCG) on a busy host the kernel fails to measure its clocks against the PIT and then
#                     hangs in boot, with QEMU 7.2 and without any checkpoint; told these, it does not measure. Under TCG
#                     the guest's counter runs as the host's, under -icount at 1 GHz. HZ is 250 in Debian's kernels
# $1 is the directory of the built guest.
machine_parameters() {
    local khz
    parameters="console=ttyS0 quiet panic=-1"
    case $machine in
        pc* | q35*) parameters="$parameters tsc=unstable"; suffix=pci ;;
        microvm*)
            parameters="$parameters reboot=t"; suffix=device
            if [[ $accel == tcg* ]]; then
                khz=1000000
                [[ " ${extra[*]} " == *" -icount "* ]] || khz=$("$1/tsc-khz")
                parameters="$parameters tsc_early_khz=$khz lpj=$((khz * 4))"
            fi ;;
        *) echo "run.sh: --machine $machine: wanted pc, q35 or microvm, with options if need be" >&2; exit 2 ;;
    esac
}

# has_work NAME: whether kf.work in the parameters names it.
has_work() { [[ " $parameters " =~ [[:space:]]kf\.work=([^[:space:]]*\+)?$1(\+|[[:space:]]) ]]; }

# Sets command, as far as it is the same for all guests.
base_command() {
    command=("$qemu" -nodefaults -no-user-config -display none -machine "$machine" -accel "$accel" -m "$mem" -smp "$smp"
        -kernel "$1/$kernel" -initrd "$1/initramfs.cpio.gz" -append "$parameters" -serial "$serial")
}

# add_disk ID FILE: a read-only virtio disk.
add_disk() {
    command+=(-drive "file=$2,if=none,id=$1,format=raw,readonly=on" -device "virtio-blk-$suffix,drive=$1")
}

add_net() { command+=(-netdev user,id=kfnet -device "virtio-net-$suffix,netdev=kfnet"); }

# Runs or prints command and what followed `--`.
#
# The words of the kernel command line hold spaces, which an unquoted $(...) would split. --print puts form feeds in
# their place: white space to the kernel and to the guests, but not to a shell.
run_command() {
    local word line=''
    command+=("${extra[@]}")
    case $mode in
        run) exec "${command[@]}" ;;
        show) printf '%q ' "${command[@]}"; echo ;;
        print)
            for word in "${command[@]}"; do
                [ "$word" != "$parameters" ] || word=${parameters// /$'\f'}
                case $word in
                    '' | *[' '$'\t\n']* | *[*?[]*)
                        echo "run.sh: --print cannot carry this word through an unquoted \$(...): '$word'; use --show" >&2
                        exit 1 ;;
                esac
                line+="$word "
            done
            echo "$line" ;;
    esac
}
