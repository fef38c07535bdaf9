// A Mastra agent on the AI SDK's OpenAI provider.
import { createOpenAI } from "@ai-sdk/openai";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";
import { add, model, openai, population, questions, system } from "./tasks.mjs";

const made = (id, shape, run) =>
  createTool({ id, description: id, inputSchema: z.object(shape), execute: async (input) => run(input.context ?? input) });
const agent = new Agent({
  id: "counter",
  name: "counter",
  instructions: system,
  model: createOpenAI(openai).chat(model),
  tools: {
    population: made("population", { city: z.string() }, population),
    add: made("add", { a: z.number().int(), b: z.number().int() }, add),
  },
});
let messages = [];
let result;
for (const content of questions) {
  messages.push({ role: "user", content });
  result = await agent.generate(messages, { maxSteps: 8 });
  messages = [...result.messages];
}
console.log(result.text);
