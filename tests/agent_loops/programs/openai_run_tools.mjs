// runTools of OpenAI's npm SDK.
import OpenAI from "openai";
import { add, model, openai, population, questions, schemas, system } from "./tasks.mjs";

const client = new OpenAI(openai);
const tool = (name, run) => ({
  type: "function",
  function: { name, description: name, parameters: schemas[name], parse: JSON.parse, function: run },
});
let messages = [{ role: "system", content: system }];
let last;
for (const question of questions) {
  messages.push({ role: "user", content: question });
  const runner = client.chat.completions.runTools({
    model,
    messages,
    tools: [tool("population", population), tool("add", add)],
  });
  last = await runner.finalContent();
  messages = runner.messages;
}
console.log(last);
