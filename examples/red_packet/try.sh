#!/bin/sh
# Runs the red packet example on a server (BASE, by default http://127.0.0.1:9865) and shows every request with its answer.
# Each run works on new packets. Ends with 1 where an answer has another status than it should.
set -eu
BASE=${BASE:-http://127.0.0.1:9865}
if ! curl -sf -o /dev/null "$BASE/v1/entities/red_packet"; then
  echo "$0: no server at $BASE that serves red_packet: start one with the built-in types (quokka serve), or name it: BASE=http://HOST:PORT $0" >&2
  exit 1
fi
packet="$(date +%s)-$$"

# request STATUS METHOD PATH [curl arguments]
request() {
  expected=$1 method=$2 path=$3
  shift 3
  printf '\n%s %s %s\n' "$method" "$path" "$*"
  answer=$(curl -sS -X "$method" -w '\n%{http_code}' "$@" "$BASE$path")
  status=${answer##*[!0-9]}
  printf '%s\n' "$answer"
  if [ "$status" != "$expected" ]; then
    echo "$0: expected status $expected" >&2
    exit 1
  fi
}

# run STATUS PACKET COMMAND COMMAND_ID REQUEST
run() {
  request "$1" POST "/v1/entities/red_packet/$2/$3" -H 'Content-Type: application/json' -H "Idempotency-Key: $4" -d "$5"
}

echo "# 1,000 cents in three shares"
run 200 "$packet" create create '{"amount":1000,"count":3}'

echo
echo "# Three users take a share each; a name is only a name"
run 200 "$packet" take take-1 '{"user":"alice"}'
run 200 "$packet" take take-2 '{"user":"constructor"}'
run 200 "$packet" take take-3 '{"user":"__proto__"}'

echo
echo "# Nobody takes twice, and the fourth finds it empty"
run 422 "$packet" take take-4 '{"user":"alice"}'
run 422 "$packet" take take-5 '{"user":"__proto__"}'
run 422 "$packet" take take-6 '{"user":"dave"}'

echo
echo "# Who got what"
request 200 GET "/v1/entities/red_packet/$packet"

echo
echo "# Less than 1 cent a share is no packet"
run 422 "x$packet" create create '{"amount":2,"count":3}'

echo
echo "All answers are as they should be."
