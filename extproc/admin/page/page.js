// Starts the page: what it fetches, how often, and whether the router answers.

import { followDecisions, paused, startPause } from "./decisions.js";
import { ask, find, make, show } from "./dom.js";
import { startExplain } from "./explain.js";
import { drawApis, drawContexts, drawEvents, drawFaults, drawFleet, drawMedia, drawRouters, drawSources, drawSteering } from "./fleet.js";
import { drawMisses } from "./misses.js";
import { drawPrefixes } from "./prefixes.js";

const EVERY_MS = 2000;
const PREFIXES_EVERY = 3; // every third time, since finding them is costly

let workers = [];
let draws = 0;

function tellConnected(isConnected) {
  const place = find("connection");
  const state = isConnected ? "connected" : "disconnected";
  if (place.dataset.state === state) return;
  if (!isConnected || place.dataset.state === "disconnected") show(find("announcer"), `router ${state}`);
  place.dataset.state = state;
  show(place, isConnected ? "connected" : "router unreachable: trying again");
}

async function draw() {
  if (!document.hidden && !paused()) {
    try {
      workers = await drawFleet();
      await drawContexts();
      await drawMisses();
      await drawApis();
      await drawMedia();
      await drawEvents();
      await drawFaults();
      await drawSources();
      await drawRouters();
      await drawSteering();
      if (draws++ % PREFIXES_EVERY === 0) await drawPrefixes(workers.length);
      tellConnected(true);
    } catch {
      tellConnected(false);
    }
  }
  setTimeout(draw, EVERY_MS);
}

// Opens a closed section when a link leads to it.
function openNamed() {
  const details = /^#[\w-]+$/.test(location.hash) && document.querySelector(`section${location.hash} > details`);
  if (details) details.open = true;
}

async function tellAbout() {
  const { version, documentation } = await ask("/", { headers: { Accept: "application/json" } });
  find("about").replaceChildren(`KVSteer ${version}`);
  if (!documentation) return;
  const pages = [["documentation", "index.md"], ["this page", "troubleshooting.md#the-page-and-the-admin-api"], ["reasons", "metrics.md#reasons-of-a-decision"], ["troubleshooting", "troubleshooting.md"]];
  for (const [name, target] of pages) find("about").append(" · ", make("a", { href: `${documentation}/${target}`, rel: "noreferrer" }, name));
}

tellAbout().catch(() => {});
openNamed();
addEventListener("hashchange", openNamed);
document.querySelector("nav").addEventListener("click", () => setTimeout(openNamed));
startPause();
startExplain(() => workers[0]?.model ?? "");
followDecisions(tellConnected);
draw();
