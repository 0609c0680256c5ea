-- wrk script for examples/service.py: requests random rows and checks every response.
-- A row is torn if its columns differ. Rows are mixed if they differ while no version is being applied.

local NUM_ROWS, IDS = 20000, 20
local threads = {}
torn, mixed, malformed, oldest, newest = 0, 0, 0, math.huge, -1

function setup(thread)
   table.insert(threads, thread)
end

function request()
   local ids = {}
   for place = 1, IDS do
      ids[place] = "ids=" .. math.random(0, NUM_ROWS - 1)
   end
   return wrk.format("GET", "/rows?" .. table.concat(ids, "&"))
end

function response(status, headers, body)
   local version, applying, rows = body:match('^{"version":(%d+),"applying":(%w+),"rows":%[(.*)%]}$')
   if status ~= 200 or not version then
      malformed = malformed + 1
      return
   end
   oldest, newest = math.min(oldest, tonumber(version)), math.max(newest, tonumber(version))
   local first, count
   count = 0
   for row in rows:gmatch("%[(.-)%]") do
      local value = row:match("^[^,]+")
      first, count = first or value, count + 1
      for column in row:gmatch("[^,]+") do
         if column ~= value then torn = torn + 1 end
      end
      if applying == "null" and value ~= first then mixed = mixed + 1 end
   end
   if count ~= IDS then malformed = malformed + 1 end
end

function done(summary, latency, requests)
   local total = { torn = 0, mixed = 0, malformed = 0, versions = 0 }
   local errors = 0
   for _, count in pairs(summary.errors) do errors = errors + count end
   for _, thread in ipairs(threads) do
      for _, name in ipairs({ "torn", "mixed", "malformed" }) do
         total[name] = total[name] + thread:get(name)
      end
      total.versions = math.max(total.versions, thread:get("newest") - thread:get("oldest"))
   end
   io.write(string.format(
      '{"requests": %d, "errors": %d, "malformed": %d, "torn": %d, "mixed": %d, "versions": %d, "p99_ms": %.1f}\n',
      summary.requests, errors, total.malformed, total.torn, total.mixed, total.versions, latency:percentile(99) / 1000
   ))
end
