// Shows the latest decisions as they arrive, and the newest one in full at the top of the page.

import { ask, clock, find, make, named, place, plural } from "./dom.js";
import { candidates, inWords, sentence, shortly } from "./explanation.js";

const MAX_KEPT = 512; // as many as the router keeps
const AT_FIRST = 10;
const STEP = 40;
const LAST_EVERY_MS = 1500;
const LAST_CANDIDATES = 3; // shown of the newest; opened in the list, it shows more
const SHARE = "Prompt tokens that the picked worker certainly held (held), may hold (uncertain), will hold by a request under way (expected), or holds by the record of what was sent there (probable).";
const FILTERS = ["model", "worker", "reason"];

let isPaused = false;
let kept = []; // the newest first
let waiting = 0; // how many of these are not shown yet
let shown = AT_FIRST;
let shownLast = 0;
let drawing = false;
const lines = new Map();

const list = () => find("decision-list");
const isRead = () => isPaused || list().querySelector("details[open]") !== null || list().contains(document.activeElement);
const chosen = (kind) => find(`filter-${kind}`).value;

const matches = (decision) => FILTERS.every((kind) => !chosen(kind) || decision[kind] === chosen(kind));

async function open(details, id) {
  const into = details.querySelector("div");
  if (!details.open || details.dataset.loaded) return;
  try {
    const decision = await ask(`/decisions/${id}`);
    into.replaceChildren(sentence(decision, "The router picked"), ...candidates(decision).filter(Boolean));
    details.dataset.loaded = "yes";
  } catch (error) {
    into.replaceChildren(make("p", { class: "fault" }, error.message));
  }
}

function line(decision) {
  const where = decision.worker || "no worker";
  const [, address] = place(where, decision.pick[0]);
  const details = make("details", { "data-id": decision.id },
    make("summary", {},
      make("time", { datetime: new Date(decision.at * 1000).toISOString() }, clock(decision.at)),
      make("span", { class: "said" }, make("strong", {}, where), address ? " " : "", address ?? null, decision.prefill ? ` with ${named(decision.prefill)}, which computes the prompt:` : "", ` ${inWords(decision.reason, decision.decided_by)}`, decision.model ? ` · ${decision.model}` : ""),
      make("span", { class: "share", title: SHARE }, shortly(decision))),
    make("div", {}));
  details.addEventListener("toggle", () => { open(details, decision.id); release(); });
  return make("li", {}, details);
}

// Updates the list; lines that stay are not created again, so that open ones stay open.
function put() {
  const found = kept.slice(waiting).filter(matches);
  const wanted = found.slice(0, shown);
  const ids = new Set(wanted.map((decision) => decision.id));
  for (const id of lines.keys()) if (!ids.has(id)) lines.delete(id);
  for (const decision of wanted) if (!lines.has(decision.id)) lines.set(decision.id, line(decision));
  list().replaceChildren(...wanted.map((decision) => lines.get(decision.id)));
  find("more").hidden = found.length <= shown;
  find("more").textContent = `Show more (${found.length - wanted.length} kept)`;
  offer();
}

// Offers the values of the kept decisions as filters; a chosen value stays.
function offer() {
  for (const kind of FILTERS) {
    const select = find(`filter-${kind}`);
    const values = [...new Set([...kept.map((decision) => decision[kind]).filter(Boolean), ...[select.value].filter(Boolean)])].sort();
    if (select.options.length === values.length + 1 && values.every((value, at) => select.options[at + 1].value === value)) continue;
    const before = select.value;
    const words = (value) => (kind === "reason" ? value.replaceAll("_", " ") : value);
    select.replaceChildren(make("option", { value: "" }, "all"), ...values.map((value) => make("option", { value }, words(value))));
    select.value = before;
  }
}

function tellWaiting() {
  const button = find("held");
  const matching = kept.slice(0, waiting).filter(matches).length;
  button.hidden = matching === 0;
  button.textContent = `Show ${plural(matching, "new decision")}`;
}

function release() {
  if (waiting && !isRead()) letIn();
}

function letIn() {
  waiting = 0;
  put();
  tellWaiting();
}

async function drawLast() {
  const last = kept[0];
  if (drawing || isPaused || !last || last.id === shownLast) return;
  drawing = true;
  const { id } = last;
  try {
    const decision = await ask(`/decisions/${id}`);
    const about = `${clock(decision.at)} · request ${decision.id}${decision.model ? ` · model ${decision.model}` : ""} · policy ${decision.policy}`;
    find("last-body").replaceChildren(
      make("p", { class: "quiet" }, about), sentence(decision, "The router picked"), ...candidates(decision, LAST_CANDIDATES).filter(Boolean));
    shownLast = id;
  } catch { /* the router is away, or made many others since: the newest is fetched next */ }
  setTimeout(() => { drawing = false; drawLast(); }, LAST_EVERY_MS);
}

function take({ decisions }) {
  if (!decisions.length) return;
  if (kept.length && decisions.at(-1).id < kept[0].id) { // it is another router
    kept = [];
    waiting = shownLast = 0;
    lines.clear();
  }
  const news = decisions.filter((decision) => !kept.length || decision.id > kept[0].id).reverse();
  waiting = Math.min(waiting + news.length, MAX_KEPT);
  kept = [...news, ...kept].slice(0, MAX_KEPT);
  release();
  tellWaiting();
  drawLast();
}

let source = null;

function connect(tellConnected) {
  if (source !== null || document.hidden) return;
  const opened = new EventSource(`/decisions?since=${kept[0]?.id ?? 0}`);
  source = opened;
  opened.addEventListener("message", (event) => take(JSON.parse(event.data)));
  opened.addEventListener("open", () => tellConnected(true));
  opened.addEventListener("error", () => {
    tellConnected(false);
    if (opened.readyState !== EventSource.CLOSED || source !== opened) return;
    source = null;
    setTimeout(() => connect(tellConnected), 3000);
  });
}

function disconnect() {
  source?.close();
  source = null;
}

// A hidden page keeps no stream: a browser opens at most six connections to a server.
export async function followDecisions(tellConnected) {
  offer();
  // fetch all, for the filters: the stream begins with the last few
  await ask("/decisions").then(take, () => {});
  connect(tellConnected);
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect(tellConnected)));
  window.addEventListener("pagehide", disconnect);
  window.addEventListener("pageshow", () => connect(tellConnected));
  list().addEventListener("focusout", () => setTimeout(release));
}

export function startPause() {
  const button = find("pause");
  button.addEventListener("click", () => {
    isPaused = !isPaused;
    button.setAttribute("aria-pressed", String(isPaused));
    release();
    drawLast();
  });
  find("held").addEventListener("click", () => {
    letIn();
    list().querySelector("summary")?.focus();
  });
  find("filters").addEventListener("change", () => {
    shown = AT_FIRST;
    put();
    tellWaiting();
  });
  find("filters").addEventListener("submit", (event) => event.preventDefault());
  find("more").addEventListener("click", () => {
    shown += STEP;
    put();
  });
}

export const paused = () => isPaused;
