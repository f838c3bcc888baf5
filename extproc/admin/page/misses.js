// Shows why prompts were computed again, and which clients change theirs.

import { ask, bar, cell, clock, count, find, make, percent, show } from "./dom.js";

const FINE = ["new", "first", "block"]; // computed, and could not have been reused
const MOST_BREAKS = 3;
const MOST_TURNS = 8;
const MOST_CLIENTS = 8;

// Tokens that were reused, computed as they are new, and computed again, by cause.
function parted(tokens) {
  const all = Object.entries(tokens);
  const sum = (chosen) => chosen.reduce((whole, [, amount]) => whole + amount, 0);
  const again = all.filter(([cause]) => cause !== "reused" && !FINE.includes(cause)).sort(([, one], [, other]) => other - one);
  return { all: sum(all), reused: tokens.reused ?? 0, fresh: sum(all.filter(([cause]) => FINE.includes(cause))), again, lost: sum(again) };
}

function became({ all, reused, fresh, again, lost }) {
  const shares = [`${percent(reused, all)} reused`, `${percent(fresh, all)} new`];
  shares.push(`${percent(lost, all)} again${again.length ? `, mostly ${again[0][0].replace("_", " ")}` : ""}`);
  return [bar([["data-tokens", "reused", reused], ["data-tokens", "fresh", fresh], ["data-tokens", "again", lost]], all), make("small", {}, shares.join(" · "))];
}

function client({ client: name, tenant, model, turns, prompt_tokens: tokens, tokens: causes, again_seconds: seconds, again_price: price }) {
  const whose = [model, tenant && `tenant ${tenant}`].filter(Boolean).join(", ");
  const cost = price === null ? null : make("small", {}, `price ${price}`);
  return make("tr", { role: "row" },
    make("th", { role: "rowheader", scope: "row" }, name, make("small", {}, whose)),
    cell("Requests", { number: true }, count(turns)),
    cell("Prompt tokens", { number: true }, count(tokens)),
    cell("What became of them", { wide: true }, ...became(parted(causes))),
    cell("Prefill again", { number: true }, `${seconds.toFixed(1)} s`, cost));
}

let drawn = "";

export async function drawMisses() {
  const answer = await ask(`/misses?turns=${MOST_TURNS}`);
  for (const id of ["misses", "to-misses"]) find(id).hidden = !answer.enabled;
  const state = JSON.stringify(answer.turns?.at(-1)?.number ?? 0);
  if (!answer.enabled || state === drawn) return;
  drawn = state;
  const parts = parted(answer.tokens);
  show(find("misses-summary"), parts.all
    ? `${percent(parts.reused, parts.all)} of ${count(parts.all)} prompt tokens reused, ${percent(parts.lost, parts.all)} computed again, since the router started`
    : "No request with known tokens has ended yet.");
  const breaks = answer.breaks.slice(0, MOST_BREAKS).map(({ says }) => says);
  if (parts.all && !breaks.length) breaks.push("No client changed what it had sent before.");
  find("breaks").replaceChildren(...breaks.map((says) => make("li", {}, says)));
  find("miss-clients").replaceChildren(...answer.clients.slice(0, MOST_CLIENTS).map(client));
  const turns = answer.turns.toReversed().map((one) => make("li", {}, `${clock(one.at)} ${one.client}, conversation ${one.conversation}, turn ${one.turn}: ${one.says}`));
  find("turns").replaceChildren(...turns);
}
