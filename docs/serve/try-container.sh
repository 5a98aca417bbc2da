#!/usr/bin/env bash
# Tries a container of docs/serve/Dockerfile as the lines at its head run it: it answers with a key, and a stop ends it well.
#
#     docs/serve/try-container.sh IMAGE
set -euo pipefail
image=${1:?"expected the name of an image"}
keys=$(mktemp)
echo "a-key-for-this-test-alone" > "$keys"
chmod 644 "$keys"
name=$(docker run --detach --publish 127.0.0.1:18080:8080 --volume "$keys:/keys:ro" --read-only --stop-timeout 60 "$image" --api-key-file /keys)
ended() {
  docker logs "$name" || true
  docker rm --force "$name" > /dev/null
  rm -f "$keys"
}
trap ended EXIT
for _ in $(seq 100); do
  curl --silent --fail http://127.0.0.1:18080/health && break
  sleep 0.2
done
ask() {
  curl --silent --output /dev/null --write-out '%{http_code}' "$@" http://127.0.0.1:18080/v1/completions \
    --data '{"prompt": "list files", "max_tokens": 4}'
}
test "$(ask)" = 401
test "$(ask --header "authorization: Bearer $(cat "$keys")")" = 200
docker stop "$name" > /dev/null
status=$(docker inspect --format '{{.State.ExitCode}}' "$name")
test "$status" = 0 || { echo "the container ended with $status" >&2; exit 1; }
echo "the container answers, and ends when it is told to"
