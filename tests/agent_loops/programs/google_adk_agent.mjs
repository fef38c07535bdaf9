// Google's Agent Development Kit for JavaScript.
import { FunctionTool, Gemini, InMemoryRunner, LlmAgent } from "@google/adk";
import { z } from "zod";
import { add, google, model, population, questions, system } from "./tasks.mjs";

process.env.GOOGLE_GEMINI_BASE_URL = google.baseUrl;
const made = (name, parameters, execute) =>
  new FunctionTool({ name, description: name, parameters: z.object(parameters), execute });
const agent = new LlmAgent({
  name: "counter",
  model: new Gemini({ model, apiKey: google.apiKey }),
  instruction: system,
  tools: [
    made("population", { city: z.string() }, population),
    made("add", { a: z.number().int(), b: z.number().int() }, add),
  ],
});
const runner = new InMemoryRunner({ agent, appName: "cities" });
const session = await runner.sessionService.createSession({ appName: "cities", userId: "1" });
let last;
for (const text of questions) {
  const newMessage = { role: "user", parts: [{ text }] };
  for await (const event of runner.runAsync({ userId: "1", sessionId: session.id, newMessage })) {
    last = event;
  }
}
console.log(last.content.parts.at(-1).text);
