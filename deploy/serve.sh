#!/usr/bin/env bash
# The rollout server beside a Ray head: waits for Ray, and is started again when it dies. A server
# that is started again finds its nodes and their sessions as they are.
#
# BRIDLE_CONFIG (/etc/bridle/bridle.toml), BRIDLE_DATABASE (postgresql://...; else SQLite),
# BRIDLE_SERVER_TOKEN, RAY_HEAD (127.0.0.1:6379), BRIDLE_RESTART_S (2: seconds between two tries).
set -u
config=${BRIDLE_CONFIG:-/etc/bridle/bridle.toml}
head=${RAY_HEAD:-127.0.0.1:6379}
pause=${BRIDLE_RESTART_S:-2}

until ray health-check --address "$head" >/dev/null 2>&1; do sleep "$pause"; done

server= told= # to end: whom we told of it, or `early` where there was nobody
trap 'told=${server:-early}; [ "$told" = early ] || kill -TERM "$server"' TERM INT
while [ -z "$told" ]; do
  RAY_ADDRESS=$head bridle serve --config "$config" \
    ${BRIDLE_DATABASE:+--database "$BRIDLE_DATABASE"} &
  server=$!
  [ "$told" != early ] || kill -TERM "$server"
  wait "$server"
  code=$?
  if [ "$code" -gt 128 ] && kill -0 "$server" 2>/dev/null; then # told to end: it drains
    wait "$server"
    code=$?
  fi
  case $code in
    0 | 2 | 130) exit "$code" ;; # it was told to end; or its configuration is wrong
  esac
  server=
  [ -z "$told" ] || break
  echo "serve.sh: the server ended with code $code; it is started again" >&2
  sleep "$pause"
done
