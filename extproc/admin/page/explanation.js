// Explains why a request went to a worker: in words, and by every candidate's cost.

import { bar, cell, count, make, named, percent, pill, place, plural } from "./dom.js";

const MAX_CANDIDATES = 50;

const WITHOUT_PROMPT = {
  not_inference: "it calls no model",
  unkeyed_api: "prompts of its API are not keyed",
  no_body: "it has no body",
  body_too_large: "its body is too large to be read",
  body_not_buffered: "its body was not handed over whole",
  reads_no_cache: "it asks for the whole prompt to be computed again",
  unknown_model: "its model is not configured",
  bad_json: "its body is not JSON",
  odd_json: "its body is JSON only for some engines, and is not read here",
  unsupported_compression: "its body is compressed: put Envoy's decompressor before ext_proc",
  bad_request: "an engine will refuse it",
  empty_prompt: "its prompt is empty",
  no_tokenizer: "its model has no tokenizer here",
  deadline: "its tokens were not ready in time",
  internal_error: "the router had an internal error, which is in its log",
};

// What the list shows after the worker's name.
const SHORTLY = {
  overlap: "holds its prefix",
  uncertain_overlap: "probably holds its prefix",
  speculative_overlap: "will hold its prefix",
  approximate_overlap: "was sent its prefix before",
  nothing_cached: "had the least load; no worker holds its prefix",
};

// What decided on a request whose tokens are not known, in the same place.
const DECIDED = {
  texts: "was sent the same text before",
  session: "belongs to its session",
  conversation: "had its conversation last",
  response: "keeps the response that it continues",
  spread: "has fewer conversations",
};

export const inWords = (reason, by) => SHORTLY[reason] ?? (by in DECIDED ? `${DECIDED[by]} (${reason.replaceAll("_", " ")})` : reason.replaceAll("_", " "));

const WITHOUT_PICK = {
  no_override: "The proxy chooses; in dialect B it answers 503.",
  unavailable: "It is answered 503.",
  shed: "It is answered 429.",
};

// Whether the worker could be picked: of many workers, only a sample is compared.
const isPossible = (one) => !one.excluded && one.sampled;

const strong = (text) => make("strong", {}, text);

function because(decision, first) {
  const whole = plural(decision.weighed_tokens ?? decision.prompt_tokens, "prompt token");
  const left = `${plural(Math.max(0, Math.round(first.cost_terms.uncached_tokens)), "token")} left to compute`;
  switch (decision.reason) {
    case "overlap":
      return `it holds ${count(first.overlap_tokens)} of the ${whole} in its cache: ${left}.`;
    case "uncertain_overlap":
      return `it probably holds ${count(first.uncertain_tokens)} of the ${whole}; its feed cannot prove it.`;
    case "speculative_overlap":
      return `a request with the same prefix is under way there: ${count(first.speculative_tokens)} of the ${whole} are expected in its cache.`;
    case "approximate_overlap":
      return `requests with the same prefix were sent there: ${count(first.approximate_tokens)} of the ${whole} are probably in its cache.`;
    case "nothing_cached":
      if (decision.loads) return `it holds none of the ${whole}, and can load from a store.`;
      return `no worker holds its prefix (${whole}), and this one had the least load.`;
    default:
      if (decision.reason.startsWith("policy_")) return `the policy ${decision.reason.slice(7)} chose it, and it ignores caches.`;
      return `${decision.decided}: ${WITHOUT_PROMPT[decision.reason] ?? `its tokens are not known (${decision.reason})`}.`;
  }
}

function others(decision, first) {
  const able = decision.candidates.filter((one) => isPossible(one) && one !== first);
  const fuller = able.filter((one) => one.overlap_tokens > first.overlap_tokens);
  const tell = (one) => `cost ${count(one.cost)} against ${count(first.cost)} tokens of work`;
  if (decision.policy === "cost" && fuller.length) {
    const most = fuller.reduce((a, b) => (b.overlap_tokens > a.overlap_tokens ? b : a));
    return ` ${most.name} holds more of it (${count(most.overlap_tokens)}), but has more load: ${tell(most)}.`;
  }
  const cheapest = () => able.reduce((a, b) => (b.cost < a.cost ? b : a), able[0]);
  const next = able.find((one) => one.endpoint === decision.pick[1]) ?? cheapest();
  if (!next) return " No other worker could take it.";
  if (decision.policy === "cost" && next.cost === first.cost) return ` ${next.name} would have been as good (cost ${count(first.cost)} tokens of work): chance decided.`;
  return ` Next best was ${next.name}, which holds ${next.overlap_tokens ? count(next.overlap_tokens) : "none"}: ${tell(next)}.`;
}

