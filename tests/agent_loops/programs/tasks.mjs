// The work that every program of this folder does: two questions, two tools.
const { URL_OPENAI, URL_ANTHROPIC, URL_GOOGLE, KEY } = process.env;
export const questions = ["How many people live in Oslo and Bergen together?", "And in Oslo alone?"];
export const system = "Answer questions about cities. Use the tools.";
export const model = "policy";
export const openai = { baseURL: URL_OPENAI, apiKey: KEY };
export const anthropic = { baseURL: URL_ANTHROPIC, apiKey: KEY };
export const google = { baseUrl: URL_GOOGLE, apiKey: KEY };
export const population = ({ city }) => ({ Oslo: "717710", Bergen: "291940" })[city];
export const add = ({ a, b }) => String(a + b);
export const schemas = {
  population: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  add: {
    type: "object",
    properties: { a: { type: "integer" }, b: { type: "integer" } },
    required: ["a", "b"],
  },
};
