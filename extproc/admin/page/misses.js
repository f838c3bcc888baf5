// Shows why prompts were computed again, and which clients change theirs.

import { ask, bar, cell, clock, count, find, make, percent, show } from "./dom.js";

const MOST_BREAKS = 3;
const MOST_TURNS = 8;
const MOST_CLIENTS = 8;

// Tokens that were reused, computed as they are new, and computed again.
function parted({ tokens, again_tokens: again }) {
  const all = Object.values(tokens).reduce((sum, amount) => sum + amount, 0);
  const reused = tokens.reused ?? 0;
  return { all, reused, again, fresh: all - reused - again };
}

function became({ all, reused, fresh, again }, cause) {
  const shares = [`${percent(reused, all)} reused`, `${percent(fresh, all)} new`];
  shares.push(`${percent(again, all)} again${cause ? `, mostly ${cause.replace("_", " ")}` : ""}`);
  return [bar([["data-tokens", "reused", reused], ["data-tokens", "fresh", fresh], ["data-tokens", "again", again]], all), make("small", {}, shares.join(" · "))];
}

function client(one) {
  const { client: name, tenant, model, turns, prompt_tokens: tokens, again_seconds: seconds, again_price: price } = one;
  const whose = [model, tenant && `tenant ${tenant}`].filter(Boolean).join(", ");
  const cost = price === null ? null : make("small", {}, `price ${price}`);
  return make("tr", { role: "row" },
    make("th", { role: "rowheader", scope: "row" }, name, make("small", {}, whose)),
    cell("Requests", { number: true }, count(turns)),
    cell("Prompt tokens", { number: true }, count(tokens)),
    cell("What became of them", { wide: true }, ...became(parted(one), one.cause)),
    cell("Prefill again", { number: true }, `${seconds.toFixed(1)} s`, cost));
}

let drawn = "";

export async function drawMisses() {
  const answer = await ask(`/misses?turns=${MOST_TURNS}`);
  for (const id of ["misses", "to-misses"]) find(id).hidden = !answer.enabled;
  const state = JSON.stringify(answer.turns?.at(-1)?.number ?? 0);
  if (!answer.enabled || state === drawn) return;
  drawn = state;
  const parts = parted(answer);
  show(find("misses-summary"), parts.all
    ? `${percent(parts.reused, parts.all)} of ${count(parts.all)} prompt tokens reused, ${percent(parts.again, parts.all)} computed again, since the router started`
    : "No request with known tokens has ended yet.");
  const breaks = answer.breaks.slice(0, MOST_BREAKS).map(({ says }) => says);
  if (parts.all && !breaks.length) breaks.push("No client changed what it had sent before.");
  find("breaks").replaceChildren(...breaks.map((says) => make("li", {}, says)));
  find("miss-clients").replaceChildren(...answer.clients.slice(0, MOST_CLIENTS).map(client));
  const turns = answer.turns.toReversed().map((one) => make("li", {}, `${clock(one.at)} ${one.client}, conversation ${one.conversation}, turn ${one.turn}: ${one.says}`));
  find("turns").replaceChildren(...turns);
}
