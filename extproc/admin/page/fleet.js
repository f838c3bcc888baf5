// Shows the workers: feeds, caches, load and what they held over time.

import { ask, bar, cell, count, find, known, make, percent, pill, plural, show } from "./dom.js";

const MAX_WORKERS = 100;
const STEPS = 180;
const MAX_QUERY = 4000; // characters; the server refuses lines above 8,190
const SVG = "http://www.w3.org/2000/svg";
const rows = new Map();
let before = null;

const total = (tiers) => Object.values(tiers).reduce((sum, blocks) => sum + blocks, 0);
const sum = (numbers) => (numbers ?? []).reduce((all, one) => all + (one ?? 0), 0);

// What each state means, and where to look.
const ADVICE = {
  connecting: "Nothing is known about its cache: there was no connection yet. Check the address of its events, and that it publishes them.",
  replaying: "The router is fetching the events that it missed.",
  degraded: "Events were lost and could not be fetched again, so a part of its blocks is uncertain. It recovers as the worker stores new blocks. If it has a replay port, check that the port answers.",
  silent: "Its events are of no use, so requests are routed by what was sent to it before. Run kvsteer doctor --probe.",
  contradicted: "Its answers contradict its events, so nothing of it is certain, and what was sent to it before counts as well. Run kvsteer doctor --probe.",
  stale: "Its events no longer arrive, so its blocks are uncertain. Check that the worker runs, and that the port of its events can be reached.",
};
const DOWN = "It gets no requests until it answers. Check that its process runs, and read its log.";
const UNSEQUENCED = "Its messages cannot be used. Check what listens at the port of its events, and what relays them.";
const LACKING = "No events are missing yet, but the next gap could not be filled. Check that its replay port is correct and answers.";

const BEHIND = "Events arrive faster than they can be applied, so its blocks count as uncertain. Check whether it stores and removes blocks endlessly.";

const lacks = (worker) => worker.feeds.some((feed) => feed.reason);
const isBehind = (worker) => worker.feeds.some((feed) => feed.reason.startsWith("behind"));
const isWell = (worker) => worker.state === "live" && !worker.down && !lacks(worker);
const shownState = (worker) => (worker.down ? "down" : worker.state);

function advice(worker) {
  if (worker.down) return DOWN;
  if (worker.feeds.some((feed) => feed.reason.startsWith("its messages have no"))) return UNSEQUENCED;
  if (worker.state === "live") return isBehind(worker) ? BEHIND : lacks(worker) ? LACKING : null;
  return ADVICE[worker.state] ?? null;
}

// Describes a worker's feeds in words.
function reasons(worker) {
  const tokens = worker.tokens ?? {};
  const said = worker.feeds.filter((feed) => feed.reason).map((feed) => (worker.feeds.length > 1 ? `rank ${feed.rank}: ${feed.reason}` : feed.reason));
  if (worker.reason) said.unshift(worker.reason);
  if (worker.astray) said.unshift(`requests steered to it are answered elsewhere: ${worker.astray}`);
  if (worker.down) said.unshift(`the worker ${worker.down}`);
  if (worker.excluded) said.unshift(`takes no requests: ${worker.excluded}`);
  else if (worker.draining) said.unshift("draining: takes no new requests");
  if (worker.source_fault) said.push(`${worker.source}: ${worker.source_fault}`);
  if (tokens.state === "refuted") said.push(`its tokens differ from the router's: ${tokens.why}`);
  if (tokens.state === "unproved") said.push(`its tokens are not proved: ${tokens.why}`);
  if (worker.engine_reason) said.push(worker.engine ? worker.engine_reason : `its engine is unknown: ${worker.engine_reason}`);
  if (!worker.feeds.length && !worker.reason) said.push("publishes no events");
  return said.join("; ");
}

// How much of its cache is in use, if the engine reports that: it does not report the cache's size.
function usage(worker) {
  const shares = worker.feeds.map((feed) => feed.load?.cache_usage).filter((share) => share > 0);
  return shares.length ? Math.max(...shares) : null;
}

