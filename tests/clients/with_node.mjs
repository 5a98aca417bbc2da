// The Node packages `openai` and `@anthropic-ai/sdk`: every endpoint as its package asks it.
// Arguments: the server's address, then the models.

import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const [url, ...models] = process.argv.slice(2);
const ASK = [{ role: "user", content: "show the ten largest files under src" }];

function check(what, isTrue, found) {
  if (!isTrue) {
    console.error(`FAILED: ${what}: ${JSON.stringify(found)}`);
    process.exit(1);
  }
  console.log(`ok: ${what}`);
}

async function refused(what, kind, ask, word) {
  try {
    check(what, false, await ask());
  } catch (error) {
    check(what, error instanceof kind && String(error).includes(word), String(error));
  }
}

async function collect(stream) {
  const all = [];
  for await (const event of stream) all.push(event);
  return all;
}

async function withOpenAI(model) {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
  const ok = (what, isTrue, found) => check(`node openai, ${model}: ${what}`, isTrue, found);
  const list = await client.models.list();
  ok("models", list.data.some((m) => m.id === model) && (await client.models.retrieve(model)).id === model, list);

  const common = { model, messages: ASK, seed: 1, max_completion_tokens: 60 };
  const whole = await client.chat.completions.create({ ...common, logprobs: true, top_logprobs: 3 });
  const said = whole.choices[0].message.content;
  ok("chat", said && whole.usage.completion_tokens > 3, whole);
  ok("log-probabilities", whole.choices[0].logprobs.content.every((t) => t.logprob <= 0 && t.top_logprobs.length === 3), whole);
  const chunks = await collect(await client.chat.completions.create({ ...common, stream: true, stream_options: { include_usage: true } }));
  ok("chat, streamed", chunks.map((c) => c.choices[0]?.delta.content ?? "").join("") === said, chunks);
  ok("usage and cached tokens", chunks.at(-1).usage.prompt_tokens_details.cached_tokens > 0, chunks.at(-1));
  const final = await client.chat.completions.stream(common).finalChatCompletion();
  ok("chat, through the package's own helper", final.choices[0].message.content === said, final);
  const many = await Promise.all(Array.from({ length: 12 }, () => client.chat.completions.create(common)));
  ok("twelve at once say the same", many.every((a) => a.choices[0].message.content === said), many);

  const text = await client.completions.create({ model, prompt: "list files", max_tokens: 8, seed: 1 });
  const parts = await collect(await client.completions.create({ model, prompt: "list files", max_tokens: 8, seed: 1, stream: true }));
  ok("completions, whole and streamed", parts.map((c) => c.choices[0]?.text ?? "").join("") === text.choices[0].text, parts);

  const again = { model, max_output_tokens: 60, seed: 1 };
  const first = await client.responses.create({ ...again, input: "how much disk space is free" });
  ok("responses", first.output_text && (await client.responses.retrieve(first.id)).id === first.id, first);
  const after = await client.responses.create({ ...again, input: "and memory", previous_response_id: first.id });
  ok("responses, gone on with", after.output_text && (model === "default" || after.usage.input_tokens > first.usage.input_tokens), after);
  const events = await collect(await client.responses.create({ ...again, input: "how much disk space is free", stream: true }));
  const streamed = events.filter((e) => e.type === "response.output_text.delta").map((e) => e.delta).join("");
  ok("responses, streamed", streamed === first.output_text, events);

  const vectors = await client.embeddings.create({ model, input: ["list files", "free memory"] });
  const length = vectors.data[0].embedding.reduce((sum, x) => sum + x * x, 0);
  ok("embeddings (in base64, as the package asks)", Math.abs(length - 1) < 1e-4, length);
  await refused(`node openai, ${model}: too hot`, OpenAI.BadRequestError, () => client.chat.completions.create({ ...common, temperature: 1000 }), "temperature");
  await refused(`node openai, ${model}: another model`, OpenAI.NotFoundError, () => client.chat.completions.create({ ...common, model: "other" }), "other");

  // Who leaves early is let go, and the next one is answered.
  const left = await client.chat.completions.create({ ...common, stream: true });
  for await (const _ of left) break;
  ok("one that left early", (await client.chat.completions.create(common)).choices[0].message.content === said, said);
}

async function withAnthropic(model) {
  const client = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });
  const ok = (what, isTrue, found) => check(`node anthropic, ${model}: ${what}`, isTrue, found);
  const common = { model, messages: ASK, max_tokens: 60, temperature: 0 };
  const words = (message) => message.content.filter((b) => b.type === "text").map((b) => b.text).join("");
  const whole = await client.messages.create(common);
  const said = words(whole);
  ok("messages", said && whole.role === "assistant", whole);
  const final = await client.messages.stream(common).finalMessage();
  ok("messages, streamed", words(final) === said && final.usage.output_tokens === whole.usage.output_tokens, final);
  const count = await client.messages.countTokens({ model, messages: ASK });
  ok("countTokens", count.input_tokens === whole.usage.input_tokens + whole.usage.cache_read_input_tokens, count);
  const stopped = await client.messages.create({ ...common, stop_sequences: [said.slice(3, 6)] });
  ok("stop sequences", stopped.stop_reason === "stop_sequence", stopped);
  await refused(`node anthropic, ${model}: top_k`, Anthropic.BadRequestError, () => client.messages.create({ ...common, top_k: -1 }), "top_k");
}

for (const model of models) {
  await withOpenAI(model);
  await withAnthropic(model);
}
