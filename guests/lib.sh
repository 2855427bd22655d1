# What the recipes share: messages, host tools, packages from the machine's own sources, kernel and modules.
# Sourced by build and by every build.sh. A recipe runs with: build.sh OUT TMP; what it leaves in OUT is the guest.

say() { echo "guests: $*" >&2; }
fail() { say "$*"; exit 1; }

# need TOOL PACKAGE: fails with what to install when TOOL is missing. sbin is searched too: depmod, mkfs.ext4.
export PATH="$PATH:/usr/sbin:/sbin"
need() {
    command -v "$1" >/dev/null 2>&1 || fail "$1 is missing; install it with: apt-get install $2"
}

# need_file FILE PACKAGE
need_file() {
    [ -e "$1" ] || fail "$1 is missing; install it with: apt-get install $2"
}

# debian_mirror: the URI of the Debian archive in this machine's own apt configuration.
debian_mirror() {
    need apt-get apt
    local mirror
    mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(ORIGIN) $(LABEL)' 'Created-By: Packages' |
        awk '$2 !~ /-/ && $3 == "Debian" && $4 == "Debian" && !uri { uri = $1 } END { print uri }')
    # Before the first `apt-get update` apt knows no origins; then the usual shape of the URI has to do:
    # 'URI/debian/dists/SUITE/InRelease' FILE ...
    [ -n "$mirror" ] || mirror=$(apt-get update --print-uris 2>/dev/null | tr -d "'" |
        awk '$1 ~ /\/debian\/dists\/[a-z]+\/InRelease$/ && !uri { uri = $1 } END { sub("/dists/.*", "", uri); print uri }')
    echo "${mirror%/}"
}

# The Debian name of the processor whose packages are fetched: another one than this machine's needs no `dpkg
# --add-architecture`.
host_packages=$(dpkg --print-architecture 2>/dev/null || echo amd64)
guest_packages=$host_packages

# private_apt DIR SUITE...: makes DIR/apt.conf, an apt of our own with only the Debian archive's SUITEs as sources. It
# reads and writes no list of the system's, so it needs no root and no `apt-get update` before.
private_apt() {
    local dir=$1 mirror suite
    shift
    mirror=$(debian_mirror)
    [ -n "$mirror" ] || fail "no Debian archive among this machine's apt sources (apt-get indextargets shows them)"
    need_file /usr/share/keyrings/debian-archive-keyring.gpg debian-archive-keyring
    mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial"
    : > "$dir/sources.list"
    for suite in "$@"; do
        echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $suite main" >> "$dir/sources.list"
    done
    cat > "$dir/apt.conf" <<CONF
Dir::Etc::SourceList "$dir/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State::Lists "$dir/lists";
Dir::Cache "$dir/cache";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
APT::Sandbox::User "$(id -un)";
APT::Architecture "$guest_packages";
APT::Architectures { "$guest_packages"; };
Acquire::Languages "none";
Acquire::Retries "3";
CONF
    # `update` reports a suite that the archive lacks by its exit code.
    APT_CONFIG=$dir/apt.conf apt-get -qq -o APT::Update::Error-Mode=any update > "$dir/update.log" 2>&1
}

# fetch DIR SUITE PACKAGE...: downloads packages of the machine's own Debian release into DIR, by the system's lists
# when they are fresh, else by lists of our own.
fetch() {
    local dir=$1 suite=$2
    shift 2
    need apt-get apt
    mkdir -p "$dir"
    if [ "$guest_packages" = "$host_packages" ] && (cd "$dir" && apt-get -qq -o APT::Sandbox::User="$(id -un)" download "$@" > apt.log 2>&1); then
        return
    fi
    [ "$guest_packages" != "$host_packages" ] || say "the system's package lists did not do; fetching our own"
    private_apt "$dir/apt" "$suite" || { cat "$dir/apt/update.log" >&2; fail "fetching the package lists of $suite"; }
    (cd "$dir" && APT_CONFIG=$dir/apt/apt.conf apt-get -qq download "$@" > apt.log 2>&1) || {
        cat "$dir/apt.log" >&2
        say "packages not offered by this machine's sources: $*"
        exit 3
    }
}

# host_suite: the release that this machine's packages come from.
host_suite() { (. /etc/os-release && echo "${VERSION_CODENAME:-bookworm}"); }

