#!/usr/bin/env bash
# Prints the lines HOST:SLOTS of a file whose hosts accept connections on a port: the hosts of an elastic run.
#
#   ./jobs/answering_hosts.sh FILE PORT
set -uo pipefail
port=$2
answers() { [[ $1 == "$(uname -n)" || $1 == localhost ]] || timeout 5 bash -c ": >/dev/tcp/$1/$port"; }
while IFS= read -r line || [[ -n $line ]]; do # the last line may not be ended
    [[ $line == *?:[1-9]* ]] && { answers "${line%:*}" && echo "$line"; } 2>/dev/null &
done <"$1"
wait
exit 0
