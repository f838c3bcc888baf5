// Asks a model once with an SDK of Node, or with Node's own fetch:
//
//     node sdk_programs.mjs openai|anthropic|fetch whole|stream URL MODEL [SDK'S-MAIN-FILE]
//
// The SDK has its defaults. Prints the answer, or the kind of error.

const [sdk, kind, url, model, file] = process.argv.slice(2);
const streams = kind === "stream";
const messages = [{ role: "user", content: "Is it done?" }];
const apiKey = "my-token";

async function openai() {
  const { default: OpenAI } = await import(file);
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey });
  const made = await client.chat.completions.create({ model, messages, stream: streams });
  if (!streams) return made.choices[0].message.content;
  let text = "";
  for await (const one of made) text += one.choices[0]?.delta?.content ?? "";
  return text;
}

async function anthropic() {
  const { default: Anthropic } = await import(file);
  const client = new Anthropic({ baseURL: url, apiKey });
  const asked = { model, messages, max_tokens: 100 };
  const said = await (streams ? client.messages.stream(asked).finalMessage() : client.messages.create(asked));
  return said.content.map((one) => one.text ?? "").join("");
}

async function plain() {
  const body = JSON.stringify({ model, messages });
  const headers = { "content-type": "application/json" };
  const response = await fetch(`${url}/v1/chat/completions`, { method: "POST", body, headers });
  return `${response.status} ${(await response.text()).slice(0, 60)}`;
}

try {
  console.log(await { openai, anthropic, fetch: plain }[sdk]());
} catch (error) {
  const cause = error.cause?.cause ?? error.cause;
  console.log(`${error.constructor.name}: ${error.message}${cause ? ` (${cause.code ?? cause.message})` : ""}`);
}
