// What the scripts of this folder share: where the gateway is, what is asked of it, and how the
// facts that an SDK reported are printed. Python compares them with the engine's script.

export const { URL_OF_API: url, KEY: key } = process.env;
export const model = "my-model";

export const tool = {
  name: "bash",
  description: "Run a command.",
  schema: {
    type: "object",
    properties: { command: { type: "string" } },
    required: ["command"],
  },
};

export const answer = {
  type: "object",
  properties: { key: { type: "string" }, n: { type: "integer" } },
  required: ["key", "n"],
  additionalProperties: false,
};

export const png = Buffer.from("\x89PNG not really", "latin1").toString("base64");

export const long = "word ".repeat(6000);

/** Run each case and print `{case: facts}`; what a case throws is its facts. */
export async function tell(cases) {
  const reported = {};
  for (const [name, run] of Object.entries(cases)) {
    try {
      reported[name] = await run();
    } catch (error) {
      reported[name] = {
        thrown: error.constructor.name,
        status: error.status ?? null,
        code: error.code ?? null,
        type: error.error?.error?.type ?? error.type ?? null,
        message: error.message,
        retry_after: error.headers?.get?.("retry-after") ?? null,
      };
    }
  }
  console.log(JSON.stringify(reported));
}