function tiers(worker) {
  const parts = Object.entries(worker.blocks_by_tier);
  const small = parts.filter(([tier, blocks]) => blocks && tier !== "device").map(([tier, blocks]) => `${count(blocks)} on ${tier}`);
  const uncertain = worker.feeds.reduce((all, feed) => all + feed.uncertain_blocks, 0);
  if (uncertain) small.push(`${count(uncertain)} uncertain`);
  const used = usage(worker);
  return [
    make("span", { class: "unbroken" }, plural(total(worker.blocks_by_tier), "block")),
    used === null ? null : bar([["data-tier", "device", used]], 1),
    used === null ? null : make("small", {}, `${percent(used, 1)} of the cache in use`),
    small.length ? make("small", {}, small.join(", ")) : null,
    contexts(worker),
  ];
}

// What the conversations that live there hold of its cache.
function contexts({ contexts: live }) {
  if (!live?.live_tokens) return null;
  const room = live.cache_tokens ? ` of ${count(live.cache_tokens)}` : "";
  return make("small", { title: TITLES.contexts }, `live contexts: ${count(live.live_tokens)}${room} tokens`);
}

// What went with requests as token ids, and why nothing goes any more.
function handing({ tokens }) {
  const samples = tokens?.samples;
  if (!samples) return null;
  const { refuted, handed_tokens: handed, handed_requests: requests } = samples;
  const ends = refuted ? `; none go any more: ${refuted}` : "";
  return make("small", { class: "handing", title: TITLES.handing }, `${plural(handed, "token")} handed over as ids in ${plural(requests, "request")}${ends}`);
}

// Why the engine may reuse less than the worker holds, if anything is known of that.
function reuse({ reuse: known }) {
  if (!known) return null;
  const parts = [];
  if (known.other_groups.length) parts.push(`hits end at multiples of ${plural(known.unit_tokens, "token")}`);
  if (known.draft_drop) parts.push("it drafts, and computes the last block again");
  if (known.uncertain_because) parts.push(`uncertain: ${known.uncertain_because.replaceAll("_", " ")}`);
  return parts.length ? make("small", { class: "reuse" }, parts.join("; ")) : null;
}

// The cached tokens that engines reported, if responses are read, beside the predicted ones.
function outcome({ predictions }) {
  if (!predictions?.requests) return null;
  const { requests, predicted_tokens: predicted, reported_tokens: reported } = predictions;
  const causes = Object.entries(predictions.causes).map(([cause, times]) => `${cause.replaceAll("_", " ")} ${count(times)}`);
  const wrong = causes.length ? `; differences: ${causes.join(", ")}` : "";
  return make("small", { class: "outcome", title: "Cached tokens that the router predicted, and those that the engine's answers reported. Differences: requests in which the two differ, by cause." }, `${plural(predicted, "cached token")} predicted, ${count(reported)} reported in ${plural(requests, "request")}${wrong}`);
}

const BARS = 30; // half a minute each, for the last 15 minutes
const [LEFT, TOP, WIDE, HIGH] = [32, 3, 156, 25];