// Which worker computes the prompt, if prefill and decode may be separate.
function computing({ prefill }) {
  if (!prefill) return "";
  const { here, apart } = prefill.cost;
  const costs = here === null ? "" : ` (cost ${count(here)} there, ${count(apart)} elsewhere)`;
  const who = prefill.pick ? `Its prompt is computed by ${named(prefill.pick)}` : "The same worker computes its prompt";
  const able = (prefill.candidates ?? []).filter((one) => !one.excluded && one.cost !== null && one.endpoint !== prefill.pick);
  const next = able.length ? able.reduce((a, b) => (b.cost < a.cost ? b : a)) : null;
  const other = next ? ` Next best for that was ${named(next.endpoint)}, cost ${count(next.cost)}.` : "";
  return ` ${who}: ${prefill.why}${costs}.${other}`;
}

const pulling = ({ source }) => (source ? ` It pulls ${plural(source.tokens, "token")} from ${named(source.endpoint)}.` : "");

// What the pick would load from a store: the router's own words.
const loading = ({ loads }) => (loads ? ` ${loads[0].toUpperCase()}${loads.slice(1)}.` : "");

// How many of a request's images and the like are known, if it has any.
function seen({ media }) {
  if (!media) return "";
  const known = media.known === media.count ? "all" : count(media.known);
  return ` Of its ${plural(media.count, "media item")}, ${known} are known from the workers' events${media.keyed ? "" : ", so the prompt is keyed up to the first that is not"}.`;
}

// The answer to the question, as a sentence.
export function sentence(decision, subject) {
  const first = decision.candidates.find((one) => one.endpoint === decision.pick[0]);
  if (!first) return make("p", { class: "verdict" }, `${subject} no worker: ${decision.why}. ${WITHOUT_PICK[decision.verdict] ?? ""}`);
  const where = make("p", { class: "verdict" }, `${subject} `, strong(first.name), " because ");
  where.append(because(decision, first), others(decision, first), computing(decision), pulling(decision), loading(decision), seen(decision));
  if (decision.steered === false) where.append(" It is not steered, so the proxy chooses.");
  if (decision.served && decision.served === first.endpoint) where.append(" The picked worker answered.");
  else if (decision.served) where.append(decision.steered === false ? " " : " But ", strong(named(decision.served)), " answered the request.");
  return where;
}

function held(one) {
  const tiers = Object.entries(one.overlap_blocks).filter(([, blocks]) => blocks);
  const where = tiers.map(([tier, blocks]) => `${plural(blocks, "block")} on ${tier}`).join(", ");
  const more = [
    ["uncertain", one.uncertain_tokens],
    ["unusable by its other attention groups or draft", one.unusable_tokens],
    ["expected", one.speculative_tokens],
    ["probably, as sent before", one.approximate_tokens],
  ].filter(([, tokens]) => tokens);
  const small = [where, ...more.map(([kind, tokens]) => `${count(tokens)} ${kind}`)].filter(Boolean);
  return [one.overlap_tokens ? count(one.overlap_tokens) : "none", small.length ? make("small", {}, small.join("; ")) : null];
}

// What each column counts. All costs are tokens of work: tokens, times the worker's slowness.
const TITLES = {
  feed: "The state of the worker's events now; live means that nothing is missing.",
  held: "Tokens of this prompt that the worker certainly holds in its cache.",
  compute: "Tokens of this prompt that the worker would have to compute, times its slowness, less what is granted for its conversation.",
  queued: "Prompt tokens that the worker still has to compute for earlier requests, times its slowness.",
  running: "Tokens for each request that runs there (policy.cost.running_tokens), times the worker's slowness.",
  cost: "To compute, queued and running together, in tokens of work; the lowest cost wins.",
};
const FACTORS = "Slowness: how long the worker takes for a token, against the configured speed; it is learned from its events and answers, and below 1 is faster. Weight: what a token to compute counts against one that waits; it grows with the load (policy.cost.affinity_percent and busy_affinity_percent).";

// How the cost of computing comes about, where it is not the number of tokens itself.
function computed({ uncached_tokens: tokens, slowness, uncached, session, fetched }) {
  const weight = tokens > 0 && slowness > 0 ? uncached / (tokens * slowness) : 1;
  const factors = [[slowness, "(slowness)"], [weight, "(weight)"]].filter(([factor]) => Math.abs(factor - 1) >= 0.005);
  const parts = [];
  if (tokens > 0 && factors.length) parts.push([plural(Math.round(tokens), "token"), ...factors.map(([factor, name]) => `${factor.toFixed(2)} ${name}`)].join(" × "));
  if (session >= 0.5) parts.push(`less ${count(session)} for its conversation`);
  if (fetched >= 0.5) parts.push(`less ${count(fetched)} for blocks that it would fetch`);
  return parts.length ? make("small", { class: "factors", title: FACTORS }, parts.join(", ")) : null;
}

