#!/usr/bin/env bash
# Makes TAG, a stand-in for the Dockerfile's base image where no image can be pulled: Debian bookworm of debootstrap with its own
# Python 3.11. It has this machine's package mirror and CA certificates, so apt, pip and uv in containers reach what they reach
# here. About 2 minutes and 110 MB. Nothing is done where TAG exists. Needs root. Usage: docker_base.sh TAG
set -euo pipefail
tag=${1:?usage: docker_base.sh TAG}
SUITE=bookworm
CERTIFICATES=/etc/ssl/certs/ca-certificates.crt

docker image inspect "$tag" >/dev/null 2>&1 && exit 0
command -v debootstrap >/dev/null || apt-get install -qq --no-install-recommends debootstrap >/dev/null
mirror=$(apt-get indextargets --format "\$(REPO_URI)" 'Created-By: Packages' 'Origin: Debian' 'Component: main' | grep -v security | head -n 1) || true  # none
[[ -n $mirror ]] || { echo "docker_base: apt names no Debian mirror; run apt-get update" >&2; exit 1; }

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$SUITE" "$root" "$mirror" >"$root.log" 2>&1 ||
  { tail -n 20 "$root.log" >&2; exit 1; }
# Slim, as the image it stands for.
printf 'path-exclude /usr/share/%s/*\n' doc man info locale >"$root/etc/dpkg/dpkg.cfg.d/slim"
rm -rf "$root.log" "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,info,locale}/*
cp "$CERTIFICATES" "$root$CERTIFICATES"
# uv and pip bring certificate lists of their own unless told.
tar -C "$root" -c . | docker import --change "ENV SSL_CERT_FILE=$CERTIFICATES PIP_CERT=$CERTIFICATES" - "$tag"
