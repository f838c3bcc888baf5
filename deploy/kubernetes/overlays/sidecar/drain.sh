# Lets Envoy finish its open requests before Kubernetes stops it: the preStop hook of its container.
#
#   bash drain.sh [LIMIT [NOTICE [PORT]]]
#
# NOTICE: seconds in which new connections are still accepted, until every node knows that this pod
# is stopping (5). LIMIT: seconds for open requests after that (600). PORT: of Envoy's admin server,
# on loopback (9901). Exits with 0 when no request is open, or Envoy has stopped; with 1 when time
# is up, which Kubernetes shows in the pod's events.
#
# Needs only bash and sleep: Envoy's image has no HTTP client. In a distroless image, which has no
# shell, use `preStop: {sleep: {seconds: N}}` with the time of your longest generation.
limit=${1:-600}
notice=${2:-5}
port=${3:-9901}
set -f # no globbing in Envoy's answer

# Sends a request to the admin server and sets $answer; fails if nothing listens.
ask() {
  local line
  answer=
  {
    printf '%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n' "$1" "$2" >&3
    while IFS= read -r -t 5 line <&3; do answer+=" ${line%$'\r'}"; done
  } 3<>"/dev/tcp/127.0.0.1/$port" 2>/dev/null
}

# Sets $under_way to the number of open requests of all listeners, or to nothing if Envoy does not
# report it.
count() {
  local name= word
  under_way=
  ask GET '/stats?filter=downstream_rq_active$' || return 1
  for word in $answer; do # name, colon, value
    case $name in
      http.admin.*) ;;
      http.*.downstream_rq_active:) under_way=$((${under_way:-0} + word)) ;;
    esac
    name=$word
  done
}

# From now on answers close their connections, so that clients send their next request elsewhere.
ask POST /healthcheck/fail || exit 0
sleep "$notice"
ask POST /drain_listeners || exit 0
until=$((SECONDS + limit))
while count && [ "$under_way" != 0 ]; do
  if [ "$SECONDS" -ge "$until" ]; then
    echo "requests still under way after $limit s: ${under_way:-unknown}" >&2
    exit 1
  fi
  sleep 0.5
done
exit 0