function drawn(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// One bar for each half minute, as high as the share of cached tokens; the newest at the right.
function bars(series) {
  const start = STEPS - series.prompt_tokens.length;
  const each = STEPS / BARS;
  const sums = Array.from({ length: BARS }, () => [0, 0]);
  series.prompt_tokens.forEach((tokens, at) => {
    const into = sums[Math.floor((start + at) / each)];
    into[0] += series.predicted_tokens[at] ?? 0;
    into[1] += tokens ?? 0;
  });
  const width = WIDE / BARS;
  return sums.map(([held, tokens], at) => {
    if (!tokens) return "";
    const height = Math.max(1, (HIGH * held) / tokens);
    const x = LEFT + at * width;
    return `M${x.toFixed(1)} ${TOP + HIGH}v${(-height).toFixed(1)}h${(width - 1).toFixed(1)}v${height.toFixed(1)}z`;
  }).join("");
}

function spark(series) {
  const words = percent(sum(series?.predicted_tokens), sum(series?.prompt_tokens));
  if (words === "none") return [make("span", { class: "quiet" }, "no requests")];
  const base = TOP + HIGH;
  const svg = drawn("svg", { class: "spark", viewBox: "0 0 190 40", "aria-hidden": "true" },
    drawn("path", { class: "axes", d: `M${LEFT} ${TOP}h${WIDE}M${LEFT} ${base}h${WIDE}` }),
    drawn("path", { d: bars(series) }),
    drawn("text", { x: LEFT - 3, y: TOP + 6, "text-anchor": "end" }, "100 %"),
    drawn("text", { x: LEFT - 3, y: base, "text-anchor": "end" }, "0"),
    drawn("text", { x: LEFT, y: base + 10 }, "15 min ago"),
    drawn("text", { x: LEFT + WIDE, y: base + 10, "text-anchor": "end" }, "now"));
  return [make("span", { class: "rated" }, make("span", {}, words), svg)];
}

function speed(worker) {
  const { tokens_per_second: own, used_tokens_per_second: used, confidence } = worker.speed;
  const title = `${TITLES.speed} Now they use ${count(used)} tokens/s.`;
  return confidence ? make("small", { class: "unbroken", title }, `${count(own)} prompt tokens/s`) : null;
}

const TITLES = {
  feed: "The stream of events in which a worker reports its cache's contents; live means that nothing is missing.",
  contexts: "Tokens of the conversations that had a request there in the last two minutes, a prefix that several share once; and the tokens that the cache has room for. What does not fit is evicted, and computed again.",
  blocks: "Blocks of tokens that the worker holds in its cache, as its events say.",
  flying: "Requests that this router sent there and that have not ended.",
  speed: "How many prompt tokens a second the worker computes, learned from its events and answers. Costs use a speed between this one and the fleet's until enough prompts were seen.",
  handing: "Token ids that went with requests, so that the engine neither rendered nor tokenized these prompts.",
  rate: "Of the prompt tokens of the requests steered there, the share that the worker certainly held when they were sent.",
};

function row(worker, series) {
  const front = worker.engine?.frontend === "rust" ? ", Rust front end" : "";
  const engine = worker.engine ? `${worker.engine.name} ${worker.engine.version}${front}` : "";
  const small = [worker.model, engine, worker.endpoint === worker.name ? "" : worker.endpoint].filter(Boolean).join(" · ");
  const down = worker.down ? pill("down", "worker down") : null;
  const advised = advice(worker);
  return [
    make("th", { role: "rowheader", scope: "row" }, worker.name, " ", down, make("small", {}, small)),
    cell("Feed", { wide: true, title: TITLES.feed }, pill(worker.state), worker.state === "live" && lacks(worker) ? pill("degraded", isBehind(worker) ? "behind" : "no replay") : null,
      make("small", {}, reasons(worker)), advised ? make("small", { class: "advice" }, advised) : null),
    cell("Cache", { wide: true, title: TITLES.blocks }, ...tiers(worker).filter(Boolean)),
    cell("Requests in flight", { number: true, title: TITLES.flying }, count(worker.in_flight), speed(worker)),
    cell("Certainly held, 15 minutes", { wide: true, title: TITLES.rate }, ...spark(series), outcome(worker), reuse(worker), handing(worker)),
  ];
}

// Announces changed states to screen readers; nothing else on the page is announced.
function announce(workers) {
  const states = new Map(workers.map((worker) => [worker.name, shownState(worker)]));
  const changed = before === null ? [] : workers.filter((one) => before.has(one.name) && before.get(one.name) !== states.get(one.name));
  before = states;
  const said = changed.slice(0, 3).map((one) => `${one.name} is ${shownState(one)}`);
  if (changed.length > 3) said.push(`and ${plural(changed.length - 3, "other worker")} changed`);
  if (said.length) show(find("announcer"), said.join(", "));
}

function summarize(workers) {
  const states = new Map();
  for (const worker of workers) states.set(worker.state, (states.get(worker.state) ?? 0) + 1);
  const draining = workers.filter((one) => one.draining).length;
  const down = workers.filter((one) => one.down).length;
  const parts = [...states].map(([state, number]) => `${count(number)} ${state}`);
  const words = [parts.join(", ") || "none known", ...(draining ? [`${count(draining)} draining`] : []), ...(down ? [`${count(down)} down`] : [])].join("; ");
  const flying = workers.reduce((all, worker) => all + worker.in_flight, 0);
  show(find("fleet-summary"), `${plural(workers.length, "worker")}: ${words} · ${plural(flying, "request")} in flight`);
}

// The figures at the top: how much was cached, and how much more than with round robin.
function tellGain(fleet) {
  const [prompts, held, average] = [sum(fleet?.prompt_tokens), sum(fleet?.predicted_tokens), sum(fleet?.average_tokens)];
  const saved = held - average;
  const [answered, reported] = [sum(fleet?.answered_tokens), sum(fleet?.reported_tokens)];
  show(find("gain-rate"), answered ? percent(reported, answered) : "not reported");
  show(find("gain-certain"), prompts ? percent(held, prompts) : "–");
  show(find("gain-saved"), prompts ? plural(Math.max(0, saved), "token") : "–");
  show(find("gain-words"), !prompts ? "Of the last 15 minutes. No request was placed by what workers hold yet."
    : `Of the last 15 minutes, in ${plural(prompts, "prompt token")}. Round robin would have found about ${percent(average, prompts)}.`);
}

function redraw(place, key, cells) {
  const known = rows.get(key);
  const element = known ?? make("tr", { role: "row" });
  const drawn = make("tr", { role: "row" }, ...cells);
  if (known === undefined || !known.isEqualNode(drawn)) element.replaceChildren(...drawn.childNodes);
  rows.set(key, element);
  if (place.parent.children[place.at] !== element) place.parent.insertBefore(element, place.parent.children[place.at] ?? null);
}

// Names may be long, but the line of a request may not.
async function histories(names) {
  const queries = [""];
  for (const name of names) {
    const asked = `worker=${encodeURIComponent(name)}`;
    if (queries.at(-1).length + asked.length > MAX_QUERY) queries.push("");
    queries.push([queries.pop(), asked].filter(Boolean).join("&"));
  }
  const merged = { workers: {} };
  for (const query of queries) {
    const { fleet, workers } = await ask(`/history?${query}`);
    merged.fleet = fleet;
    Object.assign(merged.workers, workers);
  }
  return merged;
}

export async function drawFleet() {
  const workers = await ask("/workers");
  known(workers);
  const shown = [...workers].sort((a, b) => isWell(a) - isWell(b)).slice(0, MAX_WORKERS);
  const history = await histories(shown.map((one) => one.name));
  const parent = find("workers");
  shown.forEach((worker, at) => redraw({ parent, at }, worker.name, row(worker, history.workers[worker.name])));
  const names = new Set(shown.map((worker) => worker.name));
  for (const [name, element] of rows) {
    if (!names.has(name)) { element.remove(); rows.delete(name); }
  }
  const hidden = workers.length - shown.length;
  find("fleet-more").hidden = hidden <= 0;
  show(find("fleet-more"), `and ${plural(hidden, "more worker")}, all of them live or after these; GET /workers has them`);
  summarize(workers);
  tellGain(history.fleet);
  announce(workers);
  return workers;
}

function sourceFault({ source, workers, age_seconds: age, fault, note }) {
  if (!fault) return `${source}: ${note}`;
  const last = workers === null ? "it has listed none yet" : `its last list is still used: ${plural(workers, "worker")}, ${plural(Math.round(age / 60), "minute")} old`;
  return `${source}: ${fault}; ${last}`;
}

// What the router itself finds wrong, with what to do about it.
export async function drawFaults() {
  const faults = await ask("/faults");
  const place = find("faults");
  place.hidden = !faults.length;
  const lines = faults.map(({ subject, says, fix }) => make("li", {}, `${subject}: ${says}`, make("small", {}, `To do: ${fix}.`)));
  place.replaceChildren(...lines);
}

// What live conversations need of the caches, by model, and who waits for room there.
export async function drawContexts() {
  const models = (await ask("/contexts")).filter(({ says }) => says);
  const named = models.length > 1;
  const said = models.map((one) => (named ? `${one.model}: ${one.says}` : one.says));
  show(find("contexts"), said.join(" · "));
  find("contexts").title = said.length ? TITLES.contexts : "";
  const lists = models.filter(({ places }) => places.length).map((one) => waiting(one, named));
  find("waiting").hidden = !lists.length;
  find("waiting").replaceChildren(...lists);
}

function waiting({ model, places, waiting: all }, named) {
  const lines = places.map((one) => `${one.conversation}: ${count(one.tokens)} tokens, ${plural(Math.round(one.seconds), "second")}${one.is_away ? ", may come again" : ""}`);
  const words = `${named ? `${model}: the` : "The"} first of ${plural(all, "request")} that wait for room`;
  return make("li", {}, make("details", {}, make("summary", {}, words), make("ul", {}, ...lines.map((line) => make("li", {}, line)))));
}

// The sources of workers that fail, or that list something wrong.
export async function drawSources() {
  const sources = (await ask("/discovery")).filter(({ fault, note }) => fault || note);
  const place = find("sources");
  place.hidden = !sources.length;
  const lines = sources.map((source) => make("li", {}, sourceFault(source)));
  place.replaceChildren(...lines);
}

function routersSaid({ alone, routers }) {
  if (alone) return `No other router can be reached, so this one decides alone: ${alone}`;
  if (!routers.length) return "No message from another router yet.";
  const others = routers.map((one) => `${one.name} (${Math.round(one.age_ms)} ms ago, ${one.in_flight} in flight)`);
  return `Shared with ${plural(routers.length, "other router")}: ${others.join(", ")}.`;
}

// The routers that this one shares with; nothing if sharing is off.
export async function drawRouters() {
  const routers = await ask("/routers");
  const place = find("routers");
  place.hidden = !routers;
  if (!routers) return;
  place.className = routers.alone ? "notice" : "quiet";
  show(place, routersSaid(routers));
}

// The share of requests that are steered, if not all; and why too few of these arrive, if so.
export async function drawSteering() {
  const { percent, fault } = await ask("/steering");
  const share = percent < 100 ? `${percent} % of the requests are steered; for the others the proxy chooses, and their decisions below are only noted.` : "";
  const place = find("steering");
  place.hidden = !share && !fault;
  show(place, [share, fault && `Attention: ${fault}`].filter(Boolean).join(" "));
}

function keyedSaid({ api, requests, keyed, reasons }) {
  const share = `${api}: the tokens of ${percent(keyed, requests)} of ${plural(requests, "request")} are known`;
  const [first] = Object.entries(reasons);
  return first ? `${share}; of the others most (${count(first[1])}) are ${first[0].replaceAll("_", " ")}.` : `${share}.`;
}

// The APIs by which requests came in the last 15 minutes, and how many of them could be keyed.
export async function drawApis() {
  const apis = await ask("/apis");
  const place = find("apis");
  place.hidden = !apis.length;
  place.replaceChildren(...apis.map((one) => make("li", {}, keyedSaid(one))));
}

// The kinds of media that came in the last 15 minutes, and with how many items prompts were keyed.
export async function drawMedia() {
  const kinds = await ask("/media");
  const place = find("media");
  const shareOf = ({ kind, items, keyed }) => `${kind}: prompts are keyed with ${percent(keyed, items)} of ${plural(items, "item")}.`;
  place.hidden = !kinds.length;
  place.replaceChildren(...kinds.map((one) => make("li", {}, shareOf(one))));
}

export async function drawEvents() {
  const { enabled } = await ask("/events");
  const place = find("events");
  place.dataset.state = enabled ? "on" : "off";
  show(place, enabled ? "KV events: on" : "KV events: off");
  find("events-off").hidden = enabled;
}