# unpack_kernel DIR TREE SUITE: downloads Debian's cloud kernel into DIR and unpacks it into TREE.
unpack_kernel() {
    local dir=$1 tree=$2 suite=$3 image
    need dpkg-deb dpkg
    fetch "$dir/meta" "$suite" "linux-image-cloud-$guest_packages"
    # The first package is empty but for the name of the kernel it stands for.
    image=$(dpkg-deb -f "$dir"/meta/*.deb Depends | tr ', ' '\n\n' | grep -m1 '^linux-image-[0-9]') ||
        fail "linux-image-cloud-$guest_packages depends on no kernel image"
    fetch "$dir/image" "$suite" "$image"
    dpkg-deb -x "$dir"/image/*.deb "$tree"
    # Debian 13 ships /usr/lib/modules; one place for both.
    [ -d "$tree/lib/modules" ] || { mkdir -p "$tree/lib"; mv "$tree/usr/lib/modules" "$tree/lib/modules"; }
}

# copy_modules TREE TO MODULE...: copies MODULEs and what they depend on into TO, with their load order in TO/order.
copy_modules() {
    local tree=$1 to=$2 release module path
    shift 2
    need modprobe kmod
    release=$(ls "$tree/lib/modules")
    mkdir -p "$to"
    depmod -b "$tree" "$release"
    for module in "$@"; do
        modprobe -d "$tree" -S "$release" --show-depends "$module" || fail "kernel $release has no module $module"
    done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' > "$to/paths"
    : > "$to/order"
    while read -r path; do
        case $path in
            *.xz) xz -dc "$path" > "$to/$(basename "$path" .xz)" ;;
            *.zst) zstd -qdc "$path" > "$to/$(basename "$path" .zst)" ;;
            *) cp "$path" "$to/" ;;
        esac
        basename "$path" | sed 's/\.ko\..*/.ko/' >> "$to/order"
    done < "$to/paths"
    rm "$to/paths"
}

# u32_at FILE OFFSET, hex_at FILE OFFSET LEN: little-endian number, bytes.
u32_at() { od -An -v -tu4 -j "$2" -N 4 "$1" | tr -d ' '; }
hex_at() { od -An -v -tx1 -j "$2" -N "$3" "$1" | tr -d ' \n'; }

# unpack_vmlinux BZIMAGE OUT: takes the uncompressed kernel ELF out of a bzImage.
#
#   0            512*(1+setup_sects)     +payload_offset          +payload_length
#   |boot sector, setup  |  decompressor  |  compressed ELF, u32 size  |
#
# The last four bytes are the uncompressed size, which the decompressors of the boot stub want and the tools do not.
unpack_vmlinux() {
    local image=$1 out=$2 setup_sects start length
    [ "$(hex_at "$image" 514 4)" = 48647253 ] || fail "$image: not a bzImage (no HdrS at offset 514)"
    setup_sects=$((16#$(hex_at "$image" 497 1)))
    [ "$setup_sects" -ne 0 ] || setup_sects=4
    start=$(((setup_sects + 1) * 512 + $(u32_at "$image" 584)))
    length=$(($(u32_at "$image" 588) - 4))
    local -a unpack
    case $(hex_at "$image" "$start" 4) in
        02214c18) need lz4 lz4; unpack=(lz4 -dc) ;;
        1f8b*) unpack=(gzip -dc) ;;
        fd377a58) need xz xz-utils; unpack=(xz -dc) ;;
        28b52ffd) need zstd zstd; unpack=(zstd -dc) ;;
        *) fail "$image: payload at offset $start has an unknown compression" ;;
    esac
    tail -c +$((start + 1)) "$image" | head -c "$length" | "${unpack[@]}" > "$out" || true
    # tail ends by SIGPIPE, so the result decides: an ELF as long as the image says.
    [ "$(hex_at "$out" 0 4)" = 7f454c46 ] || fail "$image: the payload is no ELF"
    [ "$(stat -c %s "$out")" = "$(u32_at "$image" $((start + length)))" ] || fail "$image: the payload unpacked short"
}

# unpack_btf IMAGE OUT: takes the kernel's type information (BTF) out of an uncompressed kernel image: a header of 24 bytes,
# then types and strings.
unpack_btf() {
    local image=$1 out=$2 at
    at=$(LC_ALL=C grep -abom1 -P '\x9f\xeb\x01\x00\x18\x00\x00\x00' "$image" | head -n1 | cut -d: -f1)
    [ -n "$at" ] || fail "$image has no type information (BTF)"
    local strings=$(($(u32_at "$image" $((at + 16))) + $(u32_at "$image" $((at + 20)))))
    tail -c +$((at + 1)) "$image" | head -c $((24 + strings)) > "$out" || true
    [ "$(stat -c %s "$out")" = $((24 + strings)) ] || fail "$image: the type information is cut short"
}

# add_tsc_khz OUT: OUT/tsc-khz, which run.sh asks for the frequency of the host's counter.
add_tsc_khz() {
    need gcc gcc
    gcc -std=gnu11 -O2 -Wall -Wextra -Werror -o "$1/tsc-khz" "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/tsckhz.c"
}

# pack_initramfs TREE OUT: a reproducible archive of TREE.
pack_initramfs() {
    need cpio cpio
    find "$1" -exec touch -h -d @0 {} +
    (cd "$1" && find . -mindepth 1 | sort | cpio -o -H newc -R 0:0 --reproducible --quiet) | gzip -9n > "$2"
    # QEMU 10's microvm puts the file at the end of RAM, page by page, and its ACPI tables behind it in the same last page:
    # where that is nearly full they destroy each other. The kernel skips zeros.
    truncate -s $(( ($(stat -c %s "$2") / 4096 + 1) * 4096 + 512 )) "$2"
}

# fetch_busybox DIR SUITE TO: downloads the static busybox into DIR and copies its program to TO.
fetch_busybox() {
    fetch "$1" "$2" busybox-static
    dpkg-deb -x "$1"/*.deb "$1/tree"
    cp "$(find "$1/tree" -type f -path '*/bin/busybox' | head -n1)" "$3"
    chmod 755 "$3"
}
