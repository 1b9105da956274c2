#!/bin/bash
# Answers an instance: run_instance.sh VERSION BENCHMARK ONNX VNNLIB RESULTS TIMEOUT
# RESULTS gets unsat, sat (with the counterexample behind it), unknown, timeout or error.
set -uo pipefail
[ "${1:-}" = v1 ] || { echo "expected version v1, got '${1:-}'" >&2; exit 1; }
[ $# -ge 6 ] || { echo "usage: $0 v1 BENCHMARK ONNX VNNLIB RESULTS TIMEOUT" >&2; exit 1; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
buffet=${BUFFET:-$here/.venv/bin/buffet}
onnx=$3 vnnlib=$4 results=$5 limit=$6
answer=$(timeout --kill-after=5 "$limit" "$buffet" vnncomp "$onnx" "$vnnlib" --timeout "$limit")
code=$?
case $code in
    0 | 1) printf '%s\n' "$answer" > "$results" ;;
    124 | 137) echo timeout > "$results" ;;
    *) echo error > "$results" ;;
esac
