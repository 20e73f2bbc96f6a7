#!/usr/bin/env bash
# Builds an image: deploy/docker/build.sh cpu|gpu TAG [further arguments of the builder]
#   BUILDER   docker (the default), podman or buildah
#   PIP_CONF  a pip.conf that says where packages come from; the CPU image needs an index with CPU builds of torch
set -euo pipefail
cd "$(dirname "$0")/../.."
refuse() { printf 'build.sh: %s\n' "$*" >&2; exit 2; }

[ $# -ge 2 ] || refuse "usage: deploy/docker/build.sh cpu|gpu TAG [further arguments of the builder]"
kind=$1 tag=$2
shift 2
case $kind in
  cpu) bases=(PYTHON_IMAGE) ;;
  gpu) bases=(PYTHON_IMAGE RAY_LLM_IMAGE) ;;
  *) refuse "there is a cpu and a gpu image, no '$kind'" ;;
esac

arguments=()
for base in "${bases[@]}"; do
  # What the environment says goes before the file: to try another base, by its digest, too.
  image=${!base:-$(sed -n "s/^$base=//p" deploy/docker/digests.env)}
  [[ $image =~ ^[a-z0-9./_-]+(:[A-Za-z0-9._-]+)?@sha256:[0-9a-f]{64}$ || $image == localhost/* ]] ||
    refuse "$base is not pinned ($image): run deploy/docker/pin.sh where a registry can be reached, and look at what it changes"
  arguments+=(--build-arg "$base=$image")
done

revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain 2>/dev/null)" ] || revision+=-modified
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
arguments+=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision")
[ -z "${PIP_CONF:-}" ] || arguments+=(--secret "id=pip,src=$PIP_CONF")

builder=${BUILDER:-docker}
case $builder in
  docker) export DOCKER_BUILDKIT=1 ;;
  # Without Docker's own format a health check is left out.
  podman | buildah) arguments+=(--format docker) ;;
  *) refuse "no builder '$builder'" ;;
esac
exec "$builder" build --file "deploy/docker/Dockerfile.$kind" --tag "$tag" "${arguments[@]}" "$@" .
