#!/bin/bash
# Unpacks QEMU 10 from the Debian release's backports, beside the installed QEMU; called by guests/build.
#
#   OUT/bin/qemu-system-x86_64   wrapper: runs the real one with its own data, modules and the system's firmware; also
#                                -aarch64
#   OUT/root/                    the packages' files
#   OUT/recipe.txt               versions
#
# It runs with the libraries of the installed QEMU (same release), so that has to be installed too.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../lib.sh"
out=$1 tmp=$2
packages=(qemu-system-x86 qemu-system-arm qemu-system-common qemu-system-data)
processors=(x86_64 aarch64)

need dpkg-deb dpkg
need qemu-system-x86_64 qemu-system-x86
need_file /usr/share/seabios seabios
need_file /usr/lib/ipxe/qemu ipxe-qemu
suite=$(host_suite)-backports

private_apt "$tmp/apt" "$suite" || {
    cat "$tmp/apt/update.log" >&2
    say "this machine's package archive does not offer $suite"
    exit 3
}
export APT_CONFIG=$tmp/apt/apt.conf
version=$(apt-cache madison qemu-system-x86 | awk -F' *\\| *' '$2 ~ /^1:10\./ { print $2; exit }')
[ -n "$version" ] || { say "$suite of this machine's package archive offers no QEMU 10"; exit 3; }

say "qemu10: $version from $suite"
mkdir "$tmp/debs"
(cd "$tmp/debs" && apt-get -qq download "${packages[@]/%/=$version}" > apt.log 2>&1) || {
    cat "$tmp/debs/apt.log" >&2
    fail "downloading ${packages[*]} $version from $suite"
}
mkdir "$out/root" "$out/bin"
for deb in "$tmp"/debs/*.deb; do
    dpkg-deb -x "$deb" "$out/root"
    dpkg-deb --show --showformat '${Package} ${Version}\n' "$deb" >> "$out/recipe.txt"
done

for processor in "${processors[@]}"; do
    sed "s/@PROCESSOR@/$processor/" > "$out/bin/qemu-system-$processor" <<'WRAPPER'
#!/bin/sh
root=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")/root
QEMU_MODULE_DIR=$root/usr/lib/x86_64-linux-gnu/qemu
export QEMU_MODULE_DIR
exec "$root/usr/bin/qemu-system-@PROCESSOR@" -L "$root/usr/share/qemu" -L /usr/share/seabios -L /usr/lib/ipxe/qemu "$@"
WRAPPER
    chmod 755 "$out/bin/qemu-system-$processor"
done

missing=$(ldd "$out/root/usr/bin/qemu-system-x86_64" | awk '/not found/ { print $1 }' | sort -u | tr '\n' ' ')
[ -z "$missing" ] || fail "QEMU $version needs libraries that are not installed: $missing(apt-get install qemu-system-x86 brings most)"
answer=$("$out/bin/qemu-system-x86_64" --version) || fail "the unpacked QEMU does not run"
case $answer in
    "QEMU emulator version 10."*) ;;
    *) fail "the unpacked QEMU is not version 10: $answer" ;;
esac
