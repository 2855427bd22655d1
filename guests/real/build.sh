#!/bin/bash
# Builds the real guest: a Debian 12 with compilers, servers and benchmarks; called by guests/build.
#
#   OUT/root.raw             ext4, the root file system (packages.txt), to be attached read-only
#   OUT/vmlinuz, vmlinux     its kernel, packed and not
#   OUT/initramfs.cpio.gz    busybox, modules, init, run-job
#   OUT/tsc-khz              prints the frequency of the host's time-stamp counter, for microvm
#   OUT/recipe.txt           the packages in it, with versions
#
# Needs root, for the owners and device nodes in the file system; it mounts nothing.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../lib.sh"
out=$1 tmp=$2
suite=bookworm
size=2500M

[ "$(id -u)" = 0 ] || fail "real: making a root file system needs root; run it with sudo -E"
need mmdebstrap mmdebstrap
need mkfs.ext4 e2fsprogs
need cpio cpio
need modprobe kmod
need lz4 lz4
add_tsc_khz "$out"
mirror=$(debian_mirror)
[ -n "$mirror" ] || { say "no Debian archive among this machine's apt sources"; exit 3; }

# mmdebstrap's apt knows nothing of this machine's proxy and mirror settings.
apt-config dump | grep -E '^Acquire::(http|https|ftp|Retries|Check-|ForceIPv)' > "$tmp/apt.conf" || true
echo 'Acquire::http::Pipeline-Depth "5";' >> "$tmp/apt.conf"

say "real: packages (a minute or two)"
mkdir "$tmp/rootfs"
mmdebstrap --quiet --mode=root --variant=minbase --components=main --aptopt="$tmp/apt.conf" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' --include="$(paste -sd, "$here/packages.txt")" \
    "$suite" "$tmp/rootfs" "$mirror" > "$tmp/mmdebstrap.log" 2>&1 || {
    tail -n 30 "$tmp/mmdebstrap.log" >&2
    fail "mmdebstrap $suite failed"
}
chroot "$tmp/rootfs" dpkg-query -W -f '${Package} ${Version}\n' > "$out/recipe.txt"

say "real: kernel and initramfs"
cp "$tmp"/rootfs/boot/vmlinuz-* "$out/vmlinuz"
unpack_vmlinux "$out/vmlinuz" "$out/vmlinux"
root=$tmp/initramfs
mkdir -p "$root"/{bin,dev,proc,sys,mnt,disk,lib/modules}
fetch_busybox "$tmp/busybox" "$(host_suite)" "$root/bin/busybox"
ln -s busybox "$root/bin/sh"
copy_modules "$tmp/rootfs" "$root/lib/modules" virtio_pci virtio_mmio virtio_blk virtio_net virtio_console virtio_rng overlay
cp "$here/init" "$here/run-job" "$root/"
chmod 755 "$root/init" "$root/run-job"
pack_initramfs "$root" "$out/initramfs.cpio.gz"

say "real: root file system"
rm -rf "$tmp"/rootfs/var/cache/apt/archives/*.deb "$tmp"/rootfs/var/lib/apt/lists/*
mkfs.ext4 -q -F -L kfroot -m 0 -d "$tmp/rootfs" "$out/root.raw" "$size" > "$tmp/mkfs.log"
