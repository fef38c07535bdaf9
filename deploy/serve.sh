#!/usr/bin/env bash
# The rollout server beside a Ray head: waits for Ray, and is started again when it dies. A server
# that is started again finds its nodes and their sessions as they are.
#
# BRIDLE_CONFIG (/etc/bridle/bridle.toml), BRIDLE_DATABASE (postgresql://...; else SQLite),
# BRIDLE_TOKENIZER (a folder or hub id; else the config's),
# BRIDLE_SERVER_TOKEN, RAY_HEAD (127.0.0.1:6379), BRIDLE_RESTART_S (2: seconds between two tries).
set -u
config=${BRIDLE_CONFIG:-/etc/bridle/bridle.toml}
head=${RAY_HEAD:-127.0.0.1:6379}
pause=${BRIDLE_RESTART_S:-2}

server= code=0
signalled= # empty until a signal comes; then the process id of the server that ran, or `early`
end_server() {
  signalled=${server:-early}
  [ -z "$server" ] || kill -TERM "$server" 2>/dev/null
}
trap end_server TERM INT

until [ -n "$signalled" ] || ray health-check --address "$head" >/dev/null 2>&1; do sleep "$pause"; done

while [ -z "$signalled" ]; do
  RAY_ADDRESS=$head bridle serve --config "$config" \
    ${BRIDLE_DATABASE:+--database "$BRIDLE_DATABASE"} \
    ${BRIDLE_TOKENIZER:+--tokenizer "$BRIDLE_TOKENIZER"} &
  server=$!
  [ "$signalled" != early ] || end_server
  # Not `wait` at once: bash loses the status of a child that ends while a signal interrupts `wait`.
  # No `$(...)` either: bash 5.2 takes a signal that it handles within one for a syntax error.
  while kill -0 "$server" 2>/dev/null; do sleep 1; done
  wait "$server"
  code=$?
  server=
  case $code in
    0 | 2 | 130) break ;; # a signal ended it; or its configuration is wrong
  esac
  [ -z "$signalled" ] || break
  echo "serve.sh: the server ended with code $code; it is started again" >&2
  sleep "$pause"
done
exit "$code"
