#!/bin/bash
# Prints a configuration file for the payload: run.sh MIB [BOOT OPTIONS]. Use it with
#   firecracker --api-sock SOCKET --config-file FILE
here=$(dirname -- "$(readlink -f -- "$0")")
out=$("$here/../build" firecracker --print-dir) || exit 1
cat <<JSON
{
  "boot-source": { "kernel_image_path": "$out/payload.elf", "boot_args": "${2:-}" },
  "drives": [],
  "machine-config": { "vcpu_count": 1, "mem_size_mib": ${1:-128} }
}
JSON
