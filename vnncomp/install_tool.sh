#!/bin/bash
# Installs buffet for VNN-COMP: install_tool.sh VERSION
set -euo pipefail
[ "${1:-}" = v1 ] || { echo "expected version v1, got '${1:-}'" >&2; exit 1; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python3 -m venv "$here/.venv"
"$here/.venv/bin/pip" install "$here/..[onnx]"
