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

server= signal= # the last signal: `early` when no server ran
end_server() {
  told=yes signal=${server:-early}
  [ -z "$server" ] || kill -TERM "$server" 2>/dev/null
}
told= code=0
trap end_server TERM INT

until [ -n "$told" ] || ray health-check --address "$head" >/dev/null 2>&1; do sleep "$pause"; done

while [ -z "$told" ]; do
  RAY_ADDRESS=$head bridle serve --config "$config" \
    ${BRIDLE_DATABASE:+--database "$BRIDLE_DATABASE"} &
  server=$!
  [ "$signal" != early ] || end_server
  # A signal ends `wait` before the server has ended; the exit status of one that has ended is kept.
  signal=any
  while [ -n "$signal" ]; do
    signal=
    wait "$server"
    code=$?
  done
  server=
  case $code in
    0 | 2 | 130) break ;; # it was told to end; or its configuration is wrong
  esac
  [ -z "$told" ] || break
  echo "serve.sh: the server ended with code $code; it is started again" >&2
  sleep "$pause"
done
exit "$code"
