// Shows how widely the prefixes of the latest requests are spread.

import { ask, bar, cell, count, find, make, plural, show } from "./dom.js";

function holder(one, tokens) {
  const tiers = Object.entries(one.blocks_by_tier).filter(([, blocks]) => blocks);
  const certain = tiers.reduce((all, [, blocks]) => all + blocks, 0);
  const parts = tiers.map(([tier, blocks]) => ["data-tier", tier, (one.tokens * blocks) / certain]);
  parts.push(["data-tier", "uncertain", one.uncertain_tokens]);
  const where = tiers.map(([tier]) => tier).join(", ");
  const uncertain = one.uncertain_tokens ? `, ${count(one.uncertain_tokens)} uncertain` : "";
  return make("li", {}, one.name, bar(parts, tokens), make("small", {}, `${count(one.tokens)} of ${count(tokens)} tokens${where ? ` on ${where}` : ""}${uncertain}`));
}

function row(prefix, fleet) {
  const kind = [prefix.model, prefix.lora && `adapter ${prefix.lora}`, prefix.salted && "salted"].filter(Boolean).join(", ");
  const unseen = prefix.held_by - prefix.workers.length;
  return make("tr", { role: "row" },
    make("th", { role: "rowheader", scope: "row" }, make("code", {}, prefix.key), make("small", {}, kind)),
    cell("Tokens", { number: true, title: "Tokens that these requests have in common at their beginning." }, `${count(prefix.tokens)}${prefix.cut ? " or more" : ""}`),
    cell("Requests", { number: true, title: "Requests that begin with it, among the last ones." }, count(prefix.requests)),
    cell("Held by", { wide: true, title: "Workers that hold it now, and how many of its tokens, by tier." },
      `${prefix.held_by ? count(prefix.held_by) : "none"} of ${plural(fleet, "worker")}`,
      prefix.workers.length ? make("ul", { class: "holders" }, ...prefix.workers.map((one) => holder(one, prefix.tokens))) : null,
      unseen > 0 ? make("small", {}, `and ${count(unseen)} more`) : null));
}

let drawn = "";

export async function drawPrefixes(fleet) {
  const answer = await ask("/prefixes");
  const state = JSON.stringify([answer, fleet]);
  if (state === drawn) return;
  drawn = state;
  const shared = answer.prefixes.filter((prefix) => prefix.requests > 1).length;
  show(find("prefixes-summary"), answer.prompts
    ? `Of the last ${plural(answer.prompts, "prompt")}, ${shared === 1 ? "1 prefix is" : `${shared || "no"} prefixes are`} shared by several${answer.prefixes.length > shared ? "; the others stand here for one request each" : ""}.`
    : "No prompts yet.");
  find("prefix-rows").replaceChildren(...answer.prefixes.map((prefix) => row(prefix, fleet)));
}
