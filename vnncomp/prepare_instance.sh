#!/bin/bash
# Makes sure that an instance can be read: prepare_instance.sh VERSION BENCHMARK ONNX VNNLIB
# Nothing of it is kept: all work is done within the time limit. Files may be packed with gzip.
set -euo pipefail
[ "${1:-}" = v1 ] || { echo "expected version v1, got '${1:-}'" >&2; exit 1; }
[ $# -ge 4 ] || { echo "usage: $0 v1 BENCHMARK ONNX VNNLIB" >&2; exit 1; }
for file in "$3" "$4"; do
    if [ ! -r "$file" ] && [ -r "$file.gz" ]; then gunzip -k "$file.gz"; fi
    [ -r "$file" ] || { echo "$file: not there" >&2; exit 1; }
done
