#!/usr/bin/env bash
# What `make gpu` runs: the kit, in an environment of its own that is made from a folder of wheels, without network.
#   WHEELS  folder of the wheels; without it, the environment of an earlier call, .venv, or $PYTHON is used
#   LOCK    the list of what is installed (requirements/gpu.lock)
set -euo pipefail
cd "$(dirname "$0")/../.."
lock=${LOCK:-requirements/gpu.lock} venv=${GPU_VENV:-.cache/gpu-venv}
missing() { printf 'make gpu: %s\n' "$*" >&2; exit 2; }

python=$(command -v "${PYTHON:-python3.11}" || command -v python3 || true)
[ -n "$python" ] || missing "Python 3.11 is missing. Install it, or name it: make gpu PYTHON=/path/to/python3.11"
rehearsal=
[[ " $* " != *" --device cpu "* && " $* " != *" --device=cpu "* ]] || rehearsal=yes

if [ -n "${WHEELS:-}" ]; then
  [ -d "$WHEELS" ] || missing "WHEELS=$WHEELS is not a folder; bash requirements/gpu_wheels.sh FOLDER fills one"
fi
if [ -n "${WHEELS:-}" ] && { [ -n "$rehearsal" ] || [ -e /dev/nvidiactl ] || command -v nvidia-smi > /dev/null; }; then
  if ! cmp -s "$lock" "$venv/.installed"; then
    "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
      missing "Python 3.11 is needed (the wheels are built for it); $python is $("$python" -V 2>&1)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    # Only the folder counts: no index, and no further folder of the machine's own settings.
    env -u PIP_FIND_LINKS -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null "$venv/bin/python" -m pip \
      --disable-pip-version-check --quiet install --no-index --no-deps --no-compile --find-links "$WHEELS" -r "$lock" ||
      missing "$WHEELS lacks a wheel of $lock (see above); bash requirements/gpu_wheels.sh FOLDER fills a folder"
    cp "$lock" "$venv/.installed"
  fi
  python=$venv/bin/python
elif [ -x "$venv/bin/python" ]; then
  python=$venv/bin/python
elif [ -x .venv/bin/python ]; then
  python=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
unset PYTHONDONTWRITEBYTECODE
exec "$python" -m benchmarks.gpu_kit "$@"
