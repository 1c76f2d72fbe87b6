// A Worker as Cloudflare documents it: answers with the event stream of a chat.
export default {
  async fetch(request, env) {
    const question = new URL(request.url).searchParams.get("question");
    const messages = [
      { role: "system", content: "You answer briefly." },
      { role: "user", content: question },
    ];
    const stream = await env.AI.run("@cf/meta/llama-4-scout-17b-16e-instruct", {
      messages,
      stream: true,
    });
    return new Response(stream, {
      headers: { "content-type": "text/event-stream" },
    });
  },
};
