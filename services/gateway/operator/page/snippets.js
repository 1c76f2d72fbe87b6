// The current request as a command or a program. Keys are not in it.

export function asCurl(body) {
  const json = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl -N ${location.origin}/v1/chat/completions \\\n  -H "Authorization: Bearer $HEARTH_API_KEY" \\\n`
    + `  -H 'Content-Type: application/json' \\\n  -d '${json}'`;
}

export function asPython(body) {
  const { model, messages, stream, stream_options: options, ...fields } = body;
  const given = { model, messages, stream, stream_options: options, ...known(fields, true) };
  const others = known(fields, false);
  const lines = Object.entries(given).filter(([, value]) => value !== undefined)
    .map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(others).length) lines.push(`    extra_body=${literal(others)},`);
  return "import os\n\nfrom openai import OpenAI\n\n"
    + `client = OpenAI(base_url="${location.origin}/v1", api_key=os.environ["HEARTH_API_KEY"])\n`
    + `chunks = client.chat.completions.create(\n${lines.join("\n")}\n)\n`
    + "for chunk in chunks:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or \"\", end=\"\", flush=True)\n";
}

const KNOWN = new Set(["temperature", "top_p", "max_tokens", "seed", "stop", "tools", "tool_choice", "response_format"]);

const known = (fields, isKnown) =>
  Object.fromEntries(Object.entries(fields).filter(([name]) => KNOWN.has(name) === isKnown));

// JSON as Python. Its strings have the same escapes.
function literal(value) {
  if (value == null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    const entries = Object.entries(value).filter(([, each]) => each !== undefined);
    return `{${entries.map(([name, each]) => `${JSON.stringify(name)}: ${literal(each)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

export function asJavaScript(body) {
  return 'import OpenAI from "openai";\n\n'
    + `const client = new OpenAI({ baseURL: "${location.origin}/v1", apiKey: process.env.HEARTH_API_KEY });\n`
    + `const chunks = await client.chat.completions.create(${JSON.stringify(body, null, 2)});\n`
    + 'for await (const chunk of chunks) process.stdout.write(chunk.choices[0]?.delta.content ?? "");\n';
}
