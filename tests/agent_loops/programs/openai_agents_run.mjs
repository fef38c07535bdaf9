// The OpenAI Agents SDK for JavaScript; arguments: the API, and `handoff` for two agents.
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { add, model as name, openai, population, questions, schemas, system } from "./tasks.mjs";

setTracingDisabled(true);
const client = new OpenAI(openai);
const Kind = { chat: OpenAIChatCompletionsModel, responses: OpenAIResponsesModel }[process.argv[2]];
const model = new Kind(client, name);
const made = (name, execute) =>
  tool({
    name,
    description: name,
    parameters: { ...schemas[name], additionalProperties: false },
    execute,
  });
const counter = new Agent({
  name: "counter",
  instructions: system,
  model,
  tools: [made("population", population), made("add", add)],
});
let agent = counter;
if (process.argv[3] === "handoff") {
  agent = new Agent({ name: "desk", instructions: "Hand over to the counter.", model, handoffs: [counter] });
}
let given = [];
let result;
for (const content of questions) {
  result = await run(agent, [...given, { role: "user", content }]);
  given = result.history;
  agent = result.lastAgent;
}
console.log(result.finalOutput);
