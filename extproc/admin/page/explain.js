// The form that explains a pasted request.

import { ask, find, make } from "./dom.js";
import { candidates, sentence } from "./explanation.js";

const EXAMPLE = [{ role: "system", content: "You are a patient assistant." }, { role: "user", content: "Why is the same prefix answered faster the second time?" }];

function fault(text) {
  find("explain-fault").textContent = text;
  find("explain-body").setAttribute("aria-invalid", String(Boolean(text)));
  if (text) find("explain-body").focus();
}

async function explain(event) {
  event.preventDefault();
  fault("");
  let body;
  try {
    body = JSON.parse(find("explain-body").value);
  } catch (error) {
    fault(`This is not JSON: ${error.message}`);
    return;
  }
  try {
    const decision = await ask("/explain", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ path: find("explain-path").value, headers: {}, body }),
    });
    const answer = find("explain-answer");
    answer.replaceChildren(make("h3", {}, "Now"), sentence(decision, "It would go to"), ...candidates(decision).filter(Boolean));
    answer.hidden = false;
    answer.focus();
  } catch (error) {
    fault(error.message);
  }
}

export function startExplain(model) {
  find("explain-form").addEventListener("submit", explain);
  find("explain-example").addEventListener("click", () => {
    find("explain-path").selectedIndex = 0;
    find("explain-body").value = JSON.stringify({ model: model(), max_tokens: 16, messages: EXAMPLE }, null, 2);
  });
}
