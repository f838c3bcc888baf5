# Lets Envoy finish what it has begun, before Kubernetes ends it: the preStop of its container.
#
#   bash drain.sh [LIMIT [NOTICE [PORT]]]
#
# NOTICE: seconds in which new connections are still taken, until every node knows that this pod is
# going (5). LIMIT: seconds for what is under way after that (600). PORT: of Envoy's admin server, on
# loopback (9901). Ends with 0 when nothing is under way, or Envoy is gone; with 1 when time was up:
# Kubernetes then tells it in the pod's events.
#
# Needs bash and sleep, no more: Envoy's image has no HTTP client. A distroless image has no shell;
# there `preStop: {sleep: {seconds: N}}` is what is left, as long as your longest generation.
limit=${1:-600}
notice=${2:-5}
port=${3:-9901}
set -f # no file names in what Envoy answers

# Sends a request to the admin server and sets $answer; fails where nobody listens.
ask() {
  local line
  answer=
  {
    printf '%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n' "$1" "$2" >&3
    while IFS= read -r -t 5 line <&3; do answer+=" ${line%$'\r'}"; done
  } 3<>"/dev/tcp/127.0.0.1/$port" 2>/dev/null
}

# Sets $under_way to the number of requests of all listeners, or to nothing where Envoy does not say.
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

# Answers close their connections from now on, so that clients go elsewhere with the next request.
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