function row(decision, one, most) {
  const at = decision.pick.indexOf(one.endpoint);
  const name = make("th", { role: "rowheader", scope: "row" }, one.name, " ");
  if (at === 0) name.append(pill("picked"));
  name.append(...place(one.name, one.endpoint).slice(1));
  if (at > 0) name.append(make("small", {}, `if that fails: number ${at + 1}`));
  if (one.excluded) name.append(make("small", {}, `not possible: ${one.excluded}`));
  else if (!one.sampled) name.append(make("small", {}, "not compared: not in the random sample"));
  const able = !one.excluded && one.cost !== null;
  const terms = one.cost_terms ?? {};
  const own = Math.max(0, (terms.uncached ?? 0) - (terms.session ?? 0) - (terms.fetched ?? 0));
  const crowd = terms.conversations ? make("small", {}, `${count(terms.conversations)} more for the conversations there`) : null;
  const siblings = terms.siblings ? make("small", {}, `${count(terms.siblings)} less for siblings just sent there`) : null;
  const queued = Math.max(0, (terms.queued ?? 0) - (terms.patience ?? 0));
  const parts = [["data-term", "compute", own], ["data-term", "queued", queued], ["data-term", "running", terms.running]];
  return make(
    "tr", { role: "row" }, name,
    cell("Feed now", { title: TITLES.feed }, pill(one.state)),
    cell("Holds, tokens", { title: TITLES.held }, ...held(one)),
    cell("To compute", { number: true, title: TITLES.compute }, able ? count(own) : "–", able ? computed(terms) : null),
    cell("Queued there", { number: true, title: TITLES.queued }, able ? count(queued) : "–", able && terms.patience ? make("small", {}, `${count(terms.patience)} more that its conversation does not mind`) : null),
    cell("Running there", { number: true, title: TITLES.running }, able ? count(terms.running) : "–"),
    cell("Cost", { wide: true, title: TITLES.cost }, able ? count(one.cost) : "–", able ? bar(parts, most) : null, able ? crowd : null, able ? siblings : null),
  );
}

const HEADS = [
  ["Worker"], ["Feed now", null, TITLES.feed], ["Holds, tokens", null, TITLES.held], ["To compute", "number", TITLES.compute],
  ["Queued there", "number", TITLES.queued], ["Running there", "number", TITLES.running], ["Cost", null, TITLES.cost],
];

// The candidates: the pick first, then by cost; at most this many.
export function candidates(decision, shown = MAX_CANDIDATES) {
  const rank = (one) => [one.excluded ? 2 : one.sampled ? 0 : 1, decision.pick.indexOf(one.endpoint) + 1 || 99, one.cost ?? 0];
  const sorted = [...decision.candidates].sort((a, b) => {
    const [x, y] = [rank(a), rank(b)];
    return x[0] - y[0] || x[1] - y[1] || x[2] - y[2];
  });
  const most = Math.max(...sorted.map((one) => (one.excluded ? 0 : one.cost ?? 0)), 1);
  const body = make("tbody", { role: "rowgroup" }, ...sorted.slice(0, shown).map((one) => row(decision, one, most)));
  const head = make("tr", { role: "row" }, ...HEADS.map(([words, kind, title]) => make("th", { role: "columnheader", scope: "col", class: kind, title }, words)));
  const hidden = sorted.length - shown;
  return [
    make("table", { role: "table", class: "stacked candidates" },
      make("caption", {}, "Cost of each candidate, in tokens of work (tokens × the worker's slowness): the lowest wins" + (decision.policy === "cost" ? "" : ` with the policy cost; this was decided by ${decision.policy}`)),
      make("thead", { role: "rowgroup" }, head), body),
    make("div", { class: "under" },
      make("ul", { class: "legend", "aria-hidden": "true" },
        make("li", { "data-term": "compute" }, "to compute for this request"),
        make("li", { "data-term": "queued" }, "queued before it"),
        make("li", { "data-term": "running" }, "share of what runs there")),
      hidden > 0 ? make("p", { class: "quiet" }, `and ${plural(hidden, "more candidate")}; its line below shows all`) : null),
  ];
}

// The text of a line in the list.
export function shortly(decision) {
  const whole = decision.weighed_tokens;
  const kinds = [["held", decision.predicted_tokens], ["uncertain", decision.uncertain_tokens], ["expected", decision.speculative_tokens], ["probable", decision.approximate_tokens]];
  const [kind, hit] = kinds.find(([, tokens]) => tokens) ?? kinds[0];
  const about = decision.prompt_tokens ? "" : "about "; // estimated: its tokens are not known
  return whole ? `${count(hit)} of ${about}${count(whole)} tokens ${kind} (${percent(hit, whole)})` : "no prompt";
}
