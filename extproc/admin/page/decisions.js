// The last decisions, as they come, and the newest one in full at the top of the page.

import { ask, clock, find, make, plural } from "./dom.js";
import { candidates, inWords, sentence, shortly } from "./explanation.js";

const MAX_SHOWN = 50;
const LAST_EVERY_MS = 1500;
const LAST_CANDIDATES = 8; // of the newest; opened in the list, it shows more

let isPaused = false;
let waiting = [];
let newest = null;
let shownLast = 0;
let drawing = false;

const list = () => find("decision-list");
const isRead = () => isPaused || list().querySelector("details[open]") !== null || list().contains(document.activeElement);

async function open(details, id) {
  const place = details.querySelector("div");
  if (!details.open || details.dataset.told) return;
  try {
    const told = await ask(`/decisions/${id}`);
    place.replaceChildren(sentence(told, "The router picked"), ...candidates(told).filter(Boolean));
    details.dataset.told = "yes";
  } catch (error) {
    place.replaceChildren(make("p", { class: "fault" }, error.message));
  }
}

function line(told) {
  const where = told.pick[0] ?? "no worker";
  const details = make("details", { "data-id": told.id },
    make("summary", {},
      make("time", { datetime: new Date(told.at * 1000).toISOString() }, clock(told.at)),
      make("span", { class: "said" }, make("strong", {}, where), told.prefill ? ` with ${told.prefill}, which computes the prompt:` : "", ` ${inWords(told.reason)}`, told.model ? ` · ${told.model}` : ""),
      make("span", { class: "share" }, shortly(told))),
    make("div", {}));
  details.addEventListener("toggle", () => { open(details, told.id); release(); });
  return make("li", {}, details);
}

function put(decisions) {
  list().prepend(...decisions.slice(-MAX_SHOWN).reverse().map(line));
  while (list().childElementCount > MAX_SHOWN) list().lastElementChild.remove();
}

function tellWaiting() {
  const button = find("held");
  button.hidden = waiting.length === 0;
  button.textContent = `Show ${plural(waiting.length, "new decision")}`;
}

function release() {
  if (!waiting.length || isRead()) return;
  put(waiting);
  waiting = [];
  tellWaiting();
}

async function drawLast() {
  if (drawing || isPaused || newest === null || newest.id === shownLast) return;
  drawing = true;
  const { id } = newest;
  try {
    const told = await ask(`/decisions/${id}`);
    const about = `${clock(told.at)} · request ${told.id}${told.model ? ` · model ${told.model}` : ""} · policy ${told.policy}`;
    find("last-body").replaceChildren(
      make("p", { class: "quiet" }, about), sentence(told, "The router picked"), ...candidates(told, LAST_CANDIDATES).filter(Boolean));
    shownLast = id;
  } catch { /* the router is away, or made very many others meanwhile: the newest is asked for next */ }
  setTimeout(() => { drawing = false; drawLast(); }, LAST_EVERY_MS);
}

function take({ decisions }) {
  if (!decisions.length) return;
  if (newest !== null && decisions.at(-1).id < newest.id) list().replaceChildren(); // another router
  newest = decisions.at(-1);
  waiting = [...waiting, ...decisions].slice(-MAX_SHOWN);
  release();
  tellWaiting();
  drawLast();
}

let source = null;

function connect(tellConnected) {
  if (source !== null || document.hidden) return;
  const opened = new EventSource(`/decisions?since=${newest?.id ?? 0}`);
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

// A page that nobody sees holds no stream: a browser opens six connections to a server, not more.
export function followDecisions(tellConnected) {
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
    put(waiting);
    waiting = [];
    tellWaiting();
    list().querySelector("summary")?.focus();
  });
}

export const paused = () => isPaused;
