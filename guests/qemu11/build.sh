#!/bin/bash
# Unpacks QEMU 11 and its libraries from the backports of Debian 13, beside the installed QEMU; called by guests/build.
#
#   OUT/bin/qemu-system-x86_64   wrapper: runs the real one with its own data, firmware and modules; also -aarch64 and
#                                -riscv64
#   OUT/bin/with-libraries       runs a command with the libraries of QEMU 11 laid over the system's
#   OUT/root/                    the packages' files
#   OUT/modules/                 its modules
#   OUT/recipe.txt               versions
#
# QEMU 11 needs a newer C library than an older release has. with-libraries lays its libraries over the system's in a
# mount namespace of its own, which takes root; programs of both releases run there. The other ways do not do: with the
# packages' own dynamic linker as the program /proc/PID/exe would name the linker, LD_LIBRARY_PATH cannot replace the
# dynamic linker, and a namespace for QEMU alone keeps Keyframe from starting a second QEMU of the same binary.
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../lib.sh"
out=$1 tmp=$2
packages=(qemu-system-x86 qemu-system-arm qemu-system-riscv qemu-system-common qemu-system-data seabios)
processors=(x86_64 aarch64 riscv64)
suite=trixie

need mmdebstrap mmdebstrap
need unshare util-linux
mirror=$(debian_mirror)
[ -n "$mirror" ] || fail "no Debian archive among this machine's apt sources (apt-get indextargets shows them)"
private_apt "$tmp/apt" "$suite" "$suite-backports" || {
    cat "$tmp/apt/update.log" >&2
    say "this machine's package archive does not offer $suite-backports"
    exit 3
}
version=$(APT_CONFIG=$tmp/apt/apt.conf apt-cache madison qemu-system-x86 |
    awk -F' *\\| *' '$2 ~ /^1:11\./ { print $2; exit }')
[ -n "$version" ] || { say "$suite-backports of this machine's package archive offers no QEMU 11"; exit 3; }

say "qemu11: $version from $suite-backports"
source="deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror"
include=$(printf "%s/$suite-backports," "${packages[@]}")ipxe-qemu
mmdebstrap --mode=root --variant=extract --aptopt='Apt::Install-Recommends "false"' --include="$include" \
    "$suite" "$out/root" "$source $suite main" "$source $suite-backports main" > "$tmp/log" 2>&1 || {
    cat "$tmp/log" >&2
    fail "unpacking QEMU $version"
}
printf 'qemu-system-x86 %s\n' "$version" >> "$out/recipe.txt"

mkdir "$out/bin"
# In the libraries' directory they would hide the installed QEMU's modules.
mv "$out/root/usr/lib/x86_64-linux-gnu/qemu" "$out/modules"
for processor in "${processors[@]}"; do
    sed "s/@PROCESSOR@/$processor/" > "$out/bin/qemu-system-$processor" <<'WRAPPER'
#!/bin/sh
out=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")") root=$out/root
QEMU_MODULE_DIR=$out/modules
export QEMU_MODULE_DIR
exec "$root/usr/bin/qemu-system-@PROCESSOR@" -L "$root/usr/share/qemu" -L "$root/usr/share/seabios" -L "$root/usr/lib/ipxe/qemu" "$@"
WRAPPER
    chmod 755 "$out/bin/qemu-system-$processor"
done
cat > "$out/bin/with-libraries" <<'WRAPPER'
#!/bin/sh
# with-libraries COMMAND...: the shell is loaded before the libraries change, and becomes the command.
root=$(dirname -- "$(dirname -- "$(readlink -f -- "$0")")")/root
exec unshare --mount --propagation slave /bin/sh -c '
    libraries=/usr/lib/x86_64-linux-gnu
    mount -t overlay -o "ro,lowerdir=$1$libraries:$libraries" overlay $libraries || exit 1
    shift
    exec "$@"' sh "$root" "$@"
WRAPPER
chmod 755 "$out/bin/with-libraries"

answer=$("$out/bin/with-libraries" "$out/bin/qemu-system-x86_64" --version) || {
    say "this machine does not let the libraries of QEMU 11 be laid over its own (root, overlayfs)"
    exit 3
}
case $answer in
    "QEMU emulator version 11."*) ;;
    *) fail "the unpacked QEMU is not version 11: $answer" ;;
esac
