// The AI SDK's generateText with steps; the argument names the provider.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, isStepCount, jsonSchema, stepCountIs, tool } from "ai";
import { add, anthropic, model, openai, population, questions, schemas, system } from "./tasks.mjs";

const models = {
  chat: () => createOpenAI(openai).chat(model),
  responses: () => createOpenAI(openai).responses(model),
  anthropic: () => createAnthropic({ ...anthropic, baseURL: `${anthropic.baseURL}/v1` })(model),
};
const made = (name, execute) =>
  tool({ description: name, inputSchema: jsonSchema(schemas[name]), execute });
const tools = { population: made("population", population), add: made("add", add) };
let messages = [];
let result;
for (const content of questions) {
  messages.push({ role: "user", content });
  result = await generateText({
    model: models[process.argv[2]](),
    system,
    messages,
    tools,
    stopWhen: (isStepCount ?? stepCountIs)(8),
  });
  messages = [...messages, ...result.responseMessages];
}
console.log(result.text);
