"""The Lua filter by which Envoy finds the model of a request that the router did not name.

Without it, all requests would go to the first model's workers while the router is away, and these
refuse other models. It reads the body as the engines do (Python's json): the model is the last
member `model` of the outermost object, whatever inner objects, texts and escapes hold. Bodies in
UTF-16 or UTF-32, and those with more than STEPS brackets and quotes, take the default route.
"""

from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.filters.http.lua import v3 as lua

from extproc.base.headers import MODEL
from extproc.config.schema import Config

# Envoy's thread does nothing else meanwhile: some tenths of a second at most.
STEPS = 2_000_000

_CODE = r"""local known = {KNOWN}
local MOST = STEPS
local escaped = {b = "\b", f = "\f", n = "\n", r = "\r", t = "\t"}

local function in_utf8(code)
  local char = string.char
  if code < 0x80 then return char(code) end
  local last = 0x80 + code % 0x40
  if code < 0x800 then return char(0xC0 + math.floor(code / 0x40), last) end
  local third = 0x80 + math.floor(code / 0x40) % 0x40
  if code < 0x10000 then return char(0xE0 + math.floor(code / 0x1000), third, last) end
  local second = 0x80 + math.floor(code / 0x1000) % 0x40
  return char(0xF0 + math.floor(code / 0x40000), second, third, last)
end

local function unescaped(text)
  if not text:find("\\", 1, true) then return text end
  local parts, at = {}, 1
  while true do
    local slash = text:find("\\", at, true)
    if not slash then break end
    parts[#parts + 1] = text:sub(at, slash - 1)
    local high, low = text:match("^u([dD][89abAB]%x%x)\\u([dD][c-fC-F]%x%x)", slash + 1)
    local one = text:match("^u(%x%x%x%x)", slash + 1)
    if high then
      local code = (tonumber(high, 16) - 0xD800) * 0x400 + tonumber(low, 16) - 0xDC00
      parts[#parts + 1], at = in_utf8(0x10000 + code), slash + 12
    elseif one then
      parts[#parts + 1], at = in_utf8(tonumber(one, 16)), slash + 6
    else
      local letter = text:sub(slash + 1, slash + 1)
      parts[#parts + 1], at = escaped[letter] or letter, slash + 2
    end
  end
  parts[#parts + 1] = text:sub(at)
  return table.concat(parts)
end

local function model_of(text)
  local steps = 0
  -- Where the text ends that begins here: at a quote behind an even number of backslashes.
  local function closing(start)
    local from = start
    while steps < MOST do
      steps = steps + 1
      local quote = text:find('"', from, true)
      if not quote then return nil end
      local before = quote - 1
      while before >= start and text:byte(before) == 0x5C do before = before - 1 end
      if (quote - before) % 2 == 1 then return quote end
      from = quote + 1
    end
  end
  local depth, at, name = 0, 1, nil
  while steps < MOST do
    steps = steps + 1
    local start = text:find('[%[%]{}"]', at)
    if not start then return name end
    local mark = text:byte(start)
    at = start + 1
    if mark == 0x22 then
      local close = closing(at)
      if not close then return nil end
      local value = depth == 1 and text:match("^[ \t\r\n]*:[ \t\r\n]*()", close + 1)
      if value and close - start < 64 and unescaped(text:sub(at, close - 1)) == "model" then
        local finish = text:byte(value) == 0x22 and closing(value + 1)
        name = finish and unescaped(text:sub(value + 1, finish - 1)) or nil
      end
      at = close + 1
    else
      depth = depth + ((mark == 0x7B or mark == 0x5B) and 1 or -1)
    end
  end
end

function envoy_on_request(handle)
  if handle:headers():get("HEADER") then return end
  local body = handle:body()
  if not body then return end
  local model = known[model_of(body:getBytes(0, body:length()))]
  if not model then return end
  handle:headers():replace("HEADER", model)
  handle:clearRouteCache()
end
"""


def model_finder(config: Config) -> lua.Lua:
    """Returns the filter for the names that requests may use for the configured models."""
    known = {
        name: model.name
        for model in config.models
        for name in (model.name, *model.aliases, *model.lora)
    }
    table = ", ".join(f"[{_literal(name)}] = {_literal(model)}" for name, model in known.items())
    code = _CODE.replace("STEPS", str(STEPS)).replace("HEADER", MODEL)
    code = code.replace("{KNOWN}", f"{{{table}}}", 1)
    return lua.Lua(default_source_code=core.DataSource(inline_string=code))


def _literal(text: str) -> str:
    """Returns a string literal of Lua 5.1, with all but letters and digits escaped."""
    plain = "".join(
        chr(byte) if chr(byte).isascii() and chr(byte).isalnum() else f"\\{byte:03d}"
        for byte in text.encode()
    )
    return f'"{plain}"'
