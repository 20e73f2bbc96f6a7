#!/usr/bin/env bash
# Makes $VENV with the locked CPU packages. Safe to run again. Says what is missing instead of failing half-way.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
missing() { printf 'make setup: %s\n' "$*" >&2; exit 1; }

python=$(command -v "${PYTHON:-python3.11}" || command -v python3 || true)
[ -n "$python" ] || missing "Python 3.11 is missing. Install it, or name it: make setup PYTHON=/path/to/python3.11"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  missing "Python 3.11 is needed (the locked wheels are built for it); $python is $("$python" -V 2>&1)"
"$python" -c 'import venv, ensurepip' 2>/dev/null || missing "Python's venv module is missing (Debian: apt-get install python3.11-venv)"
[ "$(uname -sm)" = "Linux x86_64" ] || missing "the locked wheels are for Linux on x86_64; this is $(uname -sm)"
free_kib=$(df -Pk . | awk 'NR==2 {print $4}')
[ "$free_kib" -gt 6000000 ] || missing "6 GB of free disk are needed here; there are $((free_kib / 1000)) MB"

# See cpu.lock at urllib3-future.
export URLLIB3_NO_OVERRIDE=1
start=$SECONDS
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@" 2> >(grep -v '^WARNING: Location' >&2); }
# --no-compile: Python compiles what is imported at its first import; compiling all of torch here would take a minute.
pip install --no-deps --no-compile -r requirements/cpu.lock -r requirements/dev.lock ||
  missing "a locked package could not be installed (see above). torch must be the CPU build: point pip at PyTorch's CPU index with PIP_EXTRA_INDEX_URL"
"$venv/bin/python" - <<'PY' || missing "torch in $venv is not a CPU build; point pip at PyTorch's CPU index with PIP_EXTRA_INDEX_URL and remove $venv"
import importlib.metadata as m, sys
sys.exit("+cpu" not in m.version("torch"))
PY
pip install --no-deps --no-compile --no-build-isolation --editable .
printf 'make setup: %s is ready (%d s)\n' "$venv" $((SECONDS - start))
