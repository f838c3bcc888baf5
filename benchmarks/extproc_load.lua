-- wrk: chat requests, each the next question in a conversation of the directory; a question is new
-- every time. Arguments: DIRECTORY CONVERSATIONS RUN
local heads, tails, number, run = {}, {}, 0, ""

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

function init(args)
  for at = 1, tonumber(args[2]) do
    heads[at] = read(args[1] .. "/" .. (at - 1) .. ".head")
    tails[at] = read(args[1] .. "/" .. (at - 1) .. ".tail")
  end
  run = args[3]
  wrk.headers["Content-Type"] = "application/json"
end

function request()
  number = number + 1
  local at = number % #heads + 1
  return wrk.format("POST", "/v1/chat/completions", nil,
    heads[at] .. run .. "-" .. string.format("%08d", number) .. tails[at])
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    '{"requests": %d, "microseconds": %d, "p50": %d, "p99": %d, "errors": %d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
