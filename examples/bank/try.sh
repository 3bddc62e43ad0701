#!/bin/sh
# Runs the bank example on a server (BASE, by default http://127.0.0.1:9865) and shows every request with its answer.
# Each run works on new accounts. Ends with 1 where an answer has another status than it should.
set -eu
BASE=${BASE:-http://127.0.0.1:9865}
if ! curl -sf -o /dev/null "$BASE/v1/entities/account"; then
  echo "$0: no server at $BASE that serves account: start one with the built-in types (quokka serve), or name it: BASE=http://HOST:PORT $0" >&2
  exit 1
fi
alice="$(date +%s)-$$"
bob="v$alice"

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

# run STATUS ACCOUNT COMMAND COMMAND_ID REQUEST
run() {
  request "$1" POST "/v1/entities/account/$2/$3" -H 'Content-Type: application/json' -H "Idempotency-Key: $4" -d "$5"
}

echo "# An account with 100 cents, and 50 more"
run 200 "$alice" open open-1 '{"amount":100,"owner":"alice"}'
run 200 "$alice" deposit pay-1 '{"amount":50}'

echo
echo "# The same command again is not run again: the same answer, the same version"
run 200 "$alice" deposit pay-1 '{"amount":50}'

echo
echo "# A charge that the balance does not allow is refused, and the refusal is recorded as a version"
run 422 "$alice" charge pay-2 '{"amount":500}'
run 200 "$alice" charge pay-3 '{"amount":150}'

echo
echo "# A request that breaks its schema never becomes a version"
run 400 "$alice" charge pay-4 '{"amount":-1}'

echo
echo "# What there is now, what led to it, and what one command was answered"
request 200 GET "/v1/entities/account/$alice"
request 200 GET "/v1/entities/account/$alice/events"
request 200 GET "/v1/entities/account/$alice/commands/pay-1"

echo
echo "# A vip account may go 1,000.00 below zero, and no further"
run 200 "$bob" open open-1 '{"owner":"bob","vip":true}'
run 200 "$bob" charge pay-1 '{"amount":100000}'
run 422 "$bob" charge pay-2 '{"amount":1}'

echo
echo "All answers are as they should be."
