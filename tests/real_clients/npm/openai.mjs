// The official `openai` package: Chat Completions, Responses, models.
import OpenAI from "openai";
import { answer, key, long, model, png, tell, tool, url } from "./facts.mjs";

const options = { baseURL: url, apiKey: key, maxRetries: 0 };
const client = new OpenAI(options);
const patient = new OpenAI({ ...options, maxRetries: 2 });
const stranger = new OpenAI({ ...options, apiKey: "bk-nobody" });

const user = (content) => ({ role: "user", content });
const chatTools = [
  {
    type: "function",
    function: { name: tool.name, description: tool.description, parameters: tool.schema },
  },
];

const chat = (text, more = {}) => ({ model, messages: [user(text)], ...more });

const chatFacts = (done) => {
  const { message, finish_reason } = done.choices[0];
  return {
    id: done.id,
    text: message.content,
    reasoning: message.reasoning_content ?? null,
    calls: (message.tool_calls ?? []).map((c) => [c.function.name, c.function.arguments]),
    finish: finish_reason,
    prompt: done.usage.prompt_tokens,
    output: done.usage.completion_tokens,
  };
};

const streamed = async (body) =>
  chatFacts(
    await client.chat.completions
      .stream({ ...body, stream_options: { include_usage: true } })
      .finalChatCompletion(),
  );

const created = async (body) => chatFacts(await client.chat.completions.create(body));

async function chatToolRun(ask) {
  const messages = [user("compare")];
  const first = await ask({ model, messages, tools: chatTools });
  const message = first.choices[0].message;
  const results = message.tool_calls.map((call) => ({
    role: "tool",
    tool_call_id: call.id,
    content: call.function.arguments,
  }));
  // Parallel results may come in any order.
  messages.push(message, ...results.reverse());
  const second = await ask({ model, messages, tools: chatTools });
  return [chatFacts(first), chatFacts(second)];
}

const responsesTools = [
  {
    type: "function",
    name: tool.name,
    description: tool.description,
    parameters: tool.schema,
    strict: false,
  },
];

const respond = (input, more = {}) => ({
  model,
  input,
  reasoning: { summary: "auto" },
  include: ["reasoning.encrypted_content"],
  ...more,
});

const responseFacts = (done) => ({
  id: done.id,
  text: done.output_text,
  reasoning:
    done.output
      .filter((item) => item.type === "reasoning")
      .flatMap((item) => item.summary.map((part) => part.text))
      .join("") || null,
  calls: done.output
    .filter((item) => item.type === "function_call")
    .map((item) => [item.name, item.arguments]),
  finish: done.incomplete_details?.reason ?? done.status,
  prompt: done.usage.input_tokens,
  output: done.usage.output_tokens,
});

const whole = (body) => client.responses.create(body);
const followed = (body) => client.responses.stream(body).finalResponse();

async function responsesToolRun(ask, chained) {
  const input = [user("compare")];
  const first = await ask(respond(input, { tools: responsesTools }));
  const results = first.output
    .filter((item) => item.type === "function_call")
    .map((item) => ({
      type: "function_call_output",
      call_id: item.call_id,
      output: item.arguments,
    }))
    .reverse();
  const more = { tools: responsesTools, ...(chained && { previous_response_id: first.id }) };
  const second = await ask(respond(chained ? results : [...input, ...first.output, ...results], more));
  return [responseFacts(first), responseFacts(second)];
}

async function kept() {
  const first = await client.responses.create(respond("hello"));
  const again = await client.responses.retrieve(first.id);
  const items = await client.responses.inputItems.list(first.id);
  await client.responses.delete(first.id);
  const gone = await client.responses.retrieve(first.id).catch((error) => error.constructor.name);
  return {
    made: responseFacts(first),
    again: responseFacts(again),
    items: items.data.map((item) => item.content[0].text),
    gone,
  };
}

const format = { type: "json_schema", name: "answer", schema: answer, strict: true };
const image = { url: `data:image/png;base64,${png}` };

await tell({
  create: () => created(chat("hello")),
  stream: () => streamed(chat("hello")),
  length: () => created(chat("cut")),
  length_stream: () => streamed(chat("cut")),
  tools: () => chatToolRun((body) => client.chat.completions.create(body)),
  tools_stream: () =>
    chatToolRun((body) =>
      client.chat.completions
        .stream({ ...body, stream_options: { include_usage: true } })
        .finalChatCompletion(),
    ),
  structured: () =>
    created(chat("json", { response_format: { type: "json_schema", json_schema: format } })),
  image: () =>
    created(
      chat([
        { type: "text", text: "what is it" },
        { type: "image_url", image_url: image },
      ]),
    ),
  models: async () => (await client.models.list()).data.map((one) => one.id),
  model: async () => (await client.models.retrieve(model)).id,
  retried: async () => chatFacts(await patient.chat.completions.create(chat("again"))),
  auth: () => stranger.chat.completions.create(chat("hello")),
  bad_request: () => client.chat.completions.create({ model, messages: "hello" }),
  not_found: () => client.embeddings.create({ model, input: "hello" }),
  rate_limit: () => client.chat.completions.create(chat("limit")),
  broken: () => client.chat.completions.create(chat("broken")),
  overloaded: () => client.chat.completions.create(chat("busy")),
  overflow: () => client.chat.completions.create(chat(long)),
  overflow_stream: () => streamed(chat(long)),

  responses_create: async () => responseFacts(await whole(respond("hello"))),
  responses_stream: async () => responseFacts(await followed(respond("hello"))),
  responses_length: async () => responseFacts(await whole(respond("cut"))),
  responses_length_stream: async () => responseFacts(await followed(respond("cut"))),
  responses_tools: () => responsesToolRun(whole, false),
  responses_tools_stream: () => responsesToolRun(followed, false),
  responses_previous: () => responsesToolRun(whole, true),
  responses_previous_stream: () => responsesToolRun(followed, true),
  responses_kept: kept,
  responses_structured: async () => responseFacts(await whole(respond("json", { text: { format } }))),
  responses_image: () =>
    whole(
      respond([
        user([
          { type: "input_text", text: "what is it" },
          { type: "input_image", image_url: image.url, detail: "auto" },
        ]),
      ]),
    ),
  responses_count: async () =>
    (await client.responses.inputTokens.count({ model, input: "hello" })).input_tokens,
  responses_auth: () => stranger.responses.create(respond("hello")),
  responses_bad_request: () => client.responses.create({ model, input: 7 }),
  responses_not_found: () => client.responses.retrieve("resp_none"),
  responses_previous_unknown: () => whole(respond("hello", { previous_response_id: "resp_none" })),
  responses_rate_limit: () => whole(respond("limit")),
  responses_broken: () => whole(respond("broken")),
  responses_overloaded: () => whole(respond("busy")),
  responses_overflow: () => whole(respond(long)),
});
