// The ToolLoopAgent of the AI SDK 6; the argument names the provider.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { jsonSchema, stepCountIs, tool, ToolLoopAgent } from "ai";
import { add, anthropic, model, openai, population, questions, schemas, system } from "./tasks.mjs";

const models = {
  chat: () => createOpenAI(openai).chat(model),
  responses: () => createOpenAI(openai).responses(model),
  anthropic: () => createAnthropic({ ...anthropic, baseURL: `${anthropic.baseURL}/v1` })(model),
};
const made = (name, execute) =>
  tool({ description: name, inputSchema: jsonSchema(schemas[name]), execute });
const agent = new ToolLoopAgent({
  model: models[process.argv[2]](),
  instructions: system,
  tools: { population: made("population", population), add: made("add", add) },
  stopWhen: stepCountIs(8),
});
let messages = [];
let result;
for (const content of questions) {
  messages.push({ role: "user", content });
  result = await agent.generate({ messages });
  messages = [...messages, ...result.response.messages];
}
console.log(result.text);
