#!/usr/bin/env bash
# Builds the CPU image from its Dockerfile and serves from it, on a machine without a container engine or a registry:
# buildah without isolation of its own, a Debian root by debootstrap in place of the Python image, bubblewrap to run it.
# Takes minutes, 10 GB of disk and root: deploy/docker/rehearse.sh [further arguments of `buildah build`]
#   PIP_CONF    as for build.sh
#   REHEARSAL   folder for the root, the layers and the logs (default .cache/rehearsal); kept for the next time
#   PACKAGES    Debian's mirror for debootstrap (default: the first that this machine's apt has)
set -euo pipefail
cd "$(dirname "$0")/../.."
say() { printf 'rehearse.sh: %s (%d s)\n' "$*" $SECONDS; }
fail() { printf 'rehearse.sh: %s\n' "$*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || fail "must be root: it mounts and changes user"
for program in buildah debootstrap bwrap curl; do
  command -v "$program" > /dev/null || fail "$program is missing (Debian: buildah debootstrap bubblewrap curl)"
done

folder=$(realpath -m "${REHEARSAL:-.cache/rehearsal}")
mkdir -p "$folder/layers" "$folder/run"
printf '[storage]\ndriver = "overlay"\ngraphroot = "%s/layers"\nrunroot = "%s/run"\n' "$folder" "$folder" > "$folder/storage.conf"
export CONTAINERS_STORAGE_CONF=$folder/storage.conf BUILDAH_ISOLATION=chroot BUILDER=buildah
export PYTHON_IMAGE=localhost/python-stand-in:bookworm
image=localhost/caesura:rehearsal

stand_in() {
  local root=$folder/debian mirror container mounted
  mirror=${PACKAGES:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -1)}
  [ -e "$root/usr/local/bin/python" ] || {
    rm -rf "$root"
    debootstrap --variant=minbase --include=python3,python3-dev,python3-venv,ca-certificates bookworm "$root" "$mirror" > "$folder/debootstrap.log"
    rm -f "$root"/var/cache/apt/archives/*.deb
    ln -s /usr/bin/python3 "$root/usr/local/bin/python"
  }
  container=$(buildah from scratch)
  mounted=$(buildah mount "$container")
  cp -a "$root/." "$mounted/"
  buildah umount "$container" > /dev/null
  buildah commit --quiet --rm --format docker "$container" "$PYTHON_IMAGE" > /dev/null
}
buildah inspect --type image "$PYTHON_IMAGE" > /dev/null 2>&1 || stand_in
say "the stand-in for the Python image is there"
deploy/docker/build.sh cpu "$image" --layers "$@" > "$folder/build.log" 2>&1 || { tail -20 "$folder/build.log" >&2; fail "the build failed"; }
say "built: $(grep -o 'caesura .* is imported from .*' "$folder/build.log" | tail -1)"

container=$(buildah from "$image")
pid=
finish() {
  if [ -n "$pid" ]; then kill "$pid" 2> /dev/null || true; wait "$pid" 2> /dev/null || true; fi
  buildah umount "$container" > /dev/null && buildah rm "$container" > /dev/null
}
trap finish EXIT
root=$(buildah mount "$container")
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
setting() { buildah inspect --type image --format "{{range .Docker.Config.$1}}{{println .}}{{end}}" "$image" | sed '/^$/d'; }
mapfile -t environment < <(setting Env)
mapfile -t command < <(setting Entrypoint; setting Cmd)
# As compose.yaml runs it: a root that is read-only, /tmp (kept, for Ray's logs), a home in memory, the image's user, no capability.
rm -rf "$folder/tmp" && install --directory --mode=1777 "$folder/tmp"
env --ignore-environment "${environment[@]}" "CAESURA__HTTP__PORT=$port" HF_HUB_OFFLINE=1 \
  bwrap --ro-bind "$root" / --proc /proc --ro-bind /sys /sys --dev /dev --tmpfs /dev/shm --chmod 1777 /dev/shm --bind "$folder/tmp" /tmp \
  --tmpfs /home/caesura --chmod 1777 /home/caesura --chdir /home/caesura --unshare-pid --as-pid-1 --die-with-parent \
  /usr/bin/setpriv --reuid=10001 --regid=10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
  "${command[@]}" > "$folder/serve.log" 2>&1 &
pid=$!
for _ in $(seq 300); do
  curl --silent --fail --max-time 8 "http://127.0.0.1:$port/ready" > "$folder/ready.json" && break
  kill -0 "$pid" 2> /dev/null || { tail -30 "$folder/serve.log" >&2; fail "it ended before it was ready"; }
  sleep 1
done
grep -q '"ready"' "$folder/ready.json" || { tail -30 "$folder/serve.log" >&2; fail "it was not ready in time"; }
say "ready as user 10001, root read-only"
curl --silent --show-error --fail --max-time 60 -H 'content-type: application/json' -H 'x-session-id: first' \
  -d '{"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}' \
  "http://127.0.0.1:$port/v1/chat/completions" > "$folder/answer.json" || fail "no answer"
grep -q '"completion_tokens":[1-9]' "$folder/answer.json" || fail "no tokens: $(cat "$folder/answer.json")"
say "answered: $(grep -o '"usage":{[^}]*' "$folder/answer.json" | cut -c1-120)"
# What stops a container: SIGTERM to its first process. It must end by itself, having said so.
kill -TERM "$(ps -o pid= --ppid "$pid" | tr -d ' ')"
for _ in $(seq 60); do kill -0 "$pid" 2> /dev/null || break; sleep 1; done
kill -0 "$pid" 2> /dev/null && fail "it did not stop within 60 s"
wait "$pid" && pid= || fail "it stopped with status $?: $(tail -5 "$folder/serve.log")"
grep -q '^stopped' "$folder/serve.log" || fail "it did not say that it stopped: $(tail -5 "$folder/serve.log")"
say "stopped by SIGTERM"
