#!/usr/bin/env bash
# Writes into digests.env the digests that the registry has now for the tags there. Look at the difference, then commit it.
# Needs docker with buildx and a way to the registry: deploy/docker/pin.sh [NAME ...], without names every entry.
set -euo pipefail
file=$(dirname "$0")/digests.env
names=("$@")
[ ${#names[@]} -gt 0 ] || mapfile -t names < <(sed -n 's/^\([A-Z_]*\)=.*/\1/p' "$file")
for name in "${names[@]}"; do
  image=$(sed -n "s/^$name=//p" "$file")
  [ -n "$image" ] || { printf 'pin.sh: %s has no %s\n' "$file" "$name" >&2; exit 2; }
  tagged=${image%@*}
  digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$tagged")
  [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || { printf 'pin.sh: no digest of %s: %s\n' "$tagged" "$digest" >&2; exit 1; }
  sed -i "s|^$name=.*|$name=$tagged@$digest|" "$file"
  printf '%s=%s@%s\n' "$name" "$tagged" "$digest"
done
