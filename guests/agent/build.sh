#!/bin/bash
# Builds the guest with QEMU's guest agent; called by guests/build. Its kernel, modules and busybox are those of
# guests/small.
#
#   OUT/vmlinuz, vmlinux     Debian's cloud kernel
#   OUT/initramfs.cpio.gz    guests/small with all of busybox, qemu-ga, the libraries that it needs, and an init
#   OUT/tsc-khz              prints the frequency of the host's time-stamp counter, for microvm
#   OUT/recipe.txt           what it was made from
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../lib.sh"
out=$1 tmp=$2

need cpio cpio
need objdump binutils
suite=$(host_suite)
small=$("$here/../build" small | tail -n1)

say "agent: packages"
fetch "$tmp/debs" "$suite" qemu-guest-agent libc6 libglib2.0-0 libnuma1 libudev1 liburing2 libpcre2-8-0 libcap2
for deb in "$tmp"/debs/*.deb; do
    dpkg-deb -x "$deb" "$tmp/tree"
done

say "agent: initramfs"
root=$tmp/root
mkdir "$root"
gzip -dcq "$small/initramfs.cpio.gz" 2> /dev/null | (cd "$root" && cpio -i --quiet) || true
[ -x "$root/bin/busybox" ] || fail "agent: the initramfs of guests/small cannot be read"
rm -f "$root/kfguest"
mkdir -p "$root/lib64" "$root/usr/lib" "$root/run"
cp "$tmp/tree/usr/sbin/qemu-ga" "$root/bin/"

# Prints the path of each library that a file needs, and those that they need.
seen=' '
libraries() {
    local name path
    for name in $(objdump -p "$1" | awk '$1 == "NEEDED" { print $2 }'); do
        [[ $seen != *" $name "* ]] || continue
        seen+="$name "
        path=$(find "$tmp/tree" -name "$name" | head -n1)
        [ -n "$path" ] || fail "agent: no package of the recipe has $name"
        cp -L "$path" "$root/usr/lib/$name"
        libraries "$path"
    done
}
libraries "$tmp/tree/usr/sbin/qemu-ga"
loader=$(find "$tmp/tree" -name 'ld-linux-*' | head -n1)
[ -n "$loader" ] || fail "agent: libc6 has no dynamic loader"
cp -L "$loader" "$root/lib64/$(basename "$loader")"

cp "$here/init" "$root/init"
chmod 755 "$root/init"
pack_initramfs "$root" "$out/initramfs.cpio.gz"
cp "$small/vmlinuz" "$small/vmlinux" "$small/tsc-khz" "$out/"
{
    cat "$small/recipe.txt"
    for deb in "$tmp"/debs/*.deb; do
        dpkg-deb --show --showformat '${Package} ${Version}\n' "$deb"
    done
} > "$out/recipe.txt"
