#!/usr/bin/env bash
# Check and measure Anabranch on this machine's GPU; docs/gpu/README.md says what and how.
#
#   scripts/gpu_check.sh                        # on a machine with a GPU, at most five minutes
#   scripts/gpu_check.sh --device cpu --quick   # the same checks at toy size, without one
#   PYTHON=python3 scripts/gpu_check.sh         # with a Python that has torch and Anabranch's dependencies
set -euo pipefail
cd "$(dirname "$0")/.."

readonly LIMIT_S=290 # the checks end by themselves before that; this is for when they do not
readonly ENVIRONMENT=build/gpu-check-venv

if [ -z "${PYTHON:-}" ]; then
  # Not .venv: `make` fills that with the CPU build of torch that constraints.txt pins. A torch of the system's is used.
  PYTHON=$ENVIRONMENT/bin/python
  if [ ! -e "$ENVIRONMENT/.installed" ]; then
    python3 -m venv --system-site-packages "$ENVIRONMENT"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check '.[worker]' >&2
    touch "$ENVIRONMENT/.installed"
  fi
fi

# One thread per process, as everywhere: two processes with torch's default threads slow each other down.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD/scripts:$PWD${PYTHONPATH:+:$PYTHONPATH}"

limit=()
if command -v timeout >/dev/null; then
  limit=(timeout --kill-after=10 "$LIMIT_S")
fi
exec ${limit[@]+"${limit[@]}"} "$PYTHON" -m gpu_check "$@"
