// node run_worker.mjs WORKER URL: runs a Worker for one request and prints its response.
// $AI is the URL of an account's AI and $TOKEN its token; env.AI is the binding a Worker has.
const AI = {
  async run(model, inputs) {
    const response = await fetch(`${process.env.AI}/run/${model}`, {
      method: "POST",
      headers: { authorization: `Bearer ${process.env.TOKEN}`, "content-type": "application/json" },
      body: JSON.stringify(inputs),
    });
    if (!response.ok) throw new Error(await response.text());
    return inputs.stream ? response.body : (await response.json()).result;
  },
};
const [worker, url] = process.argv.slice(2);
const response = await (await import(worker)).default.fetch(new Request(url), { AI });
console.log(`${response.status} ${response.headers.get("content-type")}`);
for await (const chunk of response.body) process.stdout.write(chunk);
