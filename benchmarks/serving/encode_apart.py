"""TTFT of texts beside images: with an encode worker, and with prefill that encodes.

    python -m benchmarks.serving.encode_apart [--requests 60] [--pictures 6] [--images 2]

Real processes on this machine: a gateway, a scheduler, a prefill and a decode worker of a small
random text model, whose image encoder (12 layers of 512, tiles of 256 pixels) takes most of the
work. One client sends texts, one after the other, alone and then beside clients that send pictures
of 17 tiles, none of them twice. With `encode-1` the pictures are encoded in a process of its own.
The bar is p90 beside images over p90 alone: at most 1.3 with an encode worker. All processes share
this machine's cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.report import Row, at_most, write_result
from tests.support.cluster.model_cluster import ModelCluster
from tests.support.cluster.vision_cluster import SLOW, content, picture, running_model

BAR = 1.3
MODULE = "benchmarks.serving.encode_apart"
APART, TOGETHER = "encode worker", "prefill encodes"
WORKERS = {TOGETHER: ("prefill-1", "decode-1"), APART: ("encode-1", "prefill-1", "decode-1")}
ANSWER = {"max_tokens": 4, "ignore_eos": True}
EACH_S = 0.1
SIDE = 1000  # pixels: 17 tiles
WARM_UP = 5


def ttft_s(cluster: ModelCluster, number: int) -> float:
    """Returns the seconds to the first chunk with text; no prompt is asked twice."""
    began_at = time.perf_counter()
    text = f"Question {number}: " + "what is it and why? " * 20
    for chunk in cluster.stream(text, **ANSWER):
        if any(choice["delta"].get("content") for choice in chunk["choices"]):
            return time.perf_counter() - began_at
    raise RuntimeError("a text had no answer")


def paced_ttft_s(cluster: ModelCluster, number: int) -> float:
    """Asks at most one text each EACH_S, so that texts leave time for images."""
    began_at = time.perf_counter()
    found = ttft_s(cluster, number)
    time.sleep(max(0.0, began_at + EACH_S - time.perf_counter()))
    return found


class ImageClients:
    """Send pictures until they are left, each the next one after its answer."""

    def __init__(self, cluster: ModelCluster, count: int) -> None:
        self._cluster = cluster
        self._is_ending = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]
        self.num_answers = 0

    def __enter__(self) -> ImageClients:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending.set()
        for each in self._threads:
            each.join()

    def check(self) -> None:
        if not all(each.is_alive() for each in self._threads):
            raise RuntimeError("a client of images failed")

    def _run(self, client: int) -> None:
        seed = client * 1_000_000
        while not self._is_ending.is_set():
            seed += 1
            asked = content("What is it?", picture(seed, (SIDE, SIDE)))
            self._cluster.complete(asked, **ANSWER)
            self.num_answers += 1


def measure(case: str, options: argparse.Namespace) -> Row:
    with (
        tempfile.TemporaryDirectory() as folder,
        running_model(Path(folder), SLOW, scale=4, workers=WORKERS[case]) as cluster,
    ):
        for number in range(WARM_UP):
            ttft_s(cluster, -1 - number)
        cluster.complete(content("What is it?", picture(0, (SIDE, SIDE))), **ANSWER)
        alone = [paced_ttft_s(cluster, number) for number in range(options.requests)]
        with ImageClients(cluster, options.images) as images:
            beside = list[float]()
            while len(beside) < options.requests or images.num_answers < options.pictures:
                images.check()
                beside.append(paced_ttft_s(cluster, options.requests + len(beside)))
            num_images = images.num_answers
    p90_alone, p90_beside = (statistics.quantiles(each, n=10)[-1] for each in (alone, beside))
    return {
        "case": case,
        "alone_p90_ms": round(p90_alone * 1e3, 1),
        "beside_p90_ms": round(p90_beside * 1e3, 1),
        "ratio": round(p90_beside / p90_alone, 2),
        "texts": len(beside),
        "images": num_images,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60, help="Texts of each measurement.")
    parser.add_argument("--pictures", type=int, default=6, help="Answered beside the texts.")
    parser.add_argument("--images", type=int, default=2, help="Clients that send pictures.")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = [measure(case, options) for case in (TOGETHER, APART)]
    rows = [{**each, "load_before": round(load, 1)} for each in rows]
    bars = [at_most("p90 TTFT beside images, apart", float(rows[1]["ratio"]), BAR, "x alone")]
    write_result("encode_apart", rows, bars, ["-m", MODULE, *sys.argv[1:]])


if __name__ == "__main__":
    main()
