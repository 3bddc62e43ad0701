#!/bin/sh
# Runs the chat example on a server (BASE, by default http://127.0.0.1:9865): a room that is made with its first members in one bundle, a follower who
# sees messages as they come, and a writer who was cut off and comes back late. Each run works in a new room. Ends with 1 where anything is not as
# it should be.
set -eu
BASE=${BASE:-http://127.0.0.1:9865}
export BASE
here=$(dirname "$0")
if ! curl -sf -o /dev/null "$BASE/v1/entities/message"; then
  echo "$0: no server at $BASE that serves message: start one with the built-in types (quokka serve), or name it: BASE=http://HOST:PORT $0" >&2
  exit 1
fi
room="$(date +%s)-$$"
place=$(mktemp -d)
follower=
cleanup() {
  # The shell that follows, and its curl.
  [ -z "$follower" ] || { pkill -P "$follower" 2>/dev/null || true; kill "$follower" 2>/dev/null || true; }
  rm -rf "$place"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

fail() {
  echo "$0: $*" >&2
  exit 1
}

bundle() {
  expected=$1
  answer=$(curl -sS -w '\n%{http_code}' "$BASE/v1/bundles" -H 'Content-Type: application/json' -d "$2")
  printf '%s\n' "$answer"
  [ "${answer##*[!0-9]}" = "$expected" ] || fail "expected status $expected"
}

command() {
  printf '{"entity_type":"room","entity_id":"%s","command":"%s","command_id":"%s","request":%s}' "$room" "$1" "$2" "$3"
}

echo "# A room, its first members and a welcome are made together or not at all"
welcome="{\"entity_type\":\"message\",\"command\":\"post\",\"command_id\":\"welcome-$room\",\"request\":{\"room\":\"$room\",\"author\":\"quokka\",\"text\":\"Welcome!\"}}"
created=$(command create c '{"title":"Animals"}')
ann=$(command join ann '{"name":"ann"}')
bob=$(command join bob '{"name":"bob"}')
bundle 200 "{\"commands\":[$created,$ann,$bob,$welcome]}"

echo
echo "# A bundle that breaks a rule leaves nothing: ann is a member already, so eve is none"
eve=$(command join eve '{"name":"eve"}')
again=$(command join ann-again '{"name":"ann"}')
bundle 422 "{\"commands\":[$eve,$again]}"
curl -sS "$BASE/v1/entities/room/$room" | grep -q '"members":\["ann","bob"\]' || fail "the members should be ann and bob"

echo
echo "# A follower sees messages as they are posted"
"$here/follow.sh" "$room" >"$place/seen" 2>/dev/null &
follower=$!
"$here/write.sh" "$place/ann" "$room" ann 'Who eats "leaves"?'

echo
echo "# bob is cut off: nobody answers, so his messages wait with their command ids"
BASE=http://127.0.0.1:9 "$here/write.sh" "$place/bob" "$room" bob 'I do.' 2>/dev/null && fail "nobody should answer there"
BASE=http://127.0.0.1:9 "$here/write.sh" "$place/bob" "$room" bob 'And grass.' 2>/dev/null && fail "nobody should answer there"
"$here/write.sh" "$place/ann" "$room" ann 'Anybody?'

echo
echo "# He comes back, and sends them twice, since he does not know what has arrived"
cp -r "$place/bob" "$place/bob-again"
"$here/write.sh" "$place/bob"
"$here/write.sh" "$place/bob-again"

cat >"$place/expected" <<'EXPECTED'
quokka: Welcome!
ann: Who eats \"leaves\"?
ann: Anybody?
bob: I do.
bob: And grass.
EXPECTED
tries=0
while [ "$(wc -l <"$place/seen")" -lt 5 ] && [ $tries -lt 100 ]; do
  tries=$((tries + 1))
  sleep 0.1
done
cat "$place/seen"
# bob's two may have been handled by different partitions, which have no order between them.
[ "$(sort "$place/seen")" = "$(sort "$place/expected")" ] || fail "the follower should have seen each message once"

echo
echo "# The last two messages, and what comes before them"
curl -sS "$BASE/v1/feed?types=message&order=desc&limit=2"
echo
echo
echo "All answers are as they should be."
