#!/bin/bash
# Builds the small guest for ARM with 64 bits; called by guests/build. Its workloads and its init are those of guests/small.
#
#   OUT/vmlinuz              Debian's cloud kernel
#   OUT/vmlinux.btf          the kernel's types, for the tool syscalls
#   OUT/initramfs.cpio.gz    busybox, virtio modules, init, kfguest
#   OUT/disk.raw             the test disk of the disk workload
#   OUT/recipe.txt           what it was made from
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../lib.sh"
out=$1 tmp=$2 small=$here/../small

need gcc gcc
need aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu
need cpio cpio
need modprobe kmod
need_file "$(aarch64-linux-gnu-gcc -print-file-name=libc.a)" libc6-dev-arm64-cross
suite=$(host_suite)
guest_packages=arm64

say "small-arm64: kernel"
unpack_kernel "$tmp" "$tmp/kernel" "$suite"
cp "$tmp"/kernel/boot/vmlinuz-* "$out/vmlinuz"
unpack_btf "$out/vmlinuz" "$out/vmlinux.btf"

say "small-arm64: workloads"
compile=(-std=gnu11 -D_GNU_SOURCE -O2 -Wall -Wextra -Werror)
aarch64-linux-gnu-gcc "${compile[@]}" -static -s -o "$tmp/kfguest" \
    "$small"/{kfguest,console,params,memory,answering}.c "$small"/work_*.c
gcc "${compile[@]}" -o "$tmp/mkdisk" "$small/mkdisk.c"
"$tmp/mkdisk" > "$out/disk.raw"

say "small-arm64: initramfs"
root=$tmp/root
mkdir -p "$root"/{bin,dev,proc,sys,tmp,lib/modules}
fetch_busybox "$tmp/busybox" "$suite" "$root/bin/busybox"
ln -s busybox "$root/bin/sh"
copy_modules "$tmp/kernel" "$root/lib/modules" virtio_pci virtio_mmio virtio_blk virtio_net virtio_console virtio_rng
cp "$small/init" "$root/init"
cp "$tmp/kfguest" "$root/kfguest"
chmod 755 "$root/init" "$root/kfguest"
pack_initramfs "$root" "$out/initramfs.cpio.gz"

{
    for deb in "$tmp"/image/*.deb "$tmp"/busybox/*.deb; do
        dpkg-deb --show --showformat '${Package} ${Version}\n' "$deb"
    done
    aarch64-linux-gnu-gcc --version | head -n1
    echo "modules: $(tr '\n' ' ' < "$root/lib/modules/order")"
} > "$out/recipe.txt"
