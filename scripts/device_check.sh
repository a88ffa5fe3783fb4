#!/usr/bin/env bash
# Correctness and a roofline table of every kernel on the accelerator of this machine, in under 8 minutes.
# Usage: scripts/device_check.sh [python] [--small]      (python: one that has jax for the accelerator, numpy and pytest)
set -u
cd "$(dirname "$0")/.." || exit 1
python=python3
if [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; then
  python="$1"
  shift
fi
out="${OUT:-.}"
status=0
timeout 200 "$python" scripts/device_check.py "$@" --json "$out/device_check.json" || status=1
exit $status
