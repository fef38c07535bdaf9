// The official `@anthropic-ai/sdk` package: Messages, token counts, models.
import Anthropic from "@anthropic-ai/sdk";
import { answer, key, long, model, png, tell, tool, url } from "./facts.mjs";

const options = { baseURL: url, apiKey: key, maxRetries: 0 };
const client = new Anthropic(options);
const patient = new Anthropic({ ...options, maxRetries: 2 });
const stranger = new Anthropic({ ...options, apiKey: "bk-nobody" });

const user = (content) => ({ role: "user", content });
const tools = [{ name: tool.name, description: tool.description, input_schema: tool.schema }];
const thinking = { type: "enabled", budget_tokens: 1024 };

const ask = (content, more = {}) => ({
  model,
  max_tokens: 2000,
  thinking,
  messages: [user(content)],
  ...more,
});

const facts = (done) => {
  const of = (type) => done.content.filter((block) => block.type === type);
  return {
    id: done.id,
    text: of("text").map((block) => block.text).join(""),
    reasoning: of("thinking").map((block) => block.thinking).join("") || null,
    calls: of("tool_use").map((block) => [block.name, block.input]),
    finish: done.stop_reason,
    prompt: done.usage.input_tokens + (done.usage.cache_read_input_tokens ?? 0),
    output: done.usage.output_tokens,
  };
};

const whole = (body) => client.messages.create(body);
const followed = (body) => client.messages.stream(body).finalMessage();

async function toolRun(send) {
  const messages = [user("compare")];
  const first = await send({ ...ask(""), messages, tools });
  const results = first.content
    .filter((block) => block.type === "tool_use")
    .map((block) => ({
      type: "tool_result",
      tool_use_id: block.id,
      content: JSON.stringify(block.input),
    }));
  messages.push({ role: "assistant", content: first.content }, user(results.reverse()));
  const second = await send({ ...ask(""), messages, tools });
  return [facts(first), facts(second)];
}

const image = { type: "image", source: { type: "base64", media_type: "image/png", data: png } };
const format = { type: "json_schema", schema: answer };

await tell({
  create: async () => facts(await whole(ask("hello"))),
  stream: async () => facts(await followed(ask("hello"))),
  length: async () => facts(await whole(ask("cut"))),
  length_stream: async () => facts(await followed(ask("cut"))),
  tools: () => toolRun(whole),
  tools_stream: () => toolRun(followed),
  structured: async () => facts(await whole(ask("json", { output_config: { format } }))),
  image: () => whole(ask([{ type: "text", text: "what is it" }, image])),
  count: async () =>
    (await client.messages.countTokens({ model, messages: [user("hello")], thinking })).input_tokens,
  models: async () => (await client.models.list()).data.map((one) => one.id),
  model: async () => (await client.models.retrieve(model)).id,
  retried: async () => facts(await patient.messages.create(ask("again"))),
  auth: () => stranger.messages.create(ask("hello")),
  bad_request: () => client.messages.create({ ...ask(""), messages: "hello" }),
  not_found: () => client.get("/v1/nowhere"),
  rate_limit: () => whole(ask("limit")),
  broken: () => whole(ask("broken")),
  overloaded: () => whole(ask("busy")),
  overflow: () => whole(ask(long)),
  overflow_stream: () => followed(ask(long)),
});
