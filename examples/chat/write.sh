#!/bin/sh
# Writes a message, or sends what could not be sent before:
#
#   examples/chat/write.sh SPOOL ROOM AUTHOR TEXT   notes the message in the folder SPOOL, then sends all that lies there
#   examples/chat/write.sh SPOOL                    sends all that lies there
#
# A message lies in the spool, with its command id, until the server has answered it: so it can be sent again whenever it is not known whether it
# arrived, and is there once. BASE is the server, by default http://127.0.0.1:9865. Ends with 1 where messages are still unsent.
set -eu
BASE=${BASE:-http://127.0.0.1:9865}
spool=$1
mkdir -p "$spool"
if [ $# -gt 1 ]; then
  quote() { printf '%s' "$1" | sed 's/[\\"]/\\&/g'; }
  now=$(date +%s)
  number=$(($(ls "$spool" | wc -l) + 1))
  id="$3-$now-$$-$number"
  printf '{"entity_type":"message","command":"post","command_id":"%s","request":{"room":"%s","author":"%s","text":"%s","written_at":%s000}}\n' \
    "$id" "$(quote "$2")" "$(quote "$3")" "$(quote "$4")" "$now" >"$spool/$now-$$-$number.new"
  # Whole or not there at all.
  mv "$spool/$now-$$-$number.new" "$spool/$now-$$-$number.json"
fi
set -- "$spool"/*.json
[ -e "$1" ] || exit 0
answers=$(cat "$@" | curl -sS "$BASE/v1/commands" -H 'Content-Type: application/x-ndjson' --data-binary @-) || exit 1
# One answer a line, in the order of the messages. What was answered, now or before, needs to be sent no more.
left=0
for message in "$@"; do
  answer=$(printf '%s\n' "$answers" | head -n 1)
  answers=$(printf '%s\n' "$answers" | tail -n +2)
  case $answer in
  '{"status":200,'*) rm "$message" ;;
  *) left=1 && printf 'not sent: %s\n' "$answer" >&2 ;;
  esac
done
exit $left
