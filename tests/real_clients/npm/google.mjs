// The official `@google/genai` package: generateContent, token counts, models.
import { GoogleGenAI } from "@google/genai";
import { answer, key, long, model, png, tell, tool, url } from "./facts.mjs";

const at = (apiKey, more = {}) =>
  new GoogleGenAI({ apiKey, httpOptions: { baseUrl: url, ...more } });
const { models } = at(key);

const thinkingConfig = { includeThoughts: true };
const tools = [
  {
    functionDeclarations: [
      { name: tool.name, description: tool.description, parametersJsonSchema: tool.schema },
    ],
  },
];

const ask = (contents, config = {}) => ({ model, contents, config: { thinkingConfig, ...config } });

const facts = (chunks) => {
  const last = chunks.at(-1);
  const parts = chunks.flatMap((chunk) => chunk.candidates[0].content?.parts ?? []);
  const texts = (thought) =>
    parts.filter((part) => part.text && Boolean(part.thought) === thought).map((part) => part.text);
  return {
    id: last.responseId,
    text: texts(false).join(""),
    reasoning: texts(true).join("") || null,
    calls: parts
      .filter((part) => part.functionCall)
      .map((part) => [part.functionCall.name, part.functionCall.args]),
    finish: last.candidates[0].finishReason,
    prompt: last.usageMetadata.promptTokenCount,
    output:
      last.usageMetadata.candidatesTokenCount + (last.usageMetadata.thoughtsTokenCount ?? 0),
  };
};

const whole = async (body) => [await models.generateContent(body)];
const followed = async (body) => {
  const chunks = [];
  for await (const chunk of await models.generateContentStream(body)) chunks.push(chunk);
  return chunks;
};

async function toolRun(send) {
  const contents = [{ role: "user", parts: [{ text: "compare" }] }];
  const first = await send(ask(contents, { tools }));
  const parts = first.flatMap((chunk) => chunk.candidates[0].content?.parts ?? []);
  const results = parts
    .filter((part) => part.functionCall)
    .map(({ functionCall: call }) => ({
      functionResponse: { id: call.id, name: call.name, response: { output: call.args.command } },
    }));
  contents.push({ role: "model", parts }, { role: "user", parts: results.reverse() });
  const second = await send(ask(contents, { tools }));
  return [facts(first), facts(second)];
}

/** The SDK's own loop of a chat, which keeps the history itself. */
async function chat() {
  const talk = at(key).chats.create({ model, config: { thinkingConfig, tools } });
  const first = await talk.sendMessage({ message: "compare" });
  const results = first.functionCalls.map((call) => ({
    functionResponse: { id: call.id, name: call.name, response: { output: call.args.command } },
  }));
  const second = await talk.sendMessage({ message: results });
  return [facts([first]), facts([second])];
}

async function listed() {
  const names = [];
  for await (const one of await models.list()) names.push(one.name);
  return names;
}

const image = { inlineData: { mimeType: "image/png", data: png } };
const shaped = { responseMimeType: "application/json", responseJsonSchema: answer };

await tell({
  create: async () => facts(await whole(ask("hello"))),
  stream: async () => facts(await followed(ask("hello"))),
  length: async () => facts(await whole(ask("cut"))),
  length_stream: async () => facts(await followed(ask("cut"))),
  tools: () => toolRun(whole),
  tools_stream: () => toolRun(followed),
  chat,
  structured: async () => facts(await whole(ask("json", shaped))),
  image: () => whole(ask([{ role: "user", parts: [{ text: "what is it" }, image] }])),
  count: async () => (await models.countTokens({ model, contents: "hello" })).totalTokens,
  models: listed,
  model: async () => (await models.get({ model })).name,
  retried: async () =>
    facts([
      await at(key, { retryOptions: { attempts: 3 } }).models.generateContent(ask("again")),
    ]),
  auth: () => at("bk-nobody").models.generateContent(ask("hello")),
  bad_request: () => models.generateContent(ask("hello", { httpOptions: { extraBody: { contents: 7 } } })),
  not_found: () => models.embedContent({ model, contents: "hello" }),
  rate_limit: () => whole(ask("limit")),
  broken: () => whole(ask("broken")),
  overloaded: () => whole(ask("busy")),
  overflow: () => whole(ask(long)),
  overflow_stream: () => followed(ask(long)),
});
