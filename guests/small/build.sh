#!/bin/bash
# Builds the small guest; called by guests/build.
#
#   OUT/vmlinuz              Debian's cloud kernel
#   OUT/vmlinux              the same uncompressed: boots through PVH, a little sooner under TCG
#   OUT/initramfs.cpio.gz    busybox, virtio modules, init, kfguest
#   OUT/disk.raw             the test disk of the disk workload
#   OUT/tsc-khz              prints the frequency of the host's time-stamp counter, for microvm
#   OUT/recipe.txt           what it was made from
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../lib.sh"
out=$1 tmp=$2

need gcc gcc
need cpio cpio
need modprobe kmod
need lz4 lz4
need_file "$(gcc -print-file-name=libc.a)" libc6-dev
suite=$(host_suite)

say "small: kernel"
unpack_kernel "$tmp" "$tmp/kernel" "$suite"
cp "$tmp"/kernel/boot/vmlinuz-* "$out/vmlinuz"
unpack_vmlinux "$out/vmlinuz" "$out/vmlinux"

say "small: workloads"
compile=(gcc -std=gnu11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror)
"${compile[@]}" -static -s -o "$tmp/kfguest" "$here"/{kfguest,console,params,memory,answering}.c "$here"/work_*.c
"${compile[@]}" -o "$tmp/mkdisk" "$here/mkdisk.c"
"$tmp/mkdisk" > "$out/disk.raw"
add_tsc_khz "$out"

say "small: initramfs"
root=$tmp/root
mkdir -p "$root"/{bin,dev,proc,sys,tmp,lib/modules}
fetch_busybox "$tmp/busybox" "$suite" "$root/bin/busybox"
ln -s busybox "$root/bin/sh"
copy_modules "$tmp/kernel" "$root/lib/modules" virtio_pci virtio_mmio virtio_blk virtio_net virtio_console virtio_rng
# For kf.bus=: probing an IDE bus takes seconds, which only a guest with a disk there is to pay.
for bus in "scsi virtio_scsi sd_mod" "ide ata_piix sd_mod" "nvme nvme"; do
    read -r bus modules <<< "$bus"
    # shellcheck disable=SC2086 # a list of words
    copy_modules "$tmp/kernel" "$root/lib/modules/$bus" $modules
    # A kernel may have all of them built in, and then none are left.
    grep -vxFf "$root/lib/modules/order" "$root/lib/modules/$bus/order" > "$tmp/order" || true
    mv "$tmp/order" "$root/lib/modules/$bus/order"
done
cp "$here/init" "$root/init"
cp "$tmp/kfguest" "$root/kfguest"
chmod 755 "$root/init" "$root/kfguest"
pack_initramfs "$root" "$out/initramfs.cpio.gz"

{
    for deb in "$tmp"/image/*.deb "$tmp"/busybox/*.deb; do
        dpkg-deb --show --showformat '${Package} ${Version}\n' "$deb"
    done
    gcc --version | head -n1
    echo "modules: $(tr '\n' ' ' < "$root/lib/modules/order")"
} > "$out/recipe.txt"
