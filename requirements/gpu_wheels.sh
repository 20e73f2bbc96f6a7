#!/usr/bin/env bash
# Fills a folder with the wheels of gpu.lock, on a machine with network, for `make gpu WHEELS=FOLDER` on one without:
#   bash requirements/gpu_wheels.sh FOLDER
# pip chooses wheels for the Python that runs it: Python 3.11 on Linux x86_64, with a glibc that is not newer than that of
# the other machine. A second call downloads only what is missing.
set -euo pipefail
lock=$(dirname "$0")/gpu.lock
refuse() { printf 'gpu_wheels.sh: %s\n' "$*" >&2; exit 2; }

[ $# -eq 1 ] || refuse "usage: bash requirements/gpu_wheels.sh FOLDER"
python=$(command -v "${PYTHON:-python3.11}" || true)
[ -n "$python" ] || refuse "Python 3.11 is missing. Install it, or name it: PYTHON=/path/to/python3.11"
[ "$("$python" -c 'import sys; print(sys.version_info[:2] == (3, 11))') $(uname -sm)" = "True Linux x86_64" ] ||
  refuse "the wheels are for Python 3.11 on Linux x86_64; this is $("$python" -V 2>&1) on $(uname -sm)"
mkdir -p "$1"
"$python" -m pip --disable-pip-version-check download --no-deps --only-binary :all: --find-links "$1" --dest "$1" -r "$lock"
"$python" -m pip --disable-pip-version-check --quiet install --dry-run --ignore-installed --no-index --no-deps \
  --find-links "$1" -r "$lock"
printf 'gpu_wheels.sh: %s has all %d packages, %s\n' "$1" "$(grep -c == "$lock")" "$(du -sh "$1" | cut -f1)"
