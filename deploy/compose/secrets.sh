#!/usr/bin/env bash
# Makes what compose.yaml takes from ./secrets, or from the folder given: passwords, and API keys with their digests.
# Nobody else on this machine can enter the folder. In it, what a container reads is readable: it has another user id.
set -euo pipefail
folder=${1:-$(dirname "$0")/secrets}
[ ! -e "$folder" ] || { printf 'secrets.sh: %s is there already; remove it to make new ones\n' "$folder" >&2; exit 1; }
random() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }
digest() { printf %s "$1" | sha256sum | cut -d' ' -f1; }

mkdir -m 700 "$folder"
cd "$folder"
redis=$(random) api=csk-$(random) metrics=csk-$(random) admin=csk-$(random)

printf %s "$redis" > redis_password
printf 'requirepass %s\nappendonly yes\nappendfsync everysec\n' "$redis" > redis.conf
printf %s "$metrics" > metrics_key
printf %s "$(random)" > grafana_password
mkdir keys
cat > keys/keys.yaml <<KEYS
# Digests only. \`caesura keys new --tenant NAME\` makes further entries; changes are read while Caesura serves.
keys:
- {tenant: default, sha256: $(digest "$api"), roles: [serve], name: compose}
- {tenant: default, sha256: $(digest "$metrics"), roles: [metrics], name: prometheus}
- {tenant: default, sha256: $(digest "$admin"), roles: [admin], name: operator}
KEYS
chmod 644 redis_password redis.conf metrics_key grafana_password keys/keys.yaml
chmod 755 keys
(umask 077 && printf %s "$api" > api_key && printf %s "$admin" > admin_key)
printf 'secrets.sh: wrote %s; your keys are in api_key and admin_key, the password of Grafana'\''s admin in grafana_password\n' "$folder"
