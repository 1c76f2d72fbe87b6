// The words for an answer that went on at another worker, of `{from_workers, cause, worker, pause_s}`.

const CAUSES = { worker_failed: "a failure of", step_failed: "a failed step of", context_full: "the full KV cache of" };

export const pauseText = (value) => `${value.toFixed(value < 1 ? 2 : 1)} s`;

export const and = (texts) => [texts.slice(0, -1).join(", "), ...texts.slice(-1)].filter(Boolean).join(" and ");

// Such as "survived the loss of decode-2 and decode-1; pause 1.2 s and 2.9 s".
export function survived(moves) {
  const workers = new Map();
  for (const { cause, from_workers: left } of moves) {
    const text = CAUSES[cause] ?? "the loss of";
    workers.set(text, [...(workers.get(text) ?? []), ...left]);
  }
  const causes = [...workers].map(([text, names]) => `${text} ${and(names)}`);
  return `survived ${and(causes)}; pause ${and(moves.map((each) => pauseText(each.pause_s)))}`;
}
