// The tool runner of Anthropic's npm SDK, which continues a thread on the server.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { add, anthropic, model, population, questions, schemas, system } from "./tasks.mjs";

const client = new Anthropic(anthropic);
const tool = (name, run) => betaTool({ name, description: name, inputSchema: schemas[name], run });
const last = await client.beta.messages.toolRunner({
  model,
  max_tokens: 2000,
  system,
  messages: [{ role: "user", content: questions[0] }],
  tools: [tool("population", population), tool("add", add)],
});
console.log(last.content.at(-1).text);
