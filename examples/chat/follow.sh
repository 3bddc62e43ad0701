#!/bin/sh
# Shows the messages of a room as they are posted, until Ctrl-C:
#
#   examples/chat/follow.sh ROOM [SINCE]
#
# SINCE is a token of the feed, or `now`; left out, it begins with the oldest message. Where the connection breaks, it goes on where it was.
# BASE is the server, by default http://127.0.0.1:9865.
set -eu
BASE=${BASE:-http://127.0.0.1:9865}
room=$1
place=$(mktemp)
printf '%s' "${2:-}" >"$place"
trap 'rm -f "$place"' EXIT
trap 'exit 130' INT TERM

# Shows what an event tells, and only then notes its token: so none is lost where the connection breaks in between.
show() {
  token= event=
  while IFS= read -r line; do
    case $line in
    id:*) token=${line#id:} ;;
    data:*) event=${line#data:} ;;
    "")
      case $event in
      *'"command":"post"'*"\"room\":\"$room\""*)
        # The members of a request are sorted, so each has its place.
        printf '%s\n' "$event" | sed -n 's/.*"request":{"author":"\([^"]*\)","room":"[^"]*","text":"\(\([^"\\]\|\\.\)*\)".*/\1: \2/p'
        ;;
      esac
      [ -z "$token" ] || printf '%s' "${token# }" >"$place"
      token= event=
      ;;
    esac
  done
}

while :; do
  since=$(cat "$place")
  curl -sSN "$BASE/v1/feed?types=message${since:+&since=$since}" -H 'Accept: text/event-stream' | show || true
  sleep 1
done
